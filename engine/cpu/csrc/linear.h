// Matrix products with packed weights, in bf16 on AMX tiles where the library is built for them. An output is one
// running sum over the inputs in order, whatever the number of rows and threads, so a row's result depends only on the
// row, bit for bit. quantized_linear.h has the products with quantized weights on tiles, vector_linear.h those in
// float32 and all without tiles, int8_linear.h those in integers.
#pragma once

#include "int8_linear.h"
#include "quantized_linear.h"
#include "vector_linear.h"
#include "thread_team.h"
#include "packed_weight.h"
#include "amx_tiles.h"
#include "simd.h"

namespace linear {

#if defined(PENSTOCK_TILES)
// Rounds two vectors of floats to words of two bf16 each, `low` in the lower half.
inline Words rounded_pairs(Floats low, Floats high) {
  const __m512i pair_distance = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Words)_mm512_permutexvar_epi16(order, pair_distance);
}

inline void prefetch(const uint16_t* tile) {
  for (int value = 0; value < kTile; value += 32) __builtin_prefetch(tile + value, 0, 2);
}

// Two panels that are needed soon, prefetched a few lines at each step of the products before them.
struct PrefetchPanels {
  const uint16_t *first = nullptr, *second = nullptr;
  int lines = 0;  // of each panel at each step

  void prefetch_step() {
    if (lines == kSide) {
      prefetch(first);
      prefetch(second);
    } else {
      for (int line = 0; line < lines; ++line) {
        __builtin_prefetch(first + line * kDepth, 0, 2);
        __builtin_prefetch(second + line * kDepth, 0, 2);
      }
    }
    first += lines * kDepth, second += lines * kDepth;
  }
};

