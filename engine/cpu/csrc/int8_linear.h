// Matrix products of int8 rows with symmetric int8 or int4 weights in integers. A weight's value is (code - zero) *
// scale, zero being the middle of the codes, so an output is the row's scale times the sum over groups of scale * (sum of
// code * x - zero * sum of x). The bracket is an exact integer. So a row's result depends only on the row, and is the
// same with every instruction set, except for the last bit of float32's sums over groups.
//
// Codes are unsigned bytes, or halves of bytes: a panel's tile is [8 quads of inputs][16 outputs][4], for int4 with the
// quads in pairs, the even one in the lower half of each byte. Reference: engine/kernels/int8_products.py.
#pragma once

#include "int8_rows.h"
#include "vector_linear.h"

namespace linear {

constexpr int kInt8ChunkTiles = 16;  // of both panels of a pair: 16 KB of bytes

// Two quads of kLanes outputs, as they are multiplied.
struct Int8Codes {
  static constexpr int kTileBytes = 512;
  static constexpr uint32_t kZero = kIsSigned ? 0 : 128;  // of codes as they are multiplied
  static void load_pair(const uint8_t* panel, int v, CodeQuad& even, CodeQuad& odd) {
    const uint8_t* const at = panel + v * kLanes * kQuad;
    const uint32_t flip = kIsSigned ? 0x80808080u : 0u;
    even = CodeQuad(load<Words>(at) ^ flip), odd = CodeQuad(load<Words>(at + kSide * kQuad) ^ flip);
  }
};
struct HalfByteCodes {
  static constexpr int kTileBytes = 256;
  static constexpr uint32_t kZero = 8;
  static void load_pair(const uint8_t* panel, int v, CodeQuad& even, CodeQuad& odd) {
    const Words both = load<Words>(panel + v * kLanes * kQuad);
    even = CodeQuad(both & 0x0f0f0f0fu), odd = CodeQuad(both >> 4 & 0x0f0f0f0fu);
  }
};

// Computes sums[r][16 c : 16 c + 16] (+)= rows @ panels over `tiles` tiles, with rows of kBlock integers.
template <class Values, int R, int C>
inline void multiply_codes(uint32_t* sums, bool adds, const uint32_t* rows, const uint8_t* first,
                           const uint8_t* second, int tiles, LinesAhead& lines) {
  constexpr int V = kVectorsPerPanel, kPairs = kTileQuads / 2, kPairBytes = Values::kTileBytes / kPairs;
  LinesAhead ahead = lines;
  Words total[R][C][V];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v)
        total[r][c][v] = adds ? load<Words>(sums + r * kBlock + c * kSide + v * kLanes) : Words{};
  for (int tile = 0; tile < tiles; ++tile, rows += kInt8TileStride)
    for (int pair = 0; pair < kPairs; ++pair, first += kPairBytes, second += kPairBytes) {
      ahead.prefetch_step();
      CodeQuad even[C][V], odd[C][V];
      for (int c = 0; c < C; ++c)
        for (int v = 0; v < V; ++v) Values::load_pair(c ? second : first, v, even[c][v], odd[c][v]);
      for (int r = 0; r < R; ++r) {
        const uint32_t* const row = rows + r * kInt8RowStride + 2 * pair * kRowWords;
        const RowQuad row_even(row), row_odd(row + kRowWords);
        for (int c = 0; c < C; ++c)
          for (int v = 0; v < V; ++v)
            total[r][c][v] = add_dot(add_dot(total[r][c][v], row_even, even[c][v]), row_odd, odd[c][v]);
      }
    }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c)
      for (int v = 0; v < V; ++v) store(sums + r * kBlock + c * kSide + v * kLanes, total[r][c][v]);
  lines = ahead;
}

typedef void (*MultiplyCodes)(uint32_t*, bool, const uint32_t*, const uint8_t*, const uint8_t*, int, LinesAhead&);

template <class Values, int C> inline MultiplyCodes multiply_code_rows(int rows) {
  switch (rows) {
    case 1: return multiply_codes<Values, 1, C>;
    case 2: return multiply_codes<Values, 2, C>;
    case 3: return multiply_codes<Values, 3, C>;
    case 4: return multiply_codes<Values, 4, C>;
#if defined(__AVX512F__)
    case 5: return multiply_codes<Values, 5, C>;
    case 6: return multiply_codes<Values, 6, C>;
    case 7: return multiply_codes<Values, 7, C>;
    default: return multiply_codes<Values, 8, C>;
#else
    default: __builtin_unreachable();
#endif
  }
}

