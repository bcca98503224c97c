// Matrix products of bf16 rows with quantized weights (int4, int8 and fp8 codes) on AMX tiles.
//
// A code represents a value that bf16 has exactly (code_values.h). Tiles multiply with these values, and the sum over a
// group of inputs is scaled afterwards in float32: scale * (sum of value * x - zero * sum of x). So no value is rounded
// to bf16, and decoding costs no multiplication. The vector units decode ahead while the tile unit multiplies: a few
// tiles ahead into L1 where rows are few, mostly a panel ahead into L2 where it meets many rows.
//
// A row's result depends only on the row, bit for bit: whatever the number of rows, each output is one sum per group in
// the order of inputs, and one sum over groups in their order.
#pragma once

#include "code_values.h"
#include "packed_weight.h"
#include "amx_tiles.h"
#include "simd.h"

#include <vector>

namespace linear {

#if defined(PENSTOCK_TILES)
constexpr int kLead = 3;  // tiles decoded ahead of use, where rows are few
constexpr int kRing = 8;  // tiles of each panel in L1, where rows are few

// The compiler does not know what tile loads read. This makes it finish all writes to memory before them.
inline void compiler_barrier() { asm volatile("" : : : "memory"); }

// Decodes tiles of panels ahead of their use, two panels at a time, in the order in which they are multiplied with.
template <class Values> class DecodedTiles {
 public:
  // Decodes panels p and p + pair_distance for p in [from, to), for every other p with pair_distance 1. Each is decoded
  // `passes` times, into `room`, which holds `capacity` tiles of each of the two.
  DecodedTiles(const Values& values, const PackedWeight& weight, int from, int to, int pair_distance, int capacity,
               int passes, uint16_t* room)
      : values(values), weight(weight), from(from), to(to), pair_distance(pair_distance),
        stride(pair_distance == 1 ? 2 : 1),
        steps(weight.inputs / kDepth), capacity(capacity), passes(passes), room(room), panel(from) {}

  bool is_pair(int p) const { return pair_distance > 1 || p + 1 < to; }
  // Returns the slot after `slot`. The second panel's tile lies right behind the first's.
  int after(int slot) const { return slot + 1 == capacity ? 0 : slot + 1; }
  const uint16_t* tile(int slot) const { return room + 2 * slot * kTile; }

  void decode_next() {
    if (panel >= to) return;
    const uint8_t* these = codes(panel, step);
    const int64_t second = pair_distance * panel_bytes();
    const uint8_t* later = step + kAhead < steps          ? these + kAhead * Values::kTileBytes
                           : panel + stride < to ? codes(panel + stride, std::min(steps - 1, step + kAhead - steps))
                                                          : these;
    for (int line = 0; line < Values::kTileBytes; line += 64) __builtin_prefetch(later + line, 0, 2);
    values.decode(these, room + 2 * slot * kTile);
    if (is_pair(panel)) {
      for (int line = 0; line < Values::kTileBytes; line += 64) __builtin_prefetch(later + second + line, 0, 2);
      values.decode(these + second, room + (2 * slot + 1) * kTile);
    }
    compiler_barrier();
    slot = after(slot);
    if (++step < steps) return;
    step = 0;
    if (++pass == passes) pass = 0, panel += stride;
  }

 private:
  static constexpr int kAhead = 8192 / Values::kTileBytes;  // tiles to ask memory for
  const Values& values;
  const PackedWeight& weight;
  const int from, to, pair_distance, stride, steps, capacity, passes;
  uint16_t* const room;
  int panel, step = 0, slot = 0, pass = 0;

  int64_t panel_bytes() const { return int64_t(steps) * Values::kTileBytes; }
  const uint8_t* codes(int p, int at) const { return weight.codes + p * panel_bytes() + at * Values::kTileBytes; }
};

// Computes the sum of each group of inputs of each row, [count, groups], as a product with ones.
inline void sum_inputs(const PackedWeight& weight, const uint16_t* strips, int count, float* sums) {
  alignas(64) uint16_t ones[kTile];
  alignas(64) float found[kTile];
  std::fill(ones, ones + kTile, uint16_t(0x3f80));
  const int steps = weight.inputs / kDepth, groups = num_groups(weight);
  compiler_barrier();
  _tile_loadd(6, ones, 64);
  for (int row = 0; row < count; row += kSide, strips += steps * kTile)
    for (int group = 0; group < groups; ++group) {
      const int first = group * weight.tiles_in_group, last = std::min(steps, first + weight.tiles_in_group);
      _tile_zero(0);
      for (int i = first; i < last; ++i) {
        _tile_loadd(4, strips + i * kTile, 64);
        _tile_dpbf16ps(0, 4, 6);
      }
      _tile_stored(0, found, 64);
      for (int r = 0; r < std::min(kSide, count - row); ++r) sums[(row + r) * groups + group] = found[r * kSide];
    }
}

// Computes out[16 R, 16 C] = strips @ the next `steps` tiles, with rows of 32 floats, and calls `interleaved` at each
// step. `strips` are `all_steps` tiles long. Tiles 0-3 hold sums, 4-5 strips, 6-7 panels.
template <int R, int C, class Values, class Interleaved>
inline void multiply_decoded(float* out, const uint16_t* strips, int all_steps, int steps,
                             const DecodedTiles<Values>& decoded, int& slot, const Interleaved& interleaved) {
  _tile_zero(0);
  if (C > 1) _tile_zero(1);
  if (R > 1) _tile_zero(2);
  if (R > 1 && C > 1) _tile_zero(3);
  for (int i = 0; i < steps; ++i, strips += kTile) {
    interleaved();
    const uint16_t* tile = decoded.tile(slot);
    slot = decoded.after(slot);
    _tile_loadd(6, tile, 64);
    _tile_stream_loadd(4, strips, 64);
    _tile_dpbf16ps(0, 4, 6);
    if (C > 1) {
      _tile_loadd(7, tile + kTile, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    if (R > 1) {
      _tile_stream_loadd(5, strips + int64_t(all_steps) * kTile, 64);
      _tile_dpbf16ps(2, 5, 6);
      if (C > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, out, kBlock * 4);
  if (C > 1) _tile_stored(1, out + kSide, kBlock * 4);
  if (R > 1) _tile_stored(2, out + kSide * kBlock, kBlock * 4);
  if (R > 1 && C > 1) _tile_stored(3, out + kSide * kBlock + kSide, kBlock * 4);
}

// `Blocks` of linear.h for a quantized weight and up to `count` rows. The sums of a group are scaled while the tiles
// multiply the next group, a few rows at each of their steps.
template <class Values, class Finish> class QuantizedBlocks {
 public:
  QuantizedBlocks(const PackedWeight& weight, const uint16_t* strips, int count, int pair_distance,
                  const Finish& finish)
      : values(weight.kind), weight(weight), strips(strips), finish(finish), pair_distance(pair_distance),
        steps(weight.inputs / kDepth), groups(num_groups(weight)), is_narrow(count < kSide) {
    if (is_narrow) tiles::configure(std::max(count, 1));  // no more rows than needed: less to read
    if (!weight.zeros) return;
    static thread_local std::vector<float> buffer;  // allocating takes longer than a small product
    if (buffer.size() < size_t(count) * groups) buffer.resize(size_t(count) * groups);
    input_sums = buffer.data();
    sum_inputs(weight, strips, count, input_sums);
  }
  ~QuantizedBlocks() {
    scale_rows(kBlock);
    if (is_narrow) tiles::configure(kSide);
  }

  // Multiplies rows [start, stop), of which only the last block may be partial, with panels [from, to).
  void run(int start, int stop, int from, int to) {
    const int num_blocks = (stop - start + kBlock - 1) / kBlock;
    const bool in_l1 = num_blocks == 1 || Values::decodes_per_block(num_blocks, steps);
    const int capacity = in_l1 ? kRing : 2 * steps;
    static thread_local Lines<uint16_t> buffer;
    if (!in_l1 && buffer.size() < size_t(2) * capacity * kTile) buffer.resize(size_t(2) * capacity * kTile);
    DecodedTiles<Values> decoded(values, weight, from, to, pair_distance, capacity, in_l1 ? num_blocks : 1,
                            in_l1 ? ring : buffer.data());
    for (int i = 0; i < (in_l1 ? kLead : steps); ++i) decoded.decode_next();
    int slot = 0;
    for (int p = from; p < to; p += pair_distance == 1 ? 2 : 1) {
      const int first = slot;
      for (int block = 0; block < num_blocks; ++block) {
        const int row = start + block * kBlock, rows = std::min(kBlock, stop - row);
        if (!in_l1) slot = first;
        const auto run_block = [&](auto multiply) {
          (this->*multiply)(decoded, slot, p, row, rows, in_l1 ? 0 : block, in_l1 ? 1 : num_blocks);
        };
        if (rows > kSide)
          run_block(decoded.is_pair(p) ? &QuantizedBlocks::multiply<2, 2> : &QuantizedBlocks::multiply<2, 1>);
        else
          run_block(decoded.is_pair(p) ? &QuantizedBlocks::multiply<1, 2> : &QuantizedBlocks::multiply<1, 1>);
      }
    }
  }

 private:
  const Values values;
  const PackedWeight& weight;
  const uint16_t* const strips;
  const Finish& finish;
  const int pair_distance, steps, groups;
  const bool is_narrow;
  float* input_sums = nullptr;  // sums of each row's inputs by group, where there are zero points
  // The sums to be scaled, those of a group, and the addresses of its scales and zero points.
  const float *next_sums = nullptr, *next_scales[2], *next_zeros[2], *next_input_sums;
  float* next_totals = totals;
  int next_row = 0, rows_left = 0, next_panel = 0;
  bool next_is_pair = false, is_first = false, is_last = false;
  int which = 0;
  alignas(64) float sums[2][kBlock * kBlock];
  alignas(64) float totals[kBlock * kBlock];  // of the groups so far
  alignas(64) uint16_t ring[2 * kRing * kTile];

  // Multiplies one block; a tile is decoded at every `period`-th step, first at step `until_decode`.
  template <int R, int C>
  void multiply(DecodedTiles<Values>& decoded, int& slot, int p, int row, int rows, int until_decode, int period) {
    for (int group = 0, step = 0; group < groups; ++group, step += weight.tiles_in_group) {
      const int depth = std::min(weight.tiles_in_group, steps - step);
      const int rows_per_step = groups > 1 ? kBlock : (kBlock + depth - 1) / depth;
      float* const to_sums = sums[which ^= 1];
      multiply_decoded<R, C>(to_sums, strips + int64_t(row) * weight.inputs + step * kTile, steps, depth, decoded, slot,
                             [&] {
                               if (until_decode-- == 0) {
                                 decoded.decode_next();
                                 until_decode = period - 1;
                               }
                               scale_rows(rows_per_step);
                             });
      for (int c = 0; c < C; ++c) {
        const int64_t place = ((p + int64_t(c) * pair_distance) * groups + group) * kSide;
        next_scales[c] = weight.scales + place, next_zeros[c] = weight.zeros + place;
      }
      next_sums = to_sums, next_totals = totals, next_input_sums = input_sums + int64_t(row) * groups + group;
      next_row = row, rows_left = rows, next_panel = p, next_is_pair = C > 1;
      is_first = group == 0, is_last = group + 1 == groups;
    }
  }

  void scale_rows(int max_rows) {
    if (!rows_left) return;
    if (next_is_pair) scale<2>(std::min(rows_left, max_rows));
    else scale<1>(std::min(rows_left, max_rows));
  }

  template <int C> void scale(int count) {
    __m512 scales[C], zeros[C];
    for (int c = 0; c < C; ++c) {
      scales[c] = _mm512_loadu_ps(next_scales[c]);
      zeros[c] = input_sums ? _mm512_loadu_ps(next_zeros[c]) : _mm512_setzero_ps();
    }
    const float *from = next_sums, *inputs = next_input_sums;
    float* so_far = next_totals;
    const bool has_zeros = input_sums, is_new = is_first, ends = is_last;
    const int row = next_row, panel = next_panel, input_stride = groups;
    for (int r = 0; r < count; ++r, from += kBlock, so_far += kBlock, inputs += input_stride) {
      __m512 total[C];
      for (int c = 0; c < C; ++c) {
        __m512 sum = _mm512_load_ps(from + c * kSide);
        if (has_zeros) sum = _mm512_fnmadd_ps(zeros[c], _mm512_set1_ps(*inputs), sum);
        const __m512 before = is_new ? _mm512_setzero_ps() : _mm512_load_ps(so_far + c * kSide);
        total[c] = _mm512_fmadd_ps(sum, scales[c], before);
        if (!ends) _mm512_store_ps(so_far + c * kSide, total[c]);
      }
      if (ends) finish(row + r, panel * kSide, (Floats)total[0], C > 1, (Floats)total[C - 1]);
    }
    next_sums = from, next_input_sums = inputs, next_totals = so_far;
    next_row = row + count, rows_left -= count;
  }
};
#endif

}  // namespace linear
