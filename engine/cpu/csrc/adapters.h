// Low-rank adapters of a product: `shrink` multiplies a row with A of its slot, `expand` the result with B.
// Reference: engine/kernels/adapter_weights.py.
//
// A row's sums are added in one order, whatever other rows there are. Neighbouring rows of one slot, such as those of a
// prompt, shrink together, so that A is read once for all of them.
//
// B is stored by blocks of outputs, then by slot, so that what the rows of a batch need for some outputs lies together.
//
// Shapes: S slots, P parts of the outputs, R rank of a slot, I inputs, O outputs, W = kBlockOutputs, K ranks in a word.
#pragma once

#include "simd.h"

namespace adapters {

constexpr int kBlockOutputs = 16;     // of B
constexpr int kRows = 4, kRanks = 4;  // computed together: 16 sums, of 32 registers
// Of one row: as many sums as hide the latency of adding to each, or as fill half of the registers.
constexpr int kFewRanks = 8, kManyRanks = kLanes == 16 ? 16 : kFewRanks;

// `ProductSlots` of engine/cpu/adapters.py has the same fields.
struct Slots {
  const void *down, *up;             // [S, P * R, I] and [O / W, S, R / K, W, K]
  const int32_t *ranks, *part_ends;  // [S, P] and [P]
  int32_t inputs, outputs, parts, rank, slots;

  int inner_width() const { return parts * rank; }

  bool changes(int64_t slot) const {  // whether the slot's adapter changes this product
    return std::any_of(ranks + slot * parts, ranks + (slot + 1) * parts, [](int32_t rank) { return rank > 0; });
  }