// `Blocks` of linear.h for int8 rows.
template <class Values, class Finish> class Int8Blocks {
 public:
  Int8Blocks(const PackedWeight& weight, const Int8Rows& rows, int pair_distance, const Finish& finish)
      : weight(weight), rows(rows), finish(finish), pair_distance(pair_distance), steps(weight.inputs / kDepth),
        groups(num_groups(weight)), panel(int64_t(steps) * Values::kTileBytes) {}

  // Multiplies rows [start, stop) with panels [from, to). `start` is a multiple of a strip's rows.
  void run(int start, int stop, int from, int to) const {
    Buffers& memory = buffers(stop - start);
    const int stride = pair_distance == 1 ? 2 : 1, last = weight.outputs / kSide;
    const int chunk = stop - start <= kRowsAtOnce ? steps : kInt8ChunkTiles;
    for (int p = from; p < to; p += stride) {
      const bool has_second = pair_distance > 1 || p + 1 < to, has_next = p + stride + pair_distance < last;
      const uint8_t* const first = weight.codes + p * panel;
      for (int group = 0, step = 0; group < groups; ++group) {
        const int end = std::min(steps, step + weight.tiles_in_group);
        for (bool adds = false; step < end; adds = true) {
          const int tiles = std::min(chunk, end - step);
          const bool ends = step + tiles == steps;
          const uint8_t* const at = first + step * Values::kTileBytes;
          const uint8_t* const next = !ends ? at + tiles * Values::kTileBytes : has_next ? first + stride * panel : nullptr;
          multiply(memory, start, stop, step, tiles, at, has_second, adds, next);
          step += tiles;
        }
        for (int c = 0; c <= has_second; ++c) scale(memory, start, stop, p + c * pair_distance, c, group);
      }
      for (int row = start; row < stop; ++row) finish_row(memory.totals.data(), row, start, p, has_second);
    }
  }

 private:
  struct Buffers {
    Lines<uint32_t> sums;
    Lines<float> totals;  // both [rows][kBlock]
  };
  const PackedWeight& weight;
  const Int8Rows rows;
  const Finish& finish;
  const int pair_distance, steps, groups;
  const int64_t panel;

  static Buffers& buffers(size_t rows) {
    static thread_local Buffers* const kept = new Buffers;  // threads of the team never end
    if (kept->sums.size() < rows * kBlock) kept->sums.resize(rows * kBlock), kept->totals.resize(rows * kBlock);
    return *kept;
  }

  // Adds the products of rows [start, stop) with a chunk of a pair of panels to the sums. `next` is the chunk that
  // follows in the first panel, or null.
  void multiply(Buffers& memory, int start, int stop, int step, int tiles, const uint8_t* first, bool has_second,
                bool adds, const uint8_t* next) const {
    constexpr int kLinesPerPair = Values::kTileBytes / (kTileQuads / 2) / 64;
    const uint8_t* const second = first + pair_distance * panel;
    uint32_t* sums = memory.sums.data();
    LinesAhead ahead, none;
    if (next)
      ahead = {reinterpret_cast<const char*>(next), reinterpret_cast<const char*>(next + pair_distance * panel),
               kLinesPerPair};
    for (int row = start; row < stop; row += kRowsAtOnce, sums += kRowsAtOnce * kBlock) {
      const int count = std::min(kRowsAtOnce, stop - row);
      const int64_t tile = int64_t(row / kSide) * steps + step;
      const uint32_t* const words = rows.words + tile * kInt8TileStride + row % kSide * kInt8RowStride;
      LinesAhead& lines = row == start ? ahead : none;
      if (kPanelsAtOnce == 2 && has_second) {
        multiply_code_rows<Values, kPanelsAtOnce>(count)(sums, adds, words, first, second, tiles, lines);
        continue;
      }
      multiply_code_rows<Values, 1>(count)(sums, adds, words, first, first, tiles, lines);
      if (has_second) multiply_code_rows<Values, 1>(count)(sums + kSide, adds, words, second, second, tiles, none);
    }
  }

  // Adds a group's sums of one panel to the totals: scale * (sum of code * x - zero * sum of x).
  void scale(Buffers& memory, int start, int stop, int p, int c, int group) const {
    const int64_t at = (int64_t(p) * groups + group) * kSide;
    for (int i = 0; i < kSide; i += kLanes) {
      const Floats scales = load<Floats>(weight.scales + at + i);
      for (int row = start; row < stop; ++row) {
        const int64_t place = int64_t(row - start) * kBlock + c * kSide + i;
        const uint32_t inputs = uint32_t(rows.sums[int64_t(row) * groups + group]);
        // Modulo 2^32: the difference fits into 32 bits, though its parts need not.
        const Ints exact = (Ints)(load<Words>(memory.sums.data() + place) - Values::kZero * inputs);
        const Floats scaled = __builtin_convertvector(exact, Floats) * scales;
        float* const total = memory.totals.data() + place;
        store(total, group ? load<Floats>(total) + scaled : scaled);
      }
    }
  }

  void finish_row(const float* totals, int row, int start, int p, bool has_second) const {
    totals += int64_t(row - start) * kBlock;
    const Floats factor = splat(rows.scales[row]);
    for (int i = 0; i < kSide; i += kLanes)
      finish(row, p * kSide + i, load<Floats>(totals + i) * factor, has_second, load<Floats>(totals + kSide + i) * factor);
  }
};

}  // namespace linear
