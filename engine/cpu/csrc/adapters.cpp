// Adds low-rank adapters to the rows of a product, each row with the matrices of its slot. Reference:
// engine/kernels/adapter_weights.py.
//
// A row's sums are added in one order, whatever other rows there are. Neighbouring rows of one slot, such as those of a
// prompt, are computed together, so that its matrices are read once for all of them.
//
// Shapes: T rows, I inputs, O outputs, P parts of the outputs, R rank of a slot.
#include "simd.h"
#include "thread_team.h"

namespace {

constexpr int kRows = 4, kRanks = 4;  // computed together: 16 sums, of 32 registers
constexpr int kMaxRank = 512;

struct Adapters {
  uint16_t* y;          // [T, O]
  const uint16_t* x;    // [T, I]
  const int64_t* slots; // [T], 0: none
  const uint16_t *down, *up;  // [S, P * R, I] and [S, R, O]
  const int32_t *ranks, *part_ends;  // [S, P] and [P]
  int64_t y_stride, x_stride;
  int32_t inputs, outputs, parts, rank;
};

// inner[n][j] = x[n] . a[j], for `N` rows and up to `kRanks` ranks.
template <int N> void shrink(const Adapters& all, const uint16_t* x, const uint16_t* a, int count, float (*inner)[kMaxRank]) {
  constexpr int kWidth = 2 * kLanes;
  const int64_t inputs = all.inputs;
  Floats sums[N][kRanks] = {};
  int i = 0;
  if (count == kRanks) {
    for (; i + kWidth <= inputs; i += kWidth) {
      Words of_x[N];
      for (int n = 0; n < N; ++n) of_x[n] = load<Words>(x + n * all.x_stride + i);
      for (int j = 0; j < kRanks; ++j) {
        const Words of_a = load<Words>(a + j * inputs + i);
        for (int n = 0; n < N; ++n) sums[n][j] = multiply_add<BFloat16>(sums[n][j], of_x[n], of_a);
      }
    }
  } else {
    for (; i + kWidth <= inputs; i += kWidth)
      for (int j = 0; j < count; ++j)
        for (int n = 0; n < N; ++n)
          sums[n][j] = multiply_add<BFloat16>(sums[n][j], load<Words>(x + n * all.x_stride + i), load<Words>(a + j * inputs + i));
  }
  for (int n = 0; n < N; ++n)
    for (int j = 0; j < count; ++j) {
      float total = sum(sums[n][j]);
      for (int rest = i; rest < inputs; rest += kLanes) {
        const int left = std::min<int>(kLanes, inputs - rest);
        total += sum(load_floats(x + n * all.x_stride + rest, left) * load_floats(a + j * inputs + rest, left));
      }
      inner[n][j] = total;
    }
}

// y[n][o] += inner[n] . b[.][o], for the outputs of a part.
template <int N>
void expand(const Adapters& all, uint16_t* y, const uint16_t* b, int rank, int begin, int end, const float (*inner)[kMaxRank]) {
  for (int o = begin; o < end; o += kLanes) {
    const int count = end - o;
    Floats totals[N];
    for (int n = 0; n < N; ++n) totals[n] = load_floats(y + n * all.y_stride + o, count);
    for (int j = 0; j < rank; ++j) {
      const Floats of_b = load_floats(b + int64_t(j) * all.outputs + o, count);
      for (int n = 0; n < N; ++n) totals[n] += inner[n][j] * of_b;
    }
    for (int n = 0; n < N; ++n) store_floats(y + n * all.y_stride + o, totals[n], count);
  }
}

template <int N> void add_to_rows(const Adapters& all, int row) {
  float inner[N][kMaxRank];
  const int64_t slot = all.slots[row];
  const uint16_t* const x = all.x + row * all.x_stride;
  uint16_t* const y = all.y + row * all.y_stride;
  for (int part = 0, begin = 0; part < all.parts; begin = all.part_ends[part++]) {
    const int rank = all.ranks[slot * all.parts + part];
    if (!rank) continue;
    const uint16_t* const a = all.down + (slot * all.parts + part) * all.rank * all.inputs;
    for (int j = 0; j < rank; j += kRanks)
      shrink<N>(all, x, a + int64_t(j) * all.inputs, std::min(kRanks, rank - j),
                reinterpret_cast<float(*)[kMaxRank]>(&inner[0][j]));
    expand<N>(all, y, all.up + slot * all.rank * all.outputs, rank, begin, all.part_ends[part], inner);
  }
}

}  // namespace

extern "C" void penstock_add_adapters(
    uint16_t* y, const uint16_t* x, const int64_t* slots, const uint16_t* down, const uint16_t* up, const int32_t* ranks,
    const int32_t* part_ends, int64_t y_stride, int64_t x_stride, int32_t rows, int32_t inputs, int32_t outputs,
    int32_t parts, int32_t rank, int32_t num_threads) {
  const Adapters all{y, x, slots, down, up, ranks, part_ends, y_stride, x_stride, inputs, outputs, parts, rank};
  thread_team::parallel_for(num_threads, (rows + kRows - 1) / kRows, [&](thread_team::Tasks& tasks) {
    for (int task; tasks.take(task);)
      for (int row = task * kRows, end = std::min(rows, row + kRows); row < end;) {
        if (!slots[row]) {
          ++row;
        } else if (row + kRows == end && slots[row] == slots[row + 1] && slots[row] == slots[row + 2] &&
                   slots[row] == slots[row + 3]) {
          add_to_rows<kRows>(all, row);
          row += kRows;
        } else {
          add_to_rows<1>(all, row++);
        }
      }
  });
}