  int part_of(int output) const {
    int part = 0;
    while (output >= part_ends[part]) ++part;
    return part;
  }
};

// inner[n * stride + j] = x[n] . a[j], for N rows and `count` ranks of a. `values_at(n, i)` points to as many values of
// row n, from input i on, as fill a vector. For a single row, the `MaxRanks` ranks that follow in memory are prefetched:
// they are this row's or, with a slot for each row, mostly the next row's.
template <class T, int N, int MaxRanks, class ValuesAt>
inline void shrink_ranks(const ValuesAt& values_at, const typename T::Stored* a, int inputs, int count, float* inner,
                         int stride) {
  constexpr int kWidth = T::kPerWord * kLanes;
  Floats of_inputs[N][MaxRanks] = {};
  int i = 0;
  const auto add_inputs = [&](int ranks) __attribute__((always_inline)) {
    for (; i + kWidth <= inputs; i += kWidth) {
      Words of_x[N];
      for (int n = 0; n < N; ++n) of_x[n] = load<Words>(values_at(n, i));
      for (int j = 0; j < ranks; ++j) {
        const auto* const from = a + int64_t(j) * inputs + i;
        if (N == 1) __builtin_prefetch(from + int64_t(MaxRanks) * inputs, 0, 2);
        const Words of_a = load<Words>(from);
        for (int n = 0; n < N; ++n) of_inputs[n][j] = multiply_add<T>(of_inputs[n][j], of_x[n], of_a);
      }
    }
  };
  if (count == MaxRanks) add_inputs(MaxRanks);  // the sums stay in registers
  else add_inputs(count);
  constexpr int kAtOnce = std::min(MaxRanks, kLanes);
  for (int n = 0; n < N; ++n)
    for (int first = 0; first < count; first += kAtOnce) {
      Floats totals = sums<kAtOnce>(of_inputs[n] + first);
      const int last = std::min(count, first + kAtOnce);
      for (int rest = i; rest < inputs; rest += kLanes) {
        const int left = std::min<int>(kLanes, inputs - rest);
        const Floats of_x = load_floats(values_at(n, rest), left);
        for (int j = first; j < last; ++j)
          totals[j - first] += sum(of_x * load_floats(a + int64_t(j) * inputs + rest, left));
      }
      store_floats(inner + n * stride + first, totals, last - first);
    }
}

// inner[n, p * R + j] = x[n] . A[p, j], for N rows of one slot.
template <class T, int N, class ValuesAt>
inline void shrink(const Slots& all, int64_t slot, const ValuesAt& values_at, float* inner) {
  constexpr int kFew = N == 1 ? kFewRanks : kRanks, kMany = N == 1 ? kManyRanks : kRanks;
  for (int part = 0; part < all.parts; ++part) {
    const int rank = all.ranks[slot * all.parts + part], first = part * all.rank;
    const auto* const a =
        static_cast<const typename T::Stored*>(all.down) + (slot * all.inner_width() + first) * all.inputs;
    for (int j = 0; j < rank;) {
      const auto* const of_j = a + int64_t(j) * all.inputs;
      float* const to = inner + first + j;
      const int left = rank - j;
      if (left >= kMany) shrink_ranks<T, N, kMany>(values_at, of_j, all.inputs, kMany, to, all.inner_width());
      else shrink_ranks<T, N, kFew>(values_at, of_j, all.inputs, std::min(kFew, left), to, all.inner_width());
      j += left >= kMany ? kMany : kFew;
    }
  }
}

// Shrinks rows [row, end), except those of slot 0. `values_at(row, i)` as in `shrink_ranks`.
template <class T, class ValuesAt>
inline void shrink_rows(const Slots& all, const int64_t* slots, int row, int end, const ValuesAt& values_at,
                        float* inner) {
  while (row < end) {
    const int64_t slot = slots[row];
    const bool is_run = row + kRows <= end && std::count(slots + row, slots + row + kRows, slot) == kRows;
    const auto values_from_row = [&](int n, int i) { return values_at(row + n, i); };
    float* const to = inner + int64_t(row) * all.inner_width();
    if (slot && is_run) shrink<T, kRows>(all, slot, values_from_row, to);
    else if (slot) shrink<T, 1>(all, slot, values_from_row, to);
    row += is_run ? kRows : 1;
  }
}

// Returns the cache lines that B of a rank has for a block of outputs.
template <class T> inline int lines_of(int rank) { return (rank + T::kPerWord - 1) / T::kPerWord; }

// Returns where the words of B lie for a slot and kLanes outputs from `output` on. Those of the ranks that follow are
// kBlockOutputs further on each.
template <class T> inline const uint32_t* up_words(const Slots& all, int64_t slot, int output) {
  const int64_t run = lines_of<T>(all.rank) * kBlockOutputs;
  return static_cast<const uint32_t*>(all.up) + (output / kBlockOutputs * int64_t(all.slots) + slot) * run +
         output % kBlockOutputs;
}

// Returns y + inner . B for kLanes of a row's outputs, from a multiple of kLanes on. Only those of the part are of use.
template <class T>
inline Floats expand(const Slots& all, int64_t slot, const float* inner, int part, int output, Floats y) {
  const int rank = all.ranks[slot * all.parts + part];
  const uint32_t* words = up_words<T>(all, slot, output);
  inner += part * all.rank;
  for (int j = 0; j < rank; j += T::kPerWord, words += kBlockOutputs) {
    const Words of_b = load<Words>(words);
    if constexpr (T::kPerWord == 1) {
      y += splat(inner[j]) * (Floats)of_b;
    } else {
      y += splat(inner[j]) * (Floats)(of_b << 16);
      if (j + 1 < rank) y += splat(inner[j + 1]) * (Floats)(of_b & 0xffff0000u);
    }
  }
  return y;
}

// Prefetches lines [begin, end) of what `expand` will read for a block of outputs, as far as the slot's rank goes. GCC
// removes calls of functions that only prefetch, so this must be inlined.
template <class T>
__attribute__((always_inline)) inline void prefetch(const Slots& all, int64_t slot, int part, int output, int begin,
                                                    int end) {
  const uint32_t* const words = up_words<T>(all, slot, output);
  end = std::min(end, lines_of<T>(all.ranks[slot * all.parts + part]));
  for (int line = begin; line < end; ++line) __builtin_prefetch(words + line * kBlockOutputs, 0, 2);
}

}  // namespace adapters
