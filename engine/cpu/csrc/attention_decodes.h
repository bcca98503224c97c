// Attention on AMX tiles for items of few rows, as decodes have. Results equal those of attention_prompts.h bit for
// bit.
//
// Memory bandwidth bounds it: K and V are read in place, and the lines of the next block are prefetched between the
// tiles of this one, a few at a time, so that neither waits for the other. 16 keys form one tile, for both products. As
// the left operand it gives scores, key by key. As the right operand its words hold two values of one key, where a
// product needs one value of two keys; so each row of weights is stored twice, as pairs (weight, 0) for the even values
// and as pairs (0, weight) for the odd ones.
#pragma once

#include "attention_dequantize.h"

#if defined(PENSTOCK_TILES)
namespace {

class DecodeAttention {
 public:
  static constexpr int kMaxRows = tiles::kSide / 2;

  explicit DecodeAttention(const TileBlocks& blocks)
      : blocks(blocks), problem(blocks.problem), head_dim(blocks.head_dim), group(blocks.group), depth(blocks.depth),
        lines_per_step(2 * kTile / blocks.values_per_line), dequantized(blocks),
        queries(kSide * head_dim / 2), totals(kMaxRows * head_dim), last_values(2 * kSide * head_dim) {}

  // Computes an item. Tiles must be configured for 16 rows. `next` is the item that likely follows, or null.
  void run(const Item& item, const Item* next) {
    const int rows = item.num_queries * group;
    const int first_position = blocks.position_of(item), stop = first_position + item.num_queries;
    blocks.read_queries(item, 1, queries.data());
    std::fill_n(totals.begin(), rows * head_dim, 0.0f);
    std::fill_n(row_max, rows, kInitialMax);
    std::fill_n(sums, rows * kLanes, 0.0f);
    int key = blocks.first_key(item);
    for (Place here = blocks.find(item, key, stop), ahead; key < stop; key += kBlock, here = ahead) {
      ahead = here;
      if (key + kBlock < stop) ahead = blocks.find(item, key + kBlock, stop);
      else if (next) ahead = blocks.find(*next, blocks.first_key(*next), blocks.position_of(*next) + next->num_queries);
      if (problem.kv_kind) {
        TileBlocks::prefetch_scales(ahead);
        dequantized.decode_keys(here, stop - key);
      }
      score(here, ahead);
      if (problem.kv_kind) dequantized.decode_values(here, stop - key);  // while the tiles score
      transpose_scores(rows);
      for (int row = 0; row < rows; ++row) update_softmax(row, key, first_position + row / group, here);
      if (stop - key < kBlock) zero_unseen_values(here, stop - key);
      accumulate(here, rows, ahead);
    }
    for (int row = 0; row < rows; ++row) write_row(item, row);
  }

 private:
  static constexpr int kSide = TileBlocks::kSide, kParts = TileBlocks::kParts, kTile = kSide * kSide;
  typedef TileBlocks::Place Place;

  const TileBlocks& blocks;
  const Problem& problem;
  const int head_dim, group, depth;
  const int lines_per_step;  // cache lines of a part's keys or values, per tile of them
  DequantizedBlock dequantized;
  Lines<uint32_t> queries;      // [depth][16 words][16 rows]
  Lines<float> totals;          // [depth][kMostRows][even values, odd values][16]
  Lines<uint16_t> last_values;  // [2][16][H], the second half 0
  alignas(64) float by_key[kBlock * kSide];  // scores
  alignas(64) float by_row[kSide * kBlock];
  alignas(64) uint32_t weights[kParts][kTile] = {};  // [part][kMostRows][(weight, 0), (0, weight)][16]
  alignas(64) float products[4][kTile];
  alignas(64) float sums[kMaxRows * kLanes];
  float row_max[kMaxRows];

  // Prefetches the lines of tile `step` of 16 keys or values, counted in memory order. To L2: a prefetch to L1 would
  // delay the reads there.
  void prefetch(const uint16_t* from, int step) const {
    from += step * lines_per_step * 32;
    for (int line = 0; line < lines_per_step; ++line) __builtin_prefetch(from + line * 32, 0, 2);
  }

