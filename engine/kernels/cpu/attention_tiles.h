// Attention in bf16 on AMX tiles, over pages of a multiple of 16 tokens. Otherwise as in attention.h, which see.
//
// K is read where it stands: 16 keys of a page are a tile, and the product gives scores key by key, turned around
// afterwards. For that the queries are laid out once. V is woven in pairs of keys, in the order that costs least: of 32
// neighbouring values first 0-3, 8-11, 16-19, 24-27, then the rest; `write_out` puts them right.
#pragma once

#include "attention.h"

#if defined(PENSTOCK_TILES)
namespace {

constexpr int kTileRowTarget = 64;  // rows of an item: what is made of a block of V serves four strips of them

class TileAttention {
 public:
  static bool fits(const Problem& problem) { return tiles::available() && problem.page_size % tiles::kSide == 0; }
  static int queries_of_item(int group) { return std::max(1, kTileRowTarget / group); }

  explicit TileAttention(const Problem& p)
      : problem(p), head_dim(p.head_dim), group(p.num_heads / p.num_kv_heads), depth(p.head_dim / 32) {
    const int rows = (queries_of_item(group) * group + kSide - 1) / kSide * kSide;
    queries.resize(rows * head_dim / 2);
    totals.resize(rows * head_dim);
    highest.resize(rows);
    sums.resize(rows * kLanes);
    values.resize(kBlock / 2 * head_dim);
  }
  ~TileAttention() {
    if (tile_rows) tiles::release();
  }

  // `next` is what is likely to be computed after it, or null.
  void run(const Item& item, const Item* next) {
    const int start = problem.query_start[item.sequence], rows = item.num_queries * group;
    const int first_position = position_of(item), stop = first_position + item.num_queries;
    const int strips = (rows + kSide - 1) / kSide;
    if (std::min(rows, kSide) != tile_rows) tiles::configure(tile_rows = std::min(rows, kSide));
    read_queries(item, start, strips);
    std::fill_n(totals.begin(), strips * kSide * head_dim, 0.0f);
    std::fill_n(highest.begin(), strips * kSide, kNothingSeen);
    std::fill_n(sums.begin(), strips * kSide * kLanes, 0.0f);
    for (int key = first_key(item); key < stop; key += kBlock) {
      const Place here = find(item, key, stop);
      if (key + kBlock < stop) ask_for(find(item, key + kBlock, stop));
      else if (next) ask_for(find(*next, first_key(*next), position_of(*next) + next->num_queries));
      weave(here, stop - key);
      for (int strip = 0; strip < strips; ++strip) {
        const int last_row = std::min(rows, (strip + 1) * kSide) - 1;
        if (first_position + last_row / group < key) continue;  // sees none of these keys
        score(here, strip);
        turn(std::min(rows - strip * kSide, kSide));
        for (int row = strip * kSide; row <= last_row; ++row) weigh(row, key, first_position + row / group);
        gather(strip);
      }
    }
    write_out(item, start, rows);
  }

 private:
  static constexpr int kSide = tiles::kSide, kParts = kBlock / kSide;
  struct Place {
    const uint16_t *keys[kParts], *values[kParts];  // of 16 tokens each
  };

  const Problem& problem;
  const int head_dim, group, depth;
  int tile_rows = 0;
  std::vector<uint32_t> queries;  // [strip][depth][16 words][16 rows]
  std::vector<uint32_t> values;   // [kBlock / 2][H]
  std::vector<float> totals, highest, sums;
  alignas(64) float by_key[kBlock * kSide];  // scores
  alignas(64) float by_row[kSide * kBlock];
  alignas(64) uint16_t weights[kSide * kBlock];

  int position_of(const Item& item) const {
    const int num_tokens = problem.query_start[item.sequence + 1] - problem.query_start[item.sequence];
    return problem.context_lens[item.sequence] - num_tokens + item.first_query;
  }
  int first_key(const Item& item) const {
    const int key = problem.window ? std::max(0, position_of(item) - problem.window + 1) : 0;
    return key - key % kBlock;  // blocks start at the same keys for every way to cut a prompt into chunks
  }

  // Parts from `stop` on repeat the last one.
  Place find(const Item& item, int first, int stop) const {
    const int32_t* pages = problem.page_table + int64_t(item.sequence) * problem.table_width;
    const int64_t to_value = int64_t(problem.num_kv_heads) * problem.page_size * head_dim;
    Place place;
    for (int part = 0; part < kParts; ++part) {
      const int key = std::min(first + part * kSide, (stop - 1) / kSide * kSide);
      const int64_t page = pages[key / problem.page_size], token = key % problem.page_size;
      place.keys[part] = reinterpret_cast<const uint16_t*>(static_cast<const char*>(problem.pool) + page * problem.page_stride) +
                         (int64_t(item.kv_head) * problem.page_size + token) * head_dim;
      place.values[part] = place.keys[part] + to_value;
    }
    return place;
  }

  // Pages lie anywhere in memory, which the hardware cannot foresee.
  void ask_for(const Place& place) const {
    for (int part = 0; part < kParts; ++part)
      for (int i = 0; i < kSide * head_dim; i += 32) {
        __builtin_prefetch(place.keys[part] + i);
        __builtin_prefetch(place.values[part] + i);
      }
  }

  void read_queries(const Item& item, int start, int strips) {
    const int rows = item.num_queries * group;
    for (int strip = 0; strip < strips; ++strip)
      for (int step = 0; step < depth; ++step) {
        Words from[kSide];
        for (int lane = 0; lane < kSide; ++lane) {
          const int row = std::min(strip * kSide + lane, rows - 1);
          const int64_t token = start + item.first_query + row / group;
          from[lane] = load<Words>(static_cast<const uint16_t*>(problem.q) + token * problem.q_stride +
                                   (item.kv_head * group + row % group) * head_dim + step * 32);
        }
        transpose(from, queries.data() + (strip * depth + step) * kSide * kSide, kSide);
      }
  }

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

