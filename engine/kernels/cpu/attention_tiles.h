// Attention in bf16 on AMX tiles, over pages of a multiple of 16 tokens. Otherwise as in attention.h, which see. Items
// of up to 16 rows, as decodes have, are computed here, larger ones in attention_prompts.h; a row's bits are the same.
//
// K is read where it stands: 16 keys of a page are a tile, and the product gives scores key by key, turned around
// afterwards. For that the queries are laid out once. V is woven in pairs of keys, in the order that costs least: of 32
// neighbouring values first 0-3, 8-11, 16-19, 24-27, then the rest; `write_row` puts them right.
#pragma once

#include "attention_prompts.h"

#include <memory>

namespace {

// Rows of an item: what is made of a block of V serves all strips of them. The fewer, where threads would go without.
constexpr int kMostTileRows = 192, kFewerTileRows = 64, kItemsOfThread = 4;

}  // namespace

#if defined(PENSTOCK_TILES)
namespace {

class TileAttention {
 public:
  static bool fits(const Problem& problem) { return tiles::available() && problem.page_size % tiles::kSide == 0; }
  static int queries_of_item(int group, int rows) { return std::max(1, rows / group); }

  explicit TileAttention(const Problem& p)
      : problem(p), blocks(p), head_dim(p.head_dim), group(blocks.group), depth(blocks.depth),
        queries(kSide * head_dim / 2), values(kBlock / 2 * head_dim), totals(kSide * head_dim), highest(kSide),
        sums(kSide * kLanes) {}
  ~TileAttention() {
    if (tile_rows) tiles::release();
  }

  // `next` is what is likely to be computed after it, or null.
  void run(const Item& item, const Item* next) {
    const int rows = item.num_queries * group;
    if (std::min(rows, kSide) != tile_rows) tiles::configure(tile_rows = std::min(rows, kSide));
    if (rows > kSide) {
      if (!prompts) prompts = std::make_unique<PromptAttention>(blocks, queries_of_item(group, kMostTileRows) * group);
      return prompts->run(item, next);
    }
    const int first_position = blocks.position_of(item), stop = first_position + item.num_queries;
    blocks.read_queries(item, 1, queries.data());
    std::fill(totals.begin(), totals.end(), 0.0f);
    std::fill(highest.begin(), highest.end(), kNothingSeen);
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (int key = blocks.first_key(item); key < stop; key += kBlock) {
      const Place here = blocks.find(item, key, stop);
      blocks.ask_for_next(item, key, stop, next);
      weave(here, stop - key);
      score(here);
      turn(rows);
      for (int row = 0; row < rows; ++row) weigh(row, key, first_position + row / group);
      gather();
    }
    for (int row = 0; row < rows; ++row)
      blocks.write_row(item, row, totals.data() + row * head_dim, sum(load<Floats>(sums.data() + row * kLanes)));
  }

 private:
  static constexpr int kSide = TileBlocks::kSide, kParts = TileBlocks::kParts;
  typedef TileBlocks::Place Place;

  const Problem& problem;
  const TileBlocks blocks;
  const int head_dim, group, depth;
  std::unique_ptr<PromptAttention> prompts;  // made for the first item that needs it
  int tile_rows = 0;
  Lines<uint32_t> queries;  // [depth][16 words][16 rows]
  Lines<uint32_t> values;   // [kBlock / 2][H]
  Lines<float> totals, highest, sums;
  alignas(64) float by_key[kBlock * kSide];  // scores
  alignas(64) float by_row[kSide * kBlock];
  alignas(64) uint16_t weights[kSide * kBlock];

  // Pairs of keys; values of keys that no query sees count as 0, because what stands there may be no number.
  void weave(const Place& place, int num_keys) {
    for (int part = 0; part < kParts; ++part)
      for (int key = 0; key < kSide; key += 2) {
        uint32_t* to = values.data() + (part * kSide + key) / 2 * head_dim;
        const uint16_t* from = place.values[part] + key * head_dim;
        const bool has_first = part * kSide + key < num_keys, has_second = part * kSide + key + 1 < num_keys;
        for (int d = 0; d < head_dim; d += 32) {
          const __m512i first = has_first ? _mm512_loadu_si512(from + d) : _mm512_setzero_si512();
          const __m512i second = has_second ? _mm512_loadu_si512(from + head_dim + d) : _mm512_setzero_si512();
          _mm512_storeu_si512(to + d, _mm512_unpacklo_epi16(first, second));
          _mm512_storeu_si512(to + d + 16, _mm512_unpackhi_epi16(first, second));
        }
      }
  }

  void score(const Place& place) {
    const uint32_t* query = queries.data();
    if (tile_rows == kSide) return blocks.score_whole(place, query, by_key);
    for (int part = 0; part < kParts; ++part) {
      _tile_zero(6);
      for (int step = 0; step < depth; ++step) {
        _tile_loadd(5, place.keys[part] + step * 32, head_dim * 2);
        _tile_loadd(7, query + step * kSide * kSide, 64);
        _tile_dpbf16ps(6, 5, 7);
      }
      _tile_stored(6, by_key + part * kSide * kSide, 64);
    }
  }

