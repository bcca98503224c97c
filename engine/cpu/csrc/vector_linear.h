// Matrix products with packed weights in vector registers: in float32, and for processors without AMX tiles in bf16.
// The contract is that of linear.h's `Blocks`: an output is one running sum over the inputs in order (one for each group
// of a quantized weight), whatever the number of rows and threads, so a row's result depends only on the row, bit for
// bit.
//
// In bf16 a weight's word is a pair of neighbouring inputs. Where an instruction multiplies such pairs (simd.h), rows are
// read as they are; elsewhere pairs of the weight are split into floats in registers, and rows are widened beforehand.
// Sums of up to kRowsAtOnce rows and kPanelsAtOnce panels stay in registers. Where rows are more, inputs are taken in
// chunks, so that the chunk of the panels stays in L1 while the rows pass; quantized panels are decoded there.
#pragma once

#include "code_values.h"
#include "packed_weight.h"
#include "simd.h"

#include <algorithm>

namespace linear {

constexpr int kVectorsPerPanel = kSide / kLanes;
constexpr int kRowsAtOnce = kLanes == 16 ? 8 : 4;    // divides a strip's rows
constexpr int kPanelsAtOnce = kLanes == 16 ? 2 : 1;  // else registers do not suffice

// How the inputs of a dtype T are multiplied: `Weight` holds `kLanes` outputs' weights of one step, `Row` a row's inputs
// of one step, for all of these outputs.
template <class T> struct Products;

template <> struct Products<Float32> {
  typedef float RowValue;
  static constexpr bool kReadsStrips = true;  // rows are read as they are
  static constexpr int kStepInputs = 1, kRowStep = 1, kRowStride = kDepth, kRowTileStride = kTile;
  // With 32 registers a weight serves so many rows that it may come from L2, and sums stay in registers for longer.
  static constexpr int kChunkTiles = kLanes == 16 ? 64 : 4;
  struct Weight {
    Floats value;
    Weight() = default;
    explicit Weight(const float* from) : value(load<Floats>(from)) {}
  };
  struct Row {
    Floats value;
    explicit Row(const float* row) : value(splat(*row)) {}
  };
  static Floats add(Floats total, const Row& row, const Weight& weight) { return total + weight.value * row.value; }
};

template <> struct Products<BFloat16> {
  static constexpr int kStepInputs = 2, kChunkTiles = 8;  // of both panels of a pair: 16 KB
#if defined(PENSTOCK_DOTS)
  typedef uint32_t RowValue;  // a pair of bf16
  static constexpr bool kReadsStrips = true;
  static constexpr int kRowStep = 1, kRowStride = kDepth / 2, kRowTileStride = kTile / 2;
  struct Weight {
    Words pair;
    Weight() = default;
    explicit Weight(const uint16_t* from) : pair(load<Words>(from)) {}
  };
  struct Row {
    Words pair;
    explicit Row(const RowValue* row) : pair(Words{} + *row) {}
  };
  static Floats add(Floats total, const Row& row, const Weight& weight) {
    return multiply_add<BFloat16>(total, row.pair, weight.pair);
  }
#else
  typedef float RowValue;
  static constexpr bool kReadsStrips = false;
  static constexpr int kRowStep = 2, kRowStride = kDepth, kRowTileStride = kRowsAtOnce * kDepth;
  struct Weight {
    Floats even, odd;
    Weight() = default;
    explicit Weight(const uint16_t* from) {
      const Words pair = load<Words>(from);
      even = (Floats)(pair << 16), odd = (Floats)(pair & 0xffff0000u);
    }
  };
  struct Row {
    Floats even, odd;
    explicit Row(const RowValue* row) : even(splat(row[0])), odd(splat(row[1])) {}
  };
  static Floats add(Floats total, const Row& row, const Weight& weight) {
    total += weight.even * row.even;
    return total + weight.odd * row.odd;
  }
#endif
};

// What memory should bring while a chunk is multiplied: the chunk that follows, a few lines of both its panels at every
// step of a tile.
struct LinesAhead {
  const char *first = nullptr, *second = nullptr;
  int per_step = 0;  // of each panel, at most 2