  void score(const Place& place, int strip) {
    const uint32_t* query = queries.data() + strip * depth * kSide * kSide;
    if (tile_rows == kSide) return score_whole(place, query);
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

  // All four parts at once: a product waits for none of another part.
  void score_whole(const Place& place, const uint32_t* query) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int step = 0; step < depth; ++step) {
      _tile_loadd(7, query + step * kSide * kSide, 64);
      _tile_loadd(4, place.keys[0] + step * 32, head_dim * 2);
      _tile_dpbf16ps(0, 4, 7);
      _tile_loadd(5, place.keys[1] + step * 32, head_dim * 2);
      _tile_dpbf16ps(1, 5, 7);
      _tile_loadd(4, place.keys[2] + step * 32, head_dim * 2);
      _tile_dpbf16ps(2, 4, 7);
      _tile_loadd(6, place.keys[3] + step * 32, head_dim * 2);
      _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, by_key, 64);
    _tile_stored(1, by_key + kSide * kSide, 64);
    _tile_stored(2, by_key + 2 * kSide * kSide, 64);
    _tile_stored(3, by_key + 3 * kSide * kSide, 64);
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

  // 2^x, relative error below 3e-6, less than bf16 keeps.
  static __m512 power_of_two(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, 0);  // from the nearest whole number
    __m512 y = _mm512_set1_ps(1.3333558146e-3f);
    for (float factor : {9.6181291076e-3f, 5.5504108665e-2f, 2.4022650696e-1f, 6.9314718056e-1f, 1.0f})
      y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(y, _mm512_sub_ps(x, r));
  }

  // Scores of one row to weights against the highest score so far; what was gathered before is scaled to match.
  void weigh(int row, int first_key, int position) {
    constexpr int kVectors = kBlock / kLanes;
    const int lowest = problem.window ? position - problem.window + 1 : 0;
    const bool is_whole = first_key >= lowest && first_key + kBlock <= position + 1;
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int place = row % kSide;
    Floats scores[kVectors], best = splat(kMasked);
    for (int v = 0; v < kVectors; ++v) {
      scores[v] = load<Floats>(by_row + place * kBlock + v * kLanes) * (problem.scale * 1.44269504f);
      if (!is_whole) {
        const Ints key = lane + (first_key + v * kLanes);
        scores[v] = ((key >= lowest) & (key <= position)) ? scores[v] : splat(kMasked);
      }
      best = maximum(best, scores[v]);
    }
    const float before = highest[row], now = std::max(before, largest(best));
    Floats total{};
    for (int v = 0; v < kVectors; ++v) {
      const Floats weight = (Floats)power_of_two((__m512)(scores[v] - now));
      total += weight;
      store_floats(weights + place * kBlock + v * kLanes, weight, kLanes);
    }
    float* sum = sums.data() + row * kLanes;
    if (before == now) {
      store(sum, load<Floats>(sum) + total);
      return;
    }
    const float fade = ((Floats)power_of_two(_mm512_set1_ps(before - now)))[0];
    highest[row] = now;
    store(sum, load<Floats>(sum) * fade + total);
    float* to = totals.data() + row * head_dim;
    for (int d = 0; d < head_dim; d += kLanes) store(to + d, load<Floats>(to + d) * fade);
  }

  void gather(int strip) {
    const uint32_t* weight = reinterpret_cast<const uint32_t*>(weights);
    float* total = totals.data() + strip * kSide * head_dim;
    int d = 0;
    for (; d + 4 * kSide <= head_dim; d += 4 * kSide)
      tiles::multiply_four<true>(total + d, head_dim, weight, kBlock / 2, values.data() + d, head_dim, 2);
    for (; d < head_dim; d += kSide)
      tiles::multiply_one(total + d, head_dim, weight, kBlock / 2, values.data() + d, head_dim, 2);
  }

  void write_out(const Item& item, int start, int rows) {
    const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const int width = problem.num_heads * head_dim;
    for (int row = 0; row < rows; ++row) {
      const int64_t token = start + item.first_query + row / group;
      const int head = item.kv_head * group + row % group;
      const float factor = 1.0f / sum(load<Floats>(sums.data() + row * kLanes));
      uint16_t* out = static_cast<uint16_t*>(problem.out);
      for (int d = 0; d < head_dim; d += 32) {
        const float* from = totals.data() + row * head_dim + d;
        const __m512 first = _mm512_loadu_ps(from), second = _mm512_loadu_ps(from + 16);
        uint16_t* to = out + (problem.out_is_tiled ? linear::place(token, head * head_dim + d, width)
                                                   : token * width + head * head_dim + d);
        store_floats(to, (Floats)_mm512_permutex2var_ps(first, lower, second) * factor, kLanes);
        store_floats(to + kLanes, (Floats)_mm512_permutex2var_ps(first, upper, second) * factor, kLanes);
      }
    }
  }
};

}  // namespace
#else
struct TileAttention {
  static bool fits(const Problem&) { return false; }
  static int queries_of_item(int) { return 1; }
  explicit TileAttention(const Problem&) {}
  void run(const Item&, const Item*) {}
};
#endif

namespace {

// The items of `problem` for bf16 pages, and their computation by the threads of the region that this is called in.
inline std::vector<Item> list_items_of_bf16(const Problem& problem) {
  const int group = problem.num_heads / problem.num_kv_heads;
  return list_items(problem, TileAttention::fits(problem) ? TileAttention::queries_of_item(group) : queries_of_item(group));
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