// Computes out[16 R, 16 C] = strips @ panels, with rows of 32 floats, and calls `interleaved` at each step. Tiles 0-3
// hold sums, 4-5 strips, 6-7 panels. Strips are loaded with a streaming hint, so that they do not evict panels from L1.
template <int R, int C, class Interleaved>
inline void multiply(float* out, const uint16_t* strips, const uint16_t* first, const uint16_t* second, int steps,
                     PrefetchPanels& ahead, const Interleaved& interleaved) {
  _tile_zero(0);
  if (C > 1) _tile_zero(1);
  if (R > 1) _tile_zero(2);
  if (R > 1 && C > 1) _tile_zero(3);
  for (int64_t at = 0; at < int64_t(steps) * kTile; at += kTile) {
    ahead.prefetch_step();
    _tile_loadd(6, first + at, 64);
    _tile_stream_loadd(4, strips + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (C > 1) {
      _tile_loadd(7, second + at, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (R > 1) {
      _tile_stream_loadd(5, strips + steps * kTile + at, 64);
      _tile_dpbf16ps(2, 5, 6);
      if (C > 1) _tile_dpbf16ps(3, 5, 7);
    }
    interleaved();
  }
  _tile_stored(0, out, kBlock * 4);
  if (C > 1) _tile_stored(1, out + kSide, kBlock * 4);
  if (R > 1) _tile_stored(2, out + kSide * kBlock, kBlock * 4);
  if (R > 1 && C > 1) _tile_stored(3, out + kSide * kBlock + kSide, kBlock * 4);
}

// Multiplies blocks of rows with pairs of panels (p, p + pair_distance) and calls finish(row, p, sums of p, is_pair,
// sums of the second panel) for every row. With pair_distance 1 the panels of a run are taken two at a time, and the
// last one by itself if their number is odd. A block is finished while the tiles multiply the next one, row by row
// between their steps. The thread's tiles must be configured for 16 rows.
template <class Finish> class Blocks {
 public:
  Blocks(const PackedWeight& weight, const uint16_t* strips, int pair_distance, const Finish& finish)
      : weight(weight), strips(strips), finish(finish), pair_distance(pair_distance), steps(weight.inputs / kDepth),
        stride(pair_distance == 1 ? 2 : 1), rows_per_step((kBlock + steps - 1) / steps),
        panel(int64_t(steps) * kTile) {}
  ~Blocks() { finish_rows(kBlock); }

  // Multiplies rows [start, stop), of which only the last block may be partial, with panels [from, to).
  void run(int start, int stop, int from, int to) {
    const int last = weight.outputs / kSide - 1, blocks = (stop - start + kBlock - 1) / kBlock;
    for (int p = from; p < to; p += stride) {
      const bool is_pair = pair_distance > 1 || p + 1 < to;
      const uint16_t* first = static_cast<const uint16_t*>(weight.values) + p * panel;
      const uint16_t* second = is_pair ? first + pair_distance * panel : first;
      PrefetchPanels ahead;
      if (p + pair_distance + stride <= last)
        ahead = {first + stride * panel, second + stride * panel, (kSide + blocks - 1) / blocks};
      for (int row = start; row < stop; row += kBlock) {
        float* const to_sums = sums[which ^= 1];
        const uint16_t* these = strips + int64_t(row) * weight.inputs;
        const auto interleaved = [&] { finish_rows(rows_per_step); };
        if (stop - row > kSide) {
          if (is_pair) multiply<2, 2>(to_sums, these, first, second, steps, ahead, interleaved);
          else multiply<2, 1>(to_sums, these, first, second, steps, ahead, interleaved);
        } else {
          if (is_pair) multiply<1, 2>(to_sums, these, first, second, steps, ahead, interleaved);
          else multiply<1, 1>(to_sums, these, first, second, steps, ahead, interleaved);
        }
        next_sums = to_sums, next_row = row, rows_left = std::min(kBlock, stop - row);
        next_panel = p, next_is_pair = is_pair;
      }
    }
  }

 private:
  const PackedWeight& weight;
  const uint16_t* const strips;
  const Finish& finish;
  const int pair_distance, steps, stride, rows_per_step;
  const int64_t panel;
  // The block to be finished.
  const float* next_sums = nullptr;
  int next_row = 0, rows_left = 0, next_panel = 0;
  bool next_is_pair = false;
  int which = 0;
  alignas(64) float sums[2][kBlock * kBlock];

  void finish_rows(int max_rows) {
    for (const int stop = rows_left - std::min(rows_left, max_rows); rows_left > stop; --rows_left, ++next_row) {
      finish(next_row, next_panel * kSide, load<Floats>(next_sums), next_is_pair, load<Floats>(next_sums + kSide));
      next_sums += kBlock;
    }
  }
};

#endif

// Returns how many rows of `inputs` are computed together: as many as stay in L2 while panels are read.
template <class Stored> int rows_in_cache(int inputs) {
  constexpr int kMaxInputs = kMaxInputsInCache * int(sizeof(uint16_t)) / int(sizeof(Stored));
  return std::clamp(kMaxInputs / inputs / kBlock * kBlock, sizeof(Stored) == sizeof(float) ? 128 : 256, 512);
}

// Splits a product into tasks for the thread team; `finish` is called as by `Blocks`. With a pair distance above 1
// there are as many pairs. A task is one pair of panels with as many of `count` rows as are computed together; for
// quantized weights, which are decoded ahead, it is several pairs.
template <class Stored, class Finish>
inline void for_outputs(int num_threads, const PackedWeight& weight, const Stored* strips, int count,
                        int pair_distance, const Finish& finish) {
  constexpr bool is_float32 = sizeof(Stored) == sizeof(float);
  constexpr int kTasksPerThread = 6;
  const int panels = pair_distance == 1 ? weight.outputs / kSide : pair_distance, stride = pair_distance == 1 ? 2 : 1;
  const int quantized_run = std::max(1, panels / stride / (kTasksPerThread * num_threads));
  const bool has_int8_rows = weight.kind == kInt8ByInt8 || weight.kind == kInt4ByInt8;
  const bool decodes_ahead = weight.kind != kPlain && weight.kind != kFloat32 && !has_int8_rows;
  const int run = stride * (decodes_ahead ? quantized_run : 1), runs = (panels + run - 1) / run;
  const int rows = rows_in_cache<Stored>(weight.inputs);
  Int8Rows int8_rows{};
  if constexpr (!is_float32)
    if (has_int8_rows) int8_rows = RowQuantizer(weight, count).run(strips, count, num_threads);
  thread_team::parallel_for(num_threads, (count + rows - 1) / rows * runs, [&](thread_team::Tasks& tasks) {
    const auto take_all = [&](auto&& blocks) {
      for (int task; tasks.take(task);) {
        const int start = task / runs * rows, from = task % runs * run;
        blocks.run(start, std::min(count, start + rows), from, std::min(panels, from + run));
      }
    };
    if constexpr (is_float32) {
      take_all(VectorBlocks<Float32, Finish>(weight, strips, pair_distance, finish));
    } else {
      if (weight.kind == kInt8ByInt8)
        return take_all(Int8Blocks<Int8Codes, Finish>(weight, int8_rows, pair_distance, finish));
      if (weight.kind == kInt4ByInt8)
        return take_all(Int8Blocks<HalfByteCodes, Finish>(weight, int8_rows, pair_distance, finish));
#if defined(PENSTOCK_TILES)
      tiles::configure(kSide);
      if (weight.kind == kPlain) take_all(Blocks<Finish>(weight, strips, pair_distance, finish));
      else if (weight.kind == kInt4)
        take_all(QuantizedBlocks<Int4Values, Finish>(weight, strips, count, pair_distance, finish));
      else take_all(QuantizedBlocks<ByteValues, Finish>(weight, strips, count, pair_distance, finish));
      tiles::release();
#else
      take_all(VectorBlocks<BFloat16, Finish>(weight, strips, pair_distance, finish));
#endif
    }
  });
}

}  // namespace linear