  void prefetch_step() {
    if (!per_step) return;
    __builtin_prefetch(first, 0, 2);
    __builtin_prefetch(second, 0, 2);
    if (per_step > 1) {
      __builtin_prefetch(first + 64, 0, 2);
      __builtin_prefetch(second + 64, 0, 2);
    }
    first += 64 * per_step, second += 64 * per_step;
  }
};

// Computes sums[r][16 c : 16 c + 16] (+)= rows @ panels over `tiles` tiles, with rows of kBlock floats.
template <class T, int R, int C>
inline void multiply_tiles(float* sums, bool adds, const typename Products<T>::RowValue* rows,
                           const typename T::Stored* first, const typename T::Stored* second, int tiles,
                           LinesAhead& lines) {
  typedef Products<T> P;
  constexpr int V = kVectorsPerPanel;
  LinesAhead ahead = lines;
  Floats total[R][C][V];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v)
        total[r][c][v] = adds ? load<Floats>(sums + r * kBlock + c * kSide + v * kLanes) : Floats{};
  for (int tile = 0; tile < tiles; ++tile, rows += P::kRowTileStride, first += kTile, second += kTile)
    for (int step = 0; step < kDepth / P::kStepInputs; ++step) {
      ahead.prefetch_step();
      const typename T::Stored* const from[2] = {first + step * kSide * P::kStepInputs,
                                                 second + step * kSide * P::kStepInputs};
      typename P::Weight weights[C][V];
      for (int c = 0; c < C; ++c)
        for (int v = 0; v < V; ++v) weights[c][v] = typename P::Weight(from[c] + v * kLanes * P::kStepInputs);
      for (int r = 0; r < R; ++r) {
        const typename P::Row row(rows + r * P::kRowStride + step * P::kRowStep);
        for (int c = 0; c < C; ++c)
          for (int v = 0; v < V; ++v) total[r][c][v] = P::add(total[r][c][v], row, weights[c][v]);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v) store(sums + r * kBlock + c * kSide + v * kLanes, total[r][c][v]);
  lines = ahead;
}

template <class T>
using MultiplyTiles = void (*)(float*, bool, const typename Products<T>::RowValue*, const typename T::Stored*,
                               const typename T::Stored*, int, LinesAhead&);

template <class T, int C> inline MultiplyTiles<T> multiply_rows(int rows) {
  static_assert(kRowsAtOnce == 8 || kRowsAtOnce == 4);
  switch (rows) {
    case 1: return multiply_tiles<T, 1, C>;
    case 2: return multiply_tiles<T, 2, C>;
    case 3: return multiply_tiles<T, 3, C>;
    case 4: return multiply_tiles<T, 4, C>;
#if defined(__AVX512F__)
    case 5: return multiply_tiles<T, 5, C>;
    case 6: return multiply_tiles<T, 6, C>;
    case 7: return multiply_tiles<T, 7, C>;
    default: return multiply_tiles<T, 8, C>;
#else
    default: __builtin_unreachable();
#endif
  }
}

// Calls finish(row, output, sums of kLanes outputs from there, is_pair, sums of the same outputs of the second panel) for
// every row, as linear.h's `Blocks` does. If it has one, finish.prefetch(row, count, output, begin, end, steps) is called
// before `count` rows are multiplied with steps [begin, end) of their inputs: it may prefetch as large a share of what
// finishing these rows will read.
template <class T, class Finish> class VectorBlocks {
 public:
  typedef typename T::Stored Stored;
  VectorBlocks(const PackedWeight& weight, const Stored* strips, int pair_distance, const Finish& finish)
      : weight(weight), strips(strips), finish(finish), pair_distance(pair_distance), steps(weight.inputs / kDepth),
        stride(pair_distance == 1 ? 2 : 1) {}

  // Multiplies rows [start, stop) with panels [from, to). `start` is a multiple of a strip's rows.
  void run(int start, int stop, int from, int to) {
    if constexpr (sizeof(Stored) == sizeof(uint16_t)) {
      if (weight.kind == kInt4) return run_codes(Int4Values(weight.kind), start, stop, from, to);
      if (weight.kind != kPlain) return run_codes(ByteValues(weight.kind), start, stop, from, to);
    }
    run_plain(start, stop, from, to);
  }

 private:
  typedef typename Products<T>::RowValue RowValue;
  static constexpr int kChunkTiles = Products<T>::kChunkTiles;

  const PackedWeight& weight;
  const Stored* const strips;
  const Finish& finish;
  const int pair_distance, steps, stride;

  struct Buffers {
    Lines<float> sums, totals;  // [rows][kBlock]
    Lines<float> rows;          // the rows at hand, widened
    Lines<float> input_sums;    // [rows][groups]
    alignas(64) uint16_t panels[2][Products<BFloat16>::kChunkTiles * kTile];  // decoded
  };
  static Buffers& buffers(size_t rows) {
    static thread_local Buffers* const kept = new Buffers;  // threads of the team never end
    if (kept->sums.size() < rows * kBlock) kept->sums.resize(rows * kBlock), kept->totals.resize(rows * kBlock);
    return *kept;
  }

  bool is_pair(int p, int to) const { return pair_distance > 1 || p + 1 < to; }

  void run_plain(int start, int stop, int from, int to) const {
    Buffers& memory = buffers(stop - start);
    const int64_t panel = int64_t(steps) * kTile;
    const int chunk = stop - start <= kRowsAtOnce ? steps : kChunkTiles, last = weight.outputs / kSide;
    for (int p = from; p < to; p += stride) {
      const Stored* first = static_cast<const Stored*>(weight.values) + p * panel;
      const Stored* second = is_pair(p, to) ? first + pair_distance * panel : nullptr;
      for (int step = 0; step < steps; step += chunk) {
        // What follows is the next chunk of this pair, or the first one of the next pair, which may be another task's.
        const bool ends = step + chunk >= steps, has_next = p + stride + pair_distance < last;
        const Stored* const next = ends ? first + stride * panel : first + (step + chunk) * kTile;
        multiply(memory, p, start, stop, step, std::min(chunk, steps - step), first + step * kTile,
                 second ? second + step * kTile : nullptr, step > 0, ends && !has_next ? nullptr : next,
                 pair_distance * panel);
      }
      for (int row = start; row < stop; ++row) finish_row(memory.sums.data(), row, start, p, second);
    }
  }

  // Adds the products of rows [start, stop) with a chunk of a pair of panels, of which `p` is the first, to the sums.
  // `next` is the chunk that follows in the first panel, or null; that of the second is `to_second` values further on.
  void multiply(Buffers& memory, int p, int start, int stop, int step, int tiles, const Stored* first, const Stored* second,
                bool adds, const Stored* next = nullptr, int64_t to_second = 0) const {
    float* sums = memory.sums.data();
    const int blocks = (stop - start + kRowsAtOnce - 1) / kRowsAtOnce;
    LinesAhead ahead, none;
    if (next && blocks <= kDepth / 2)
      ahead = {reinterpret_cast<const char*>(next), reinterpret_cast<const char*>(next + to_second), 1};
    for (int row = start; row < stop; row += kRowsAtOnce, sums += kRowsAtOnce * kBlock) {
      const int count = std::min(kRowsAtOnce, stop - row);
      const RowValue* const rows = values_of(memory, row, count, step, tiles);
      if constexpr (requires { finish.prefetch(row, count, p, step, step, steps); })
        finish.prefetch(row, count, p * kSide, step, step + tiles, steps);
      LinesAhead& lines = row == start ? ahead : none;
      if (kPanelsAtOnce == 2 && second) {
        multiply_rows<T, kPanelsAtOnce>(count)(sums, adds, rows, first, second, tiles, lines);
        continue;
      }
      multiply_rows<T, 1>(count)(sums, adds, rows, first, first, tiles, lines);
      if (second) multiply_rows<T, 1>(count)(sums + kSide, adds, rows, second, second, tiles, none);
    }
  }

  const RowValue* values_of([[maybe_unused]] Buffers& memory, int row, [[maybe_unused]] int count, int step,
                            [[maybe_unused]] int tiles) const {
    const Stored* const from = strips + place(row, step * kDepth, weight.inputs);
    if constexpr (Products<T>::kReadsStrips) {
      return reinterpret_cast<const RowValue*>(from);
    } else {
      constexpr int kStride = Products<T>::kRowTileStride;
      if (memory.rows.size() < size_t(tiles) * kStride) memory.rows.resize(size_t(tiles) * kStride);
      float* const to = memory.rows.data();
      for (int tile = 0; tile < tiles; ++tile)
        for (int i = 0; i < count * kDepth; i += kLanes)
          store(to + tile * kStride + i, load_floats(from + tile * kTile + i, kLanes));
      return to;
    }
  }

  void finish_row(const float* sums, int row, int start, int p, bool has_second) const {
    sums += int64_t(row - start) * kBlock;
    for (int i = 0; i < kSide; i += kLanes)
      finish(row, p * kSide + i, load<Floats>(sums + i), has_second, load<Floats>(sums + kSide + i));
  }

  template <class Values> void run_codes(const Values& values, int start, int stop, int from, int to) const {
    Buffers& memory = buffers(stop - start);
    const int groups = num_groups(weight);
    if (weight.zeros) sum_inputs(memory, start, stop, groups);
    const int64_t panel = int64_t(steps) * Values::kTileBytes;
    for (int p = from; p < to; p += stride) {
      const bool has_second = is_pair(p, to);
      for (int group = 0, step = 0; group < groups; ++group) {
        const int end = std::min(steps, step + weight.tiles_in_group);
        for (bool adds = false; step < end; adds = true) {
          const int tiles = std::min(kChunkTiles, end - step);
          for (int c = 0; c <= has_second; ++c)
            decode(values, weight.codes + (p + int64_t(c) * pair_distance) * panel + step * Values::kTileBytes, tiles,
                   memory.panels[c]);
          multiply(memory, p, start, stop, step, tiles, memory.panels[0],
                   has_second ? memory.panels[1] : nullptr, adds);
          step += tiles;
        }
        for (int c = 0; c <= has_second; ++c) scale(memory, start, stop, p + c * pair_distance, c, group, groups);
      }
      for (int row = start; row < stop; ++row) finish_row(memory.totals.data(), row, start, p, has_second);
    }
  }

  template <class Values> static void decode(const Values& values, const uint8_t* codes, int tiles, uint16_t* to) {
    constexpr int kAhead = 2048;  // bytes
    for (int tile = 0; tile < tiles; ++tile, codes += Values::kTileBytes, to += kTile) {
      for (int line = 0; line < Values::kTileBytes; line += 64) __builtin_prefetch(codes + kAhead + line, 0, 2);
      values.decode(codes, to);
    }
  }

  // Computes the sum of each group of inputs of each row, [rows, groups].
  void sum_inputs(Buffers& memory, int start, int stop, int groups) const {
    if (memory.input_sums.size() < size_t(stop - start) * groups) memory.input_sums.resize((stop - start) * groups);
    float* to = memory.input_sums.data();
    for (int row = start; row < stop; ++row)
      for (int group = 0; group < groups; ++group) {
        Floats total{};
        const int first = group * weight.tiles_in_group, last = std::min(steps, first + weight.tiles_in_group);
        for (int i = first * kDepth; i < last * kDepth; i += kLanes)
          total += load_floats(strips + place(row, i, weight.inputs), kLanes);
        *to++ = sum(total);
      }
  }

  // Adds a group's sums of one panel to the totals: scale * (sum of value * x - zero * sum of x).
  void scale(Buffers& memory, int start, int stop, int panel, int c, int group, int groups) const {
    const int64_t at = (int64_t(panel) * groups + group) * kSide;
    for (int i = 0; i < kSide; i += kLanes) {
      const Floats scales = load<Floats>(weight.scales + at + i);
      const Floats zeros = weight.zeros ? load<Floats>(weight.zeros + at + i) : Floats{};
      for (int row = 0; row < stop - start; ++row) {
        const int64_t place = int64_t(row) * kBlock + c * kSide + i;
        Floats sums = load<Floats>(memory.sums.data() + place);
        if (weight.zeros) sums -= zeros * memory.input_sums[int64_t(row) * groups + group];
        float* const total = memory.totals.data() + place;
        store(total, group ? load<Floats>(total) + sums * scales : sums * scales);
      }
    }
  }
};

}  // namespace linear
