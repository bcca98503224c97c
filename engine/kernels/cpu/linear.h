// Matrix products with packed weights on AMX tiles. An output is one running sum over the inputs in their order, whatever
// the number of rows and of threads: a row's bits depend on nothing but the row. Quantized weights: codes_linear.h.
#pragma once

#include "codes_linear.h"
#include "crew.h"
#include "packed.h"
#include "tiles.h"
#include "vectors.h"

namespace linear {

#if defined(__AVX512BF16__)

// Two vectors of floats as words of two bf16 each, the first in the lower half.
inline Words rounded_pairs(Floats low, Floats high) {
  const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Words)_mm512_permutexvar_epi16(order, apart);
}
#else
inline Words rounded_pairs(Floats low, Floats high) {
  return __builtin_convertvector(narrow(low), Words) | (__builtin_convertvector(narrow(high), Words) << 16);
}
#endif

#if defined(PENSTOCK_TILES)
inline void ask_for(const uint16_t* tile) {
  for (int value = 0; value < kTile; value += 32) __builtin_prefetch(tile + value, 0, 2);
}

// Two panels that are wanted soon, asked for a few lines at each step of the products before them.
struct Ahead {
  const uint16_t *first = nullptr, *second = nullptr;
  int lines = 0;  // of each panel at each step

  void ask() {
    if (lines == kSide) {
      ask_for(first);
      ask_for(second);
    } else {
      for (int line = 0; line < lines; ++line) {
        __builtin_prefetch(first + line * kDepth, 0, 2);
        __builtin_prefetch(second + line * kDepth, 0, 2);
      }
    }
    first += lines * kDepth, second += lines * kDepth;
  }
};

// out[16 R, 16 C], 32 floats a row, = strips @ panels; `beside` is called at each step. Tiles 0-3: sums, 4-5: strips,
// 6-7: panels. Strips are read as what is not needed again soon, so that they push no panels out of L1.
template <int R, int C, class Beside>
inline void multiply(float* out, const uint16_t* strips, const uint16_t* first, const uint16_t* second, int steps,
                     Ahead& ahead, const Beside& beside) {
  _tile_zero(0);
  if (C > 1) _tile_zero(1);
  if (R > 1) _tile_zero(2);
  if (R > 1 && C > 1) _tile_zero(3);
  for (int64_t at = 0; at < int64_t(steps) * kTile; at += kTile) {
    ahead.ask();
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
    beside();
  }
  _tile_stored(0, out, kBlock * 4);
  if (C > 1) _tile_stored(1, out + kSide, kBlock * 4);
  if (R > 1) _tile_stored(2, out + kSide * kBlock, kBlock * 4);
  if (R > 1 && C > 1) _tile_stored(3, out + kSide * kBlock + kSide, kBlock * 4);
}

// Calls finish(row, panel, sums of `first`, whether there is a second, its sums) for every row and for the panels
// (p, p + apart) of a run: with apart = 1 they are neighbours, taken two at a time, and the last stands alone where their
// number is odd. A block is finished while the tiles multiply the next one, row by row between their steps. The
// thread's tiles are configured for 16 rows.
template <class Finish> class Blocks {
 public:
  Blocks(const Packed& weight, const uint16_t* strips, int apart, const Finish& finish)
      : weight(weight), strips(strips), finish(finish), apart(apart), steps(weight.inputs / kDepth),
        stride(apart == 1 ? 2 : 1), rows_a_step((kBlock + steps - 1) / steps), panel(int64_t(steps) * kTile) {}
  ~Blocks() { finish_rows(kBlock); }

  // Rows [start, stop), of which all but the last block are whole, by panels [from, to).
  void run(int start, int stop, int from, int to) {
    const int last = weight.outputs / kSide - 1, blocks = (stop - start + kBlock - 1) / kBlock;
    for (int p = from; p < to; p += stride) {
      const bool is_pair = apart > 1 || p + 1 < to;
      const uint16_t* first = weight.values + p * panel;
      const uint16_t* second = is_pair ? first + apart * panel : first;
      Ahead ahead;
      if (p + apart + stride <= last)
        ahead = {first + stride * panel, second + stride * panel, (kSide + blocks - 1) / blocks};
      for (int row = start; row < stop; row += kBlock) {
        float* const to_sums = sums[which ^= 1];
        const uint16_t* these = strips + int64_t(row) * weight.inputs;
        const auto beside = [&] { finish_rows(rows_a_step); };
        if (stop - row > kSide) {
          if (is_pair) multiply<2, 2>(to_sums, these, first, second, steps, ahead, beside);
          else multiply<2, 1>(to_sums, these, first, second, steps, ahead, beside);
        } else {
          if (is_pair) multiply<1, 2>(to_sums, these, first, second, steps, ahead, beside);
          else multiply<1, 1>(to_sums, these, first, second, steps, ahead, beside);
        }
        next_sums = to_sums, next_row = row, rows_left = std::min(kBlock, stop - row);
        next_panel = p, next_is_pair = is_pair;
      }
    }
  }

 private:
  const Packed& weight;
  const uint16_t* const strips;
  const Finish& finish;
  const int apart, steps, stride, rows_a_step;
  const int64_t panel;
  // What is to be finished.
  const float* next_sums = nullptr;
  int next_row = 0, rows_left = 0, next_panel = 0;
  bool next_is_pair = false;
  int which = 0;
  alignas(64) float sums[2][kBlock * kBlock];

  void finish_rows(int most) {
    for (const int stop = rows_left - std::min(rows_left, most); rows_left > stop; --rows_left, ++next_row) {
      finish(next_row, next_panel, load<Floats>(next_sums), next_is_pair, load<Floats>(next_sums + kSide));
      next_sums += kBlock;
    }
  }
};

// Rows of so many inputs that are computed together: as many as stay in L2 while panels pass by.
inline int rows_in_cache(int inputs) { return std::clamp(kInputsInCache / inputs / kBlock * kBlock, 256, 512); }

// Shares a product out, to be finished as above; with `apart` panels between the two of a pair there are as many pairs. A
// piece is a pair, by as many of `count` rows as are computed together; of codes, which are decoded ahead, some pairs.
template <class Finish>
inline void for_outputs(int num_threads, const Packed& weight, const uint16_t* strips, int count, int apart,
                        const Finish& finish) {
  constexpr int kPiecesOfThread = 6;
  const int panels = apart == 1 ? weight.outputs / kSide : apart, stride = apart == 1 ? 2 : 1;
  const int coded_run = std::max(1, panels / stride / (kPiecesOfThread * num_threads));
  const int run = stride * (weight.kind == kPlain ? 1 : coded_run), runs = (panels + run - 1) / run;
  const int rows = rows_in_cache(weight.inputs);
  crew::share(num_threads, (count + rows - 1) / rows * runs, [&](crew::Pieces& pieces) {
    const auto take_all = [&](auto&& blocks) {
      for (int piece; pieces.take(piece);) {
        const int start = piece / runs * rows, from = piece % runs * run;
        blocks.run(start, std::min(count, start + rows), from, std::min(panels, from + run));
      }
    };
    tiles::configure(kSide);
    if (weight.kind == kPlain) take_all(Blocks<Finish>(weight, strips, apart, finish));
    else if (weight.kind == kInt4) take_all(CodedBlocks<Int4Values, Finish>(weight, strips, count, apart, finish));
    else take_all(CodedBlocks<ByteValues, Finish>(weight, strips, count, apart, finish));
    tiles::release();
  });
}
#endif

}  // namespace linear