  // Computes scores of all four parts together, because a product does not wait for those of other parts.
  void score(const Place& here, const Place& ahead) {
    const int stride = head_dim * 2;
    TileBlocks::compiler_barrier();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < depth; ++step) {
      _tile_loadd(7, queries.data() + step * kTile, 64);
      _tile_loadd(4, here.keys[0] + step * 32, stride);
      _tile_dpbf16ps(0, 4, 7);
      prefetch(ahead.keys[0], step);
      _tile_loadd(5, here.keys[1] + step * 32, stride);
      _tile_dpbf16ps(1, 5, 7);
      prefetch(ahead.keys[1], step);
      _tile_loadd(6, here.keys[2] + step * 32, stride);
      _tile_dpbf16ps(2, 6, 7);
      prefetch(ahead.keys[2], step);
      _tile_loadd(4, here.keys[3] + step * 32, stride);
      _tile_dpbf16ps(3, 4, 7);
      prefetch(ahead.keys[3], step);
    }
    _tile_stored(0, by_key, 64);
    _tile_stored(1, by_key + kTile, 64);
    _tile_stored(2, by_key + 2 * kTile, 64);
    _tile_stored(3, by_key + 3 * kTile, 64);
  }

  // Transposes scores by key to scores by row; with up to four rows, only four are transposed.
  void transpose_scores(int rows) {
    for (int part = 0; part < kParts; ++part) {
      const float* from = by_key + part * kTile;
      if (rows > 4) {
        Words tile[kSide];
        for (int key = 0; key < kSide; ++key) tile[key] = load<Words>(from + key * kSide);
        transpose(tile, reinterpret_cast<uint32_t*>(by_row + part * kSide), kBlock);
        continue;
      }
      __m512 quarter[4];  // quarter i: the four rows' scores of keys i, 4 + i, 8 + i, 12 + i
      for (int i = 0; i < 4; ++i) {
        quarter[i] = _mm512_castps128_ps512(_mm_load_ps(from + i * kSide));
        quarter[i] = _mm512_mask_broadcast_f32x4(quarter[i], 0x00f0, _mm_load_ps(from + (4 + i) * kSide));
        quarter[i] = _mm512_mask_broadcast_f32x4(quarter[i], 0x0f00, _mm_load_ps(from + (8 + i) * kSide));
        quarter[i] = _mm512_mask_broadcast_f32x4(quarter[i], 0xf000, _mm_load_ps(from + (12 + i) * kSide));
      }
      const __m512 low01 = _mm512_unpacklo_ps(quarter[0], quarter[1]);
      const __m512 high01 = _mm512_unpackhi_ps(quarter[0], quarter[1]);
      const __m512 low23 = _mm512_unpacklo_ps(quarter[2], quarter[3]);
      const __m512 high23 = _mm512_unpackhi_ps(quarter[2], quarter[3]);
      const auto together = [](__m512 a, __m512 b, bool upper) {
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return _mm512_castpd_ps(upper ? _mm512_unpackhi_pd(x, y) : _mm512_unpacklo_pd(x, y));
      };
      float* to = by_row + part * kSide;
      _mm512_store_ps(to, together(low01, low23, false));
      _mm512_store_ps(to + kBlock, together(low01, low23, true));
      _mm512_store_ps(to + 2 * kBlock, together(high01, high23, false));
      _mm512_store_ps(to + 3 * kBlock, together(high01, high23, true));
    }
  }

  float* total_of(int step, int row) { return totals.data() + (step * kMaxRows + row) * 2 * kSide; }

