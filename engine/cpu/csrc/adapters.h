// Low-rank adapters of a product: `shrink` multiplies a row with A of its slot, `expand` the result with B.
// Reference: engine/kernels/adapter_weights.py.
//
// A row's sums are added in one order, whatever other rows there are. Neighbouring rows of one slot, such as those of a
// prompt, shrink together, so that A is read once for all of them.
//
// Shapes: S slots, P parts of the outputs, R rank of a slot, I inputs, O outputs.
#pragma once

#include "simd.h"

namespace adapters {

constexpr int kRows = 4, kRanks = 4;  // computed together: 16 sums, of 32 registers
constexpr int kRanksOfOneRow = 8;     // as many sums as hide the latency of adding to each

// `ProductSlots` of engine/cpu/adapters.py has the same fields.
struct Slots {
  const void *down, *up;             // [S, P * R, I] and [S, R, O]
  const int32_t *ranks, *part_ends;  // [S, P] and [P]
  int32_t inputs, outputs, parts, rank;

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
// row n, from input i on, as fill a vector.
template <class T, int N, int MaxRanks, class ValuesAt>
inline void shrink_ranks(const ValuesAt& values_at, const typename T::Stored* a, int inputs, int count, float* inner,
                         int stride) {
  constexpr int kWidth = T::kPerWord * kLanes;
  Floats sums[N][MaxRanks] = {};
  int i = 0;
  const auto add_inputs = [&](int ranks) __attribute__((always_inline)) {
    for (; i + kWidth <= inputs; i += kWidth) {
      Words of_x[N];
      for (int n = 0; n < N; ++n) of_x[n] = load<Words>(values_at(n, i));
      for (int j = 0; j < ranks; ++j) {
        const Words of_a = load<Words>(a + int64_t(j) * inputs + i);
        for (int n = 0; n < N; ++n) sums[n][j] = multiply_add<T>(sums[n][j], of_x[n], of_a);
      }
    }
  };
  if (count == MaxRanks) add_inputs(MaxRanks);  // the sums stay in registers
  else add_inputs(count);
  for (int n = 0; n < N; ++n)
    for (int j = 0; j < count; ++j) {
      float total = sum(sums[n][j]);
      for (int rest = i; rest < inputs; rest += kLanes) {
        const int left = std::min<int>(kLanes, inputs - rest);
        total += sum(load_floats(values_at(n, rest), left) * load_floats(a + int64_t(j) * inputs + rest, left));
      }
      inner[n * stride + j] = total;
    }
}

// inner[n, p * R + j] = x[n] . A[p, j], for N rows of one slot.
template <class T, int N, class ValuesAt>
inline void shrink(const Slots& all, int64_t slot, const ValuesAt& values_at, float* inner) {
  constexpr int kAtOnce = N == 1 ? kRanksOfOneRow : kRanks;
  for (int part = 0; part < all.parts; ++part) {
    const int rank = all.ranks[slot * all.parts + part], first = part * all.rank;
    const auto* const a =
        static_cast<const typename T::Stored*>(all.down) + (slot * all.inner_width() + first) * all.inputs;
    for (int j = 0; j < rank; j += kAtOnce)
      shrink_ranks<T, N, kAtOnce>(values_at, a + int64_t(j) * all.inputs, all.inputs, std::min(kAtOnce, rank - j),
                                  inner + first + j, all.inner_width());
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

// Returns y + inner . B for `count` of a row's outputs, of which `output` is the first; all belong to one part.
template <class T>
inline Floats expand(const Slots& all, int64_t slot, const float* inner, int output, int count, Floats y) {
  const int part = all.part_of(output);
  inner += part * all.rank;
  const auto* b = static_cast<const typename T::Stored*>(all.up) + slot * all.rank * all.outputs + output;
  for (int j = 0, rank = all.ranks[slot * all.parts + part]; j < rank; ++j, b += all.outputs)
    y += inner[j] * load_floats(b, count);
  return y;
}

// Prefetches a share of what `expand` will read for a cache line of outputs. GCC removes calls of functions that only
// prefetch, so this must be inlined.
template <class T>
__attribute__((always_inline)) inline void prefetch(const Slots& all, int64_t slot, int output, int share,
                                                    int num_shares) {
  const int rank = all.ranks[slot * all.parts + all.part_of(output)];
  const auto* b = static_cast<const typename T::Stored*>(all.up) + slot * all.rank * all.outputs + output;
  for (int j = rank * share / num_shares; j < rank * (share + 1) / num_shares; ++j)
    __builtin_prefetch(b + int64_t(j) * all.outputs, 0, 2);
}

}  // namespace adapters
