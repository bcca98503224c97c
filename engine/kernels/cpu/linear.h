// Matrix products with packed bf16 weights on AMX tiles.
//
// A weight [O, I] is packed as panels of 16 outputs, each a run of tiles of 32 inputs: [O / 16][I / 32][16][16][2]; rows
// as strips of 16, each a run of tiles too: [T / 16][I / 32][16][32]. Either is read from front to back, which is what
// memory is best at. A quantized weight has codes in the same places, and is made bf16 a panel at a time, in cache: so it
// gives the bits of the weight that it stands for. An output is one running sum over the inputs in their order, whatever the number of rows and of
// threads: a row's bits depend on nothing but the row.
#pragma once

#include "codes.h"
#include "tiles.h"
#include "vectors.h"

#include <vector>

namespace linear {

constexpr int kSide = 16;    // outputs of a panel, rows of a strip
constexpr int kDepth = 32;   // inputs of a tile
constexpr int kTile = kSide * kDepth;
constexpr int kBlock = 2 * kSide;  // rows and outputs that are computed at once
constexpr int kInputsInCache = 384 * 1024;  // of L2's 1024 * 1024 values: panels pass by, and outputs go out

enum Kind { kPlain, kInt4, kInt8, kFp8 };

struct Packed {
  const uint16_t* values;  // of a quantized weight null
  const uint16_t* bias;    // or null
  int32_t inputs, outputs;
  const uint8_t* codes;  // int4: a byte for two neighbouring inputs, the first in its lower half
  const float* scales;   // [O / 16][groups][16]
  const float* zeros;    // likewise, or null; values are (code - zero) * scale
  int32_t kind, tiles_in_group;
};

#if defined(__AVX512BF16__)
inline Words widened(Bytes codes) { return (Words)_mm512_cvtepu8_epi32((__m128i)codes); }
inline Words widened(Shorts codes) { return (Words)_mm512_cvtepu16_epi32((__m256i)codes); }

// Two vectors of floats as words of two bf16 each, the first in the lower half.
inline Words rounded_pairs(Floats low, Floats high) {
  const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (Words)_mm512_permutexvar_epi16(order, apart);
}
#else
inline Words widened(Bytes codes) { return __builtin_convertvector(codes, Words); }
inline Words widened(Shorts codes) { return __builtin_convertvector(codes, Words); }
inline Words rounded_pairs(Floats low, Floats high) {
  return __builtin_convertvector(narrow(low), Words) | (__builtin_convertvector(narrow(high), Words) << 16);
}
#endif

template <int K> inline Floats value(Words code, Floats zero, Floats scale) {
  if constexpr (K == kFp8) return Fp8Codes::decode(code) * scale;
  if constexpr (K == kInt8) return (__builtin_convertvector((Ints)(code << 24) >> 24, Floats) - zero) * scale;
  return (__builtin_convertvector((Ints)code, Floats) - zero) * scale;
}

// 16 outputs of a quantized weight as a panel of bf16.
template <int K> inline void decode_panel(const Packed& weight, int64_t p, uint16_t* panel) {
  const int steps = weight.inputs / kDepth, groups = (steps + weight.tiles_in_group - 1) / weight.tiles_in_group;
  const int row_bytes = K == kInt4 ? kSide : 2 * kSide;
  const uint8_t* codes = weight.codes + p * steps * kSide * row_bytes;
  uint32_t* to = reinterpret_cast<uint32_t*>(panel);
  for (int i = 0; i < steps; ++i) {
    const int64_t group = (p * groups + i / weight.tiles_in_group) * kSide;
    const Floats scale = load<Floats>(weight.scales + group) * (K == kFp8 ? Fp8Codes::kDecodedBy : 1.0f);
    const Floats zero = weight.zeros ? load<Floats>(weight.zeros + group) : Floats{};
    for (int row = 0; row < kSide; ++row, codes += row_bytes, to += kSide) {
      Words low, high;  // of each output the first and the second input
      if (K == kInt4) {
        const Words pair = widened(load<Bytes>(codes));
        low = pair & 15u, high = pair >> 4;
      } else {
        const Words pair = widened(load<Shorts>(codes));
        low = pair & 0xffu, high = pair >> 8;
      }
      store(to, rounded_pairs(value<K>(low, zero, scale), value<K>(high, zero, scale)));
    }
  }
}

// A thread's share of `count` things that stand in a row.
struct Share {
  int from, to;
  Share(int count, int thread, int num_threads)
      : from(int64_t(count) * thread / num_threads), to(int64_t(count) * (thread + 1) / num_threads) {}
};

inline int64_t padded(int64_t rows) { return (rows + kBlock - 1) / kBlock * kBlock; }

// Where 16 values of a row from input `i` on stand among strips of tiles.
inline int64_t place(int64_t row, int i, int inputs) {
  return (row / kSide * (inputs / kDepth) + i / kDepth) * kTile + row % kSide * kDepth + i % kDepth;
}

inline void decode(const Packed& weight, int64_t p, uint16_t* panel) {
  switch (weight.kind) {
    case kInt4: return decode_panel<kInt4>(weight, p, panel);
    case kInt8: return decode_panel<kInt8>(weight, p, panel);
    default: return decode_panel<kFp8>(weight, p, panel);
  }
}

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
// (p, p + apart) of the share: with apart = 1 they are neighbours, taken two at a time, and the last stands alone where
// their number is odd. A block is finished while the tiles multiply the next one, row by row between their steps. The
// thread's tiles are configured for 16 rows.
template <class Finish> class Blocks {
 public:
  Blocks(const Packed& weight, const uint16_t* strips, int apart, const Finish& finish)
      : weight(weight), strips(strips), finish(finish), apart(apart), steps(weight.inputs / kDepth),
        stride(apart == 1 ? 2 : 1), rows_a_step((kBlock + steps - 1) / steps), panel(int64_t(steps) * kTile) {
    if (weight.kind != kPlain && decoded().size() < size_t(2 * panel)) decoded().resize(2 * panel);
  }
  ~Blocks() { finish_rows(kBlock); }

  // Rows [start, stop), of which all but the last block are whole, by panels [from, to).
  void run(int start, int stop, int from, int to) {
    const int last = weight.outputs / kSide - 1, blocks = (stop - start + kBlock - 1) / kBlock;
    for (int p = from; p < to; p += stride) {
      const bool is_pair = apart > 1 || p + 1 < to;
      const uint16_t* first = weight.values + p * panel;
      const uint16_t* second = is_pair ? first + apart * panel : first;
      Ahead ahead;
      if (weight.kind != kPlain) {
        uint16_t* const to_panels = decoded().data();
        decode(weight, p, to_panels);
        if (is_pair) decode(weight, p + apart, to_panels + panel);
        first = to_panels, second = is_pair ? first + panel : first;
      } else if (p + apart + stride <= last) {
        ahead = {first + stride * panel, second + stride * panel, (kSide + blocks - 1) / blocks};
      }
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

  // Kept: to get so much memory anew takes longer than a product.
  static Lines<uint16_t>& decoded() {
    static thread_local Lines<uint16_t> panels;
    return panels;
  }
};

// Rows of so many inputs that are computed together: as many as stay in L2 while panels pass by.
inline int rows_in_cache(int inputs) { return std::clamp(kInputsInCache / inputs / kBlock * kBlock, 256, 512); }

template <class Finish>
inline void for_outputs(const Packed& weight, const uint16_t* strips, int count, Share share, int apart,
                        const Finish& finish) {
  Blocks<Finish> blocks(weight, strips, apart, finish);
  const int rows = rows_in_cache(weight.inputs);
  for (int start = 0; start < count; start += rows)
    blocks.run(start, std::min(count, start + rows), share.from, share.to);
}
#endif

}  // namespace linear
