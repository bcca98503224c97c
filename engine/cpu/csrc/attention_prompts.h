// Attention on AMX tiles for items of more rows than attention_decodes.h takes, as prompts have. Results are the same
// bit for bit.
//
// A vector holds one key and 16 rows throughout: in the scores that K times Q gives, in the weights, and in the totals,
// which are the product of transposed V and the weights. So only V is transposed, once for all strips, and a row's
// maximum and sum need no operation across lanes.
#pragma once

#include "attention_dequantize.h"

#if defined(PENSTOCK_TILES)
namespace {

class PromptAttention {
 public:
  // Allocates for items of up to `rows` rows.
  PromptAttention(const TileBlocks& blocks, int rows)
      : blocks(blocks), problem(blocks.problem), head_dim(blocks.head_dim), group(blocks.group), dequantized(blocks),
        max_rows((rows + kSide - 1) / kSide * kSide), queries(max_rows * head_dim / 2),
        values(kBlock / 2 * head_dim), totals(max_rows * head_dim), sums(max_rows * kSide), row_max(max_rows) {}

  // Computes an item. Tiles must be configured for 16 rows. `next` is the item that likely follows, or null.
  void run(const Item& item, const Item* next) {
    const int rows = item.num_queries * group, strips = (rows + kSide - 1) / kSide;
    const int first_position = blocks.position_of(item), stop = first_position + item.num_queries;
    blocks.read_queries(item, strips, queries.data());
    std::fill_n(totals.begin(), strips * kSide * head_dim, 0.0f);
    std::fill_n(row_max.begin(), strips * kSide, kInitialMax);
    std::fill_n(sums.begin(), strips * kSide * kSide, 0.0f);
    for (int key = blocks.first_key(item); key < stop; key += kBlock) {
      here = blocks.find(item, key, stop);
      blocks.prefetch_next(item, key, stop, next);
      if (problem.kv_kind) {
        dequantized.decode_keys(here, stop - key);
        dequantized.decode_values(here, stop - key);
      }
      interleave(here, stop - key);
      int strip = std::max(0, key - first_position) * group / kSide;  // the first that sees any of these keys
      score(here, strip);
      for (int first = strip; strip < strips; ++strip) {
        // The tile unit works on the strips before and after while the vector units work on this one.
        if (strip > first) accumulate(strip - 1);
        if (strip + 1 < strips) score(here, strip + 1);
        update_softmax(strip, key, first_position, rows);
      }
      accumulate(strips - 1);
    }
    for (int strip = 0; strip < strips; ++strip) write_strip(item, strip, std::min(rows - strip * kSide, kSide));
  }

 private:
  static constexpr int kSide = TileBlocks::kSide, kTile = kSide * kSide;

  const TileBlocks& blocks;
  const Problem& problem;
  const int head_dim, group, max_rows;
  DequantizedBlock dequantized;
  TileBlocks::Place here;   // the current block
  Lines<uint32_t> queries;  // [strip][depth][16 words][16 rows]
  Lines<uint32_t> values;   // [32 keys][16 values][16 values][16 pairs of keys]
  Lines<float> totals;      // [strip][H][16 rows]
  Lines<float> sums;        // [strip][key % 16][16 rows]
  Lines<float> row_max;     // [strip][16 rows]
  alignas(64) float scores[2][kBlock * kSide];  // of even and odd strips: [key][16 rows]
  alignas(64) uint32_t weights[2][kBlock / 2 * kSide];

  // Transposes V into pairs of keys: one of an even part and the key 16 further on, the order in which
  // attention_decodes.h adds them too. Values of keys that no query sees become 0, because unwritten slots may hold
  // NaN.
  void interleave(const TileBlocks::Place& place, int num_keys) {
    uint32_t* to = values.data();
    for (int half = 0; half < 2; ++half)
      for (int d = 0; d < head_dim; d += 32, to += 2 * kTile) {
        Words low[kSide], high[kSide];
        for (int pair = 0; pair < kSide; ++pair) {
          const int part = half * 2, key = part * kSide + pair, at = pair * head_dim + d;
          const __m512i first = key < num_keys ? _mm512_loadu_si512(place.values[part] + at) : _mm512_setzero_si512();
          const __m512i second =
              key + kSide < num_keys ? _mm512_loadu_si512(place.values[part + 1] + at) : _mm512_setzero_si512();
          low[pair] = (Words)_mm512_unpacklo_epi16(first, second);
          high[pair] = (Words)_mm512_unpackhi_epi16(first, second);
        }
        transpose(low, to, kSide);
        transpose(high, to + kTile, kSide);
      }
  }

  void score(const TileBlocks::Place& place, int strip) {
    blocks.score_whole(place, queries.data() + strip * blocks.depth * kTile, scores[strip % 2]);
  }

  void update_softmax(int strip, int first_key, int first_position, int rows) {
    const int first = first_position + strip * kSide / group;
    const int last = first_position + std::min(rows - 1, strip * kSide + kSide - 1) / group;
    const bool is_whole = first_key + kBlock <= first + 1 && (!problem.window || first_key > last - problem.window);
    Ints position{};
    if (is_whole && problem.kv_kind) return update_softmax<true, true>(strip, first_key, position);
    if (is_whole) return update_softmax<true, false>(strip, first_key, position);
    for (int lane = 0; lane < kSide; ++lane)
      position[lane] = first_position + std::min(rows - 1, strip * kSide + lane) / group;
    if (problem.kv_kind) update_softmax<false, true>(strip, first_key, position);
    else update_softmax<false, false>(strip, first_key, position);
  }

