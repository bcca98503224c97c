// What decodes (attention_decodes.h) and prompts (attention_prompts.h) share in attention on AMX tiles: locating an
// item's blocks of keys, its queries as tiles, the exponential, and writing the output.
#pragma once

#include "attention.h"

#if defined(PENSTOCK_TILES)
namespace {

constexpr float kMaskedScore = -INFINITY;  // score of a key that a row does not see

struct TileBlocks {
  static constexpr int kSide = tiles::kSide, kParts = kBlock / kSide;
  // A block as parts of 16 tokens each. In a quantized pool keys and values are codes, which attention_dequantize.h
  // converts to bf16.
  struct Place {
    const uint16_t *keys[kParts], *values[kParts];
    const float *key_scales[kParts], *value_scales[kParts];
  };

  const Problem& problem;
  const int head_dim, group, depth;
  const int values_per_line;  // in a cache line of the pool

  explicit TileBlocks(const Problem& p)
      : problem(p), head_dim(p.head_dim), group(p.num_heads / p.num_kv_heads), depth(p.head_dim / 32),
        values_per_line(p.kv_kind ? 64 : 32) {}

  int position_of(const Item& item) const {
    const int num_tokens = problem.query_start[item.sequence + 1] - problem.query_start[item.sequence];
    return problem.context_lens[item.sequence] - num_tokens + item.first_query;
  }
  int first_key(const Item& item) const {
    const int key = problem.window ? std::max(0, position_of(item) - problem.window + 1) : 0;
    return key - key % kBlock;  // blocks start at the same keys however a prompt is split into chunks
  }

  // Locates the block from key `first` on; parts from `stop` on repeat the last one.
  Place find(const Item& item, int first, int stop) const {
    const int32_t* pages = problem.page_table + int64_t(item.sequence) * problem.table_width;
    const int64_t num_rows = int64_t(problem.num_kv_heads) * problem.page_size;
    const int64_t row_bytes = int64_t(head_dim) * (problem.kv_kind ? 1 : 2);
    Place place;
    for (int part = 0; part < kParts; ++part) {
      const int key = std::min(first + part * kSide, (stop - 1) / kSide * kSide);
      const int64_t page = pages[key / problem.page_size], token = key % problem.page_size;
      const char* const layer = static_cast<const char*>(problem.pool) + page * problem.page_stride;
      const int64_t row = int64_t(item.kv_head) * problem.page_size + token;
      place.keys[part] = reinterpret_cast<const uint16_t*>(layer + row * row_bytes);
      place.values[part] = reinterpret_cast<const uint16_t*>(layer + (num_rows + row) * row_bytes);
      place.key_scales[part] = reinterpret_cast<const float*>(layer + 2 * num_rows * row_bytes) + row;
      place.value_scales[part] = place.key_scales[part] + num_rows;
    }
    return place;
  }

  // Prefetches the block after `key`, of this item or of the next one (which may be null): pages lie anywhere in
  // memory, so the hardware cannot predict their addresses.
  void prefetch_next(const Item& item, int key, int stop, const Item* next) const {
    if (key + kBlock < stop) prefetch(find(item, key + kBlock, stop));
    else if (next) prefetch(find(*next, first_key(*next), position_of(*next) + next->num_queries));
  }

  void prefetch(const Place& place) const {
    for (int part = 0; part < kParts; ++part)
      for (int i = 0; i < kSide * head_dim / values_per_line * 32; i += 32) {
        __builtin_prefetch(place.keys[part] + i);
        __builtin_prefetch(place.values[part] + i);
      }
    if (problem.kv_kind) prefetch_scales(place);
  }
  static void prefetch_scales(const Place& place) {
    for (int part = 0; part < kParts; ++part) {
      __builtin_prefetch(place.key_scales[part]);
      __builtin_prefetch(place.value_scales[part]);
    }
  }

  // The compiler does not know what tile loads read. This makes it finish all writes to memory before them.
  static void compiler_barrier() { asm volatile("" ::: "memory"); }

  // Reads an item's queries as [strip][depth][16 words][16 rows].
  void read_queries(const Item& item, int strips, uint32_t* to) const {
    const int rows = item.num_queries * group;
    for (int strip = 0; strip < strips; ++strip)
      for (int step = 0; step < depth; ++step) {
        Words from[kSide];
        for (int lane = 0; lane < kSide; ++lane) {
          const int row = std::min(strip * kSide + lane, rows - 1);
          const int64_t token = problem.query_start[item.sequence] + item.first_query + row / group;
          from[lane] = load<Words>(static_cast<const uint16_t*>(problem.q) + token * problem.q_stride +
                                   (item.kv_head * group + row % group) * head_dim + step * 32);
        }
        transpose(from, to + (strip * depth + step) * kSide * kSide, kSide);
      }
  }

  // Computes the scores of a strip's 16 queries, key by key. All four parts go together, because a product does not
  // wait for those of other parts.
  void score_whole(const Place& place, const uint32_t* query, float* by_key) const {
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

  // 2^x with a relative error below 9e-5, a twentieth of bf16's; exactly 1 for 0, and 0 for minus infinity.
  static __m512 power_of_two(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, 1);  // x - floor(x); scalef uses floor(x)
    __m512 y = _mm512_set1_ps(7.7067042495e-2f);
    for (float factor : {2.2764499034e-1f, 6.9511678677e-1f, 1.0f})
      y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(factor));
    return _mm512_scalef_ps(y, x);
  }

  float score_factor() const { return problem.scale * 1.44269504f; }
  // The weight of a score; `row_max` is the maximum, already multiplied by the factor.
  static __m512 weight_of(__m512 score, __m512 factor, __m512 row_max) {
    return power_of_two(_mm512_fmsub_ps(score, factor, row_max));
  }

  // Returns where 32 values of a row from `d` on are written.
  uint16_t* output_address(const Item& item, int row, int d) const {
    const int64_t token = problem.query_start[item.sequence] + item.first_query + row / group;
    const int width = problem.num_heads * head_dim, i = (item.kv_head * group + row % group) * head_dim + d;
    return static_cast<uint16_t*>(problem.out) +
           (problem.out_is_tiled ? linear::place(token, i, width) : token * width + i);
  }

  // Writes one row of an item. Of each 32 values, `totals` has 0-3, 8-11, 16-19 and 24-27 first, then the others.
  void write_row(const Item& item, int row, const float* totals, float total_weight) const {
    const __m512i lower = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i upper = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    const float factor = 1.0f / total_weight;
    for (int d = 0; d < head_dim; d += 32) {
      const __m512 first = _mm512_loadu_ps(totals + d), second = _mm512_loadu_ps(totals + d + 16);
      uint16_t* to = output_address(item, row, d);
      store_floats(to, (Floats)_mm512_permutex2var_ps(first, lower, second) * factor, kLanes);
      store_floats(to + kLanes, (Floats)_mm512_permutex2var_ps(first, upper, second) * factor, kLanes);
    }
  }
};

}  // namespace
#endif