  // Scores by key to scores by row; four rows at a time where there are few.
  void turn(int rows) {
    for (int part = 0; part < kParts; ++part) {
      const float* from = by_key + part * kSide * kSide;
      if (rows > 4) {
        Words tile[kSide];
        for (int key = 0; key < kSide; ++key) tile[key] = load<Words>(from + key * kSide);
        transpose(tile, reinterpret_cast<uint32_t*>(by_row + part * kSide), kBlock);
        continue;
      }
      __m512 quarter[4];  // quarter i: of keys i, 4 + i, 8 + i, 12 + i the four rows' scores
      for (int i = 0; i < 4; ++i) {
        quarter[i] = _mm512_castps128_ps512(_mm_load_ps(from + i * kSide));
        quarter[i] = _mm512_mask_broadcast_f32x4(quarter[i], 0x00f0, _mm_load_ps(from + (4 + i) * kSide));
        quarter[i] = _mm512_mask_broadcast_f32x4(quarter[i], 0x0f00, _mm_load_ps(from + (8 + i) * kSide));
        quarter[i] = _mm512_mask_broadcast_f32x4(quarter[i], 0xf000, _mm_load_ps(from + (12 + i) * kSide));
      }
      const __m512 low01 = _mm512_unpacklo_ps(quarter[0], quarter[1]), high01 = _mm512_unpackhi_ps(quarter[0], quarter[1]);
      const __m512 low23 = _mm512_unpacklo_ps(quarter[2], quarter[3]), high23 = _mm512_unpackhi_ps(quarter[2], quarter[3]);
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

  // Scores of one row to weights against the highest score so far; what was gathered before is scaled to match.
  void weigh(int row, int first_key, int position) {
    constexpr int kVectors = kBlock / kLanes;
    const int lowest = problem.window ? position - problem.window + 1 : 0;
    const bool is_whole = first_key >= lowest && first_key + kBlock <= position + 1;
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats scores[kVectors], best = splat(kUnseen);
    for (int v = 0; v < kVectors; ++v) {
      scores[v] = load<Floats>(by_row + row * kBlock + v * kLanes);
      if (!is_whole) {
        const Ints key = lane + (first_key + v * kLanes);
        scores[v] = ((key >= lowest) & (key <= position)) ? scores[v] : splat(kUnseen);
      }
      best = maximum(best, scores[v]);
    }
    const float factor = blocks.score_factor(), before = highest[row];
    const float now = std::max(before, largest(best) * factor);
    Floats total{};
    for (int v = 0; v < kVectors; ++v) {
      const Floats weight = (Floats)TileBlocks::weight_of((__m512)scores[v], _mm512_set1_ps(factor), _mm512_set1_ps(now));
      total += weight;
      store_floats(weights + row * kBlock + v * kLanes, weight, kLanes);
    }
    float* sum = sums.data() + row * kLanes;
    if (before == now) {
      store(sum, load<Floats>(sum) + total);
      return;
    }
    const float fade = ((Floats)TileBlocks::power_of_two(_mm512_set1_ps(before - now)))[0];
    highest[row] = now;
    store(sum, load<Floats>(sum) * fade + total);
    float* to = totals.data() + row * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) store(to + d, load<Floats>(to + d) * fade);
  }

  void gather() {
    const uint32_t* weight = reinterpret_cast<const uint32_t*>(weights);
    float* total = totals.data();
    int d = 0;
    for (; d + 4 * kSide <= head_dim; d += 4 * kSide)
      tiles::multiply_four<true>(total + d, head_dim, weight, kBlock / 2, values.data() + d, head_dim, 2);
    for (; d < head_dim; d += kSide)
      tiles::multiply_one(total + d, head_dim, weight, kBlock / 2, values.data() + d, head_dim, 2);
  }
};

}  // namespace
#else
struct TileAttention {
  static bool fits(const Problem&) { return false; }
  static int queries_of_item(int, int) { return 1; }
  explicit TileAttention(const Problem&) {}
  void run(const Item&, const Item*) {}
};
#endif

namespace {

// The items of `problem` for bf16 pages, and their computation by the threads of the region that this is called in.
inline std::vector<Item> list_items_of_bf16(const Problem& problem, int num_threads) {
  const int group = problem.num_heads / problem.num_kv_heads;
  if (!TileAttention::fits(problem)) return list_items(problem, queries_of_item(group));
  const std::vector<Item> items = list_items(problem, TileAttention::queries_of_item(group, kMostTileRows));
  if (num_threads == 1 || items.size() >= size_t(num_threads) * kItemsOfThread) return items;
  return list_items(problem, TileAttention::queries_of_item(group, kFewerTileRows));
}

inline void attend_in_bf16(const Problem& problem, const std::vector<Item>& items) {
  const int64_t count = items.size();
  if (TileAttention::fits(problem)) {
    TileAttention attention(problem);
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i) attention.run(items[i], i + 1 < count ? &items[i + 1] : nullptr);
    return;
  }
  const int rows = rows_of_item(problem.num_heads / problem.num_kv_heads);
  Scratch scratch(rows, problem.head_dim / 2, problem.head_dim);
  Attention<BFloat16, Plain> attention(problem, scratch);
#pragma omp for schedule(dynamic)
  for (int64_t i = 0; i < count; ++i) attention.run(items[i]);
}

}  // namespace