  // Turns scores into weights relative to each row's maximum so far, and rescales what was accumulated before.
  template <bool kIsWhole, bool kIsQuantized> void update_softmax(int strip, int first_key, Ints position) {
    const float* from = scores[strip % 2];
    const __m512 factor = _mm512_set1_ps(blocks.score_factor());
    const Ints lowest = problem.window ? position - (problem.window - 1) : Ints{};
    const auto score_of = [&](int key) {
      __m512 score = _mm512_load_ps(from + key * kSide);
      if (kIsQuantized) score = _mm512_mul_ps(score, _mm512_set1_ps(here.key_scales[0][key]));
      if (kIsWhole) return score;
      const Ints at = Ints{} + (first_key + key);
      return (__m512)(((at >= lowest) & (at <= position)) ? (Floats)score : splat(kMaskedScore));
    };
    const auto scaled_weight = [&](__m512 weight, int key) {
      return (Floats)(kIsQuantized ? _mm512_mul_ps(weight, _mm512_set1_ps(here.value_scales[0][key])) : weight);
    };
    __m512 best[4];
    for (int i = 0; i < 4; ++i) best[i] = score_of(i);
    for (int key = 4; key < kBlock; key += 4)
      for (int i = 0; i < 4; ++i) best[i] = _mm512_max_ps(best[i], score_of(key + i));
    const __m512 before = _mm512_load_ps(&row_max[strip * kSide]);
    const __m512 block_max = _mm512_max_ps(_mm512_max_ps(best[0], best[1]), _mm512_max_ps(best[2], best[3]));
    const __m512 now = _mm512_max_ps(before, _mm512_mul_ps(block_max, factor));
    const __m512 rescale = TileBlocks::power_of_two(_mm512_sub_ps(before, now));
    uint32_t* to = weights[strip % 2];
    float* sum = &sums[strip * kTile];
    for (int key = 0; key < kSide; ++key) {
      __m512 total = _mm512_setzero_ps();
      for (int part = 0; part < kBlock; part += 2 * kSide) {
        const __m512 first = TileBlocks::weight_of(score_of(part + key), factor, now);
        const __m512 second = TileBlocks::weight_of(score_of(part + kSide + key), factor, now);
        total = _mm512_add_ps(_mm512_add_ps(total, first), second);
        store(to + (part / 2 + key) * kSide,
              linear::rounded_pairs(scaled_weight(first, part + key), scaled_weight(second, part + kSide + key)));
      }
      _mm512_store_ps(sum + key * kSide, _mm512_fmadd_ps(_mm512_load_ps(sum + key * kSide), rescale, total));
    }
    if (!_mm512_cmp_ps_mask(before, now, _CMP_NEQ_OQ)) return;
    _mm512_store_ps(&row_max[strip * kSide], now);
    float* total = &totals[strip * kSide * head_dim];
    for (int d = 0; d < head_dim; ++d)
      _mm512_store_ps(total + d * kSide, _mm512_mul_ps(_mm512_load_ps(total + d * kSide), rescale));
  }

  void accumulate(int strip) {
    float* total = &totals[strip * kSide * head_dim];
    int tile = 0;
    for (; tile + 4 <= head_dim / kSide; tile += 4) accumulate<4>(total + tile * kTile, tile, weights[strip % 2]);
    if (tile < head_dim / kSide) accumulate<2>(total + tile * kTile, tile, weights[strip % 2]);
  }

  template <int N> void accumulate(float* total, int tile, const uint32_t* weight) {
    const uint32_t *near = &values[tile * kTile], *far = near + head_dim / kSide * kTile;
    _tile_loadd(0, total, 64);
    _tile_loadd(1, total + kTile, 64);
    if constexpr (N == 4) {
      _tile_loadd(2, total + 2 * kTile, 64);
      _tile_loadd(3, total + 3 * kTile, 64);
    }
    for (const uint32_t* value : {near, far}) {
      _tile_loadd(7, weight, 64);
      weight += kTile;
      _tile_loadd(4, value, 64);
      _tile_dpbf16ps(0, 4, 7);
      _tile_loadd(5, value + kTile, 64);
      _tile_dpbf16ps(1, 5, 7);
      if constexpr (N == 4) {
        _tile_loadd(4, value + 2 * kTile, 64);
        _tile_dpbf16ps(2, 4, 7);
        _tile_loadd(6, value + 3 * kTile, 64);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    _tile_stored(0, total, 64);
    _tile_stored(1, total + kTile, 64);
    if constexpr (N == 4) {
      _tile_stored(2, total + 2 * kTile, 64);
      _tile_stored(3, total + 3 * kTile, 64);
    }
  }

  void write_strip(const Item& item, int strip, int rows) {
    Words from[kSide];
    alignas(64) float by_row[kTile];
    const auto transpose_to = [&](const float* tile, float* to, int stride) {
      for (int i = 0; i < kSide; ++i) from[i] = load<Words>(tile + i * kSide);
      transpose(from, reinterpret_cast<uint32_t*>(to), stride);
    };
    transpose_to(&sums[strip * kTile], by_row, kSide);
    float* const transposed = reinterpret_cast<float*>(values.data());  // of the same size, and no longer needed
    for (int d = 0; d < head_dim; d += kSide)
      transpose_to(&totals[(strip * head_dim + d) * kSide], transposed + d, head_dim);
    for (int row = 0; row < rows; ++row)
      blocks.write_row(item, strip * kSide + row, transposed + row * head_dim, sum(load<Floats>(by_row + row * kSide)));
  }
};

}  // namespace
#endif