  // Turns the scores of one row into weights relative to the maximum so far, and rescales what was accumulated before.
  void update_softmax(int row, int first_key, int position, const Place& place) {
    const int lowest = problem.window ? position - problem.window + 1 : 0;
    const bool is_whole = first_key >= lowest && first_key + kBlock <= position + 1;
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats scores[kParts], best = splat(kMaskedScore);
    for (int part = 0; part < kParts; ++part) {
      scores[part] = load<Floats>(by_row + row * kBlock + part * kSide);
      if (problem.kv_kind) scores[part] *= load<Floats>(place.key_scales[part]);
      if (!is_whole) {
        const Ints key = lane + (first_key + part * kSide);
        scores[part] = ((key >= lowest) & (key <= position)) ? scores[part] : splat(kMaskedScore);
      }
      best = maximum(best, scores[part]);
    }
    const float factor = blocks.score_factor(), before = row_max[row];
    const float now = std::max(before, largest(best) * factor);
    Floats total{};
    for (int part = 0; part < kParts; ++part) {
      Floats weight =
          (Floats)TileBlocks::weight_of((__m512)scores[part], _mm512_set1_ps(factor), _mm512_set1_ps(now));
      total += weight;
      if (problem.kv_kind) weight *= load<Floats>(place.value_scales[part]);
      const Words low = __builtin_convertvector(narrow(weight), Words);
      uint32_t* to = weights[part] + row * 2 * kSide;
      store(to, low);
      store(to + kSide, low << 16);
    }
    float* sum = sums + row * kLanes;
    if (before == now) {
      store(sum, load<Floats>(sum) + total);
      return;
    }
    const float rescale = ((Floats)TileBlocks::power_of_two(_mm512_set1_ps(before - now)))[0];
    row_max[row] = now;
    store(sum, load<Floats>(sum) * rescale + total);
    for (int step = 0; step < depth; ++step) {
      float* to = total_of(step, row);
      store(to, load<Floats>(to) * rescale);
      store(to + kSide, load<Floats>(to + kSide) * rescale);
    }
  }

  // Replaces the values of keys from the `count`th on, which no query sees, with 0: unwritten slots may hold NaN.
  void zero_unseen_values(Place& place, int count) {
    for (int part = 0; part < kParts; ++part, count -= kSide) {
      if (count >= kSide) continue;
      uint16_t *const to = last_values.data(), *const zeros = to + kSide * head_dim;
      if (count > 0) {
        std::memcpy(to, place.values[part], count * head_dim * 2);
        std::fill(to + count * head_dim, zeros, 0);
      }
      place.values[part] = count > 0 ? to : zeros;
    }
  }

  void accumulate(const Place& here, int rows, const Place& ahead) {
    TileBlocks::compiler_barrier();
    for (int part = 0; part < kParts; part += 2) {
      const uint16_t *even = here.values[part], *odd = here.values[part + 1];
      const int stride = head_dim * 2;
      _tile_loadd(4, weights[part], 64);
      _tile_loadd(5, weights[part + 1], 64);
      for (int step = 0; step < depth; step += 2) {
        _tile_zero(0);
        _tile_loadd(6, even + step * 32, stride);
        _tile_dpbf16ps(0, 4, 6);
        prefetch(ahead.values[part], step);
        _tile_zero(1);
        _tile_loadd(7, odd + step * 32, stride);
        _tile_dpbf16ps(1, 5, 7);
        prefetch(ahead.values[part + 1], step);
        _tile_stored(0, products[0], 64);
        _tile_stored(1, products[1], 64);
        if (step + 1 < depth) {
          _tile_zero(2);
          _tile_loadd(6, even + (step + 1) * 32, stride);
          _tile_dpbf16ps(2, 4, 6);
          prefetch(ahead.values[part], step + 1);
          _tile_zero(3);
          _tile_loadd(7, odd + (step + 1) * 32, stride);
          _tile_dpbf16ps(3, 5, 7);
          prefetch(ahead.values[part + 1], step + 1);
          _tile_stored(2, products[2], 64);
          _tile_stored(3, products[3], 64);
          add(total_of(step + 1, 0), products[2], products[3], rows);
        }
        add(total_of(step, 0), products[0], products[1], rows);
      }
    }
  }

  // Adds the sum of both products, as a single product over pairs of an even and an odd part would.
  static void add(float* total, const float* even, const float* odd, int rows) {
    for (int i = 0; i < 2 * rows * kSide; i += kSide) {
      const Floats sum = load<Floats>(even + i) + load<Floats>(odd + i);
      store(total + i, load<Floats>(total + i) + sum);
    }
  }

  void write_row(const Item& item, int row) {
    const float factor = 1.0f / sum(load<Floats>(sums + row * kLanes));
    for (int step = 0; step < depth; ++step) {
      const float* from = total_of(step, row);
      store(blocks.output_address(item, row, step * 32),
            linear::rounded_pairs(load<Floats>(from) * factor, load<Floats>(from + kSide) * factor));
    }
  }
};

}  // namespace
#endif
