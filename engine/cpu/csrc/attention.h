// Attention over the paged pool on a CPU, for decodes and prompt chunks, reading pages in place.
//
// An item of work is a block of a sequence's queries under one KV head; its rows are (query, head of the group). Keys
// are read 64 at a time: K is transposed, so that a vector's lanes are keys and a score needs no sum across lanes, and
// V is interleaved into words: in memory for many rows, in registers for few, with the same bits. Softmax is computed
// online (Milakov and Gimelshein 2018, arXiv:1805.02867). An item's result depends only on the item, not on the rest of
// the batch, its order, or the number of threads.
//
// Pool layer: [P, 2, K, S, H], pages `page_stride` bytes apart, each page's layer contiguous. A quantized pool holds
// codes, with their scales right behind the layer (kv_quantization.h); a key's scale multiplies its scores, a value's
// scale its weights.
#pragma once

#include "attention_problem.h"
#include "kv_quantization.h"
#include "linear.h"
#include "amx_tiles.h"
#include "simd.h"

#include <type_traits>
#include <vector>

namespace {

constexpr int kBlock = 64;      // keys
constexpr int kFewRows = 8;     // items of as many rows, as decodes have, read K and V in place
constexpr int kRowTarget = 64;  // rows of an item: its accumulators stay in L1 beside one block of K and V
constexpr float kMasked = -2e30f, kInitialMax = -1e30f;

// The queries of an item, and its rows (one per query and head of the group), rounded up to a multiple of a tile's
// side.
inline int queries_of_item(int group) { return std::max(1, kRowTarget / group); }
inline int rows_of_item(int group) {
  return (queries_of_item(group) * group + tiles::kSide - 1) / tiles::kSide * tiles::kSide;
}

// The memory that an item needs while it is computed. A thread keeps it, because allocating takes longer than a small
// item.
struct Scratch {
  Lines<uint32_t> queries, keys, values, weights, decoded;  // decoded: keys of a quantized pool, row by row
  Lines<float> scores, totals, row_max, sums;  // sums: per lane, added up at the end

  // `rows` is a multiple of a tile's side: rows past the item's own are computed too, and never read.
  void fit(int rows, int words, int head_dim) {
    grow(queries, rows * words), grow(keys, words * kBlock), grow(values, kBlock * head_dim);
    grow(weights, rows * kBlock), grow(decoded, kLanes * words), grow(scores, rows * kBlock);
    grow(totals, rows * head_dim), grow(row_max, rows), grow(sums, rows * kLanes);
  }

 private:
  template <class T> static void grow(Lines<T>& lines, size_t size) {
    if (lines.size() < size) lines.resize(size);
  }
};

// T: the dtype of queries and output. Format: the format of the pool, `UnquantizedKv` for T's own dtype.
template <class T, class Format> struct Attention {
  typedef typename T::Stored Stored;
  static constexpr int kStep = T::kPerWord;  // keys that share a word of V
  static constexpr int kColumns = kLanes == 8 ? 2 : 4;  // adjacent vectors of sums: AVX2 has 16 registers

  const Problem& problem;
  Scratch& scratch;
  int words, head_dim, group;
  bool uses_tiles;
  const char* places[2][kBlock];         // addresses of the keys of this block and of the next one
  const float* scale_places[2][kBlock];  // addresses of those keys' scales
  float key_scales[kBlock], value_scales[kBlock];  // of this block, times the factor that `decode` leaves out
  int which = 0;                // the entry of `places` for this block
  const Item* found = nullptr;  // the item whose first block is in that entry already
  const int64_t num_rows, to_value;  // rows of a page's layer, and bytes from a key to its value
  int tile_rows = 0;  // rows that this thread's tiles are configured for; 0: not configured

  Attention(const Problem& p, Scratch& s)
      : problem(p), scratch(s), words(p.head_dim / T::kPerWord), head_dim(p.head_dim),
        group(p.num_heads / p.num_kv_heads), uses_tiles(kStep == 2 && tiles::available()),
        num_rows(int64_t(p.num_kv_heads) * p.page_size), to_value(num_rows * row_bytes(p.head_dim)) {}
  ~Attention() {
    if (tile_rows) tiles::release();
  }

  // Computes an item. `next` is the item that likely follows, or null.
  void run(const Item& item, const Item* next) {
    const int start = problem.query_start[item.sequence], rows = item.num_queries * group;
    const int first_position = position_of(item), stop = first_position + item.num_queries;
    if (uses_tiles && std::min(rows, tiles::kSide) != tile_rows) {
      tile_rows = std::min(rows, tiles::kSide);
      tiles::configure(tile_rows);
    }
    read_queries(item, start);
    std::fill_n(scratch.totals.begin(), rows * head_dim, 0.0f);
    std::fill_n(scratch.row_max.begin(), rows, kInitialMax);
    std::fill_n(scratch.sums.begin(), rows * kLanes, 0.0f);
    int key = first_key(item);
    if (found != &item) find_rows(item, key, places[which], scale_places[which]);
    const bool is_few = kStep == 2 && rows <= kFewRows && !uses_tiles;
    for (; key < stop; key += kBlock) {
      find_next(item, key, stop, next);
      if constexpr (Format::kQuantized) read_scales();
      if (is_few) {
        score_few(rows);
      } else {
        prefetch_next();
        read_block();
        score_all(rows);
      }
      for (int row = 0; row < rows; ++row) update_softmax(row, key, first_position + row / group);
      if (is_few) accumulate_few(rows);
      else accumulate_all(rows);
      which ^= 1;
    }
    write_out(item, start, rows, is_few && !Format::kQuantized);
  }

 private:
  void read_queries(const Item& item, int start) {
    uint32_t* to = scratch.queries.data();
    for (int query = item.first_query; query < item.first_query + item.num_queries; ++query) {
      const Stored* token = static_cast<const Stored*>(problem.q) + (start + query) * problem.q_stride;
      std::memcpy(to, token + item.kv_head * group * head_dim, size_t(group) * words * 4);
      to += group * words;
    }
  }

  static constexpr int row_bytes(int head_dim) { return head_dim * (Format::kQuantized ? 1 : int(sizeof(Stored))); }

  int position_of(const Item& item) const {
    const int num_tokens = problem.query_start[item.sequence + 1] - problem.query_start[item.sequence];
    return problem.context_lens[item.sequence] - num_tokens + item.first_query;
  }
  int first_key(const Item& item) const {
    const int key = problem.window ? std::max(0, position_of(item) - problem.window + 1) : 0;
    return key - key % kBlock;  // blocks start at the same keys however a prompt is split into chunks
  }

  // Finds the addresses of keys [first, first + 64), of which the item's last query sees those before it and itself.
  // Entries behind these repeat the last one and are masked later.
  void find_rows(const Item& item, int first, const char** rows, const float** scales) const {
    const int32_t* pages = problem.page_table + int64_t(item.sequence) * problem.table_width;
    const int stop = position_of(item) + item.num_queries, count = std::min(kBlock, stop - first);
    const int page_size = problem.page_size, bytes = row_bytes(head_dim);
    const int64_t to_head = int64_t(item.kv_head) * page_size, to_scales = 2 * num_rows * bytes;
    int index = first / page_size, place = first % page_size;
    for (int i = 0; i < count; ++index, place = 0) {
      const char* page = static_cast<const char*>(problem.pool) + pages[index] * problem.page_stride;
      const char* row = page + (to_head + place) * bytes;
      const int end = std::min(count, i + page_size - place);
      if constexpr (Format::kQuantized) {
        const float* scale = reinterpret_cast<const float*>(page + to_scales) + to_head + place;
        for (int k = i; k < end; ++k) scales[k] = scale + (k - i);
      }
      for (; i < end; ++i, row += bytes) rows[i] = row;
    }
    for (int i = count; i < kBlock; ++i) rows[i] = rows[count - 1], scales[i] = scales[count - 1];
  }

  // Finds the block after `key`, of this item or of the next one: it is prefetched while this block is computed, because
  // pages lie anywhere in memory, and the hardware cannot predict their addresses.
  void find_next(const Item& item, int key, int stop, const Item* next) {
    const char** const rows = places[which ^ 1];
    const float** const scales = scale_places[which ^ 1];
    found = nullptr;
    if (key + kBlock < stop) return find_rows(item, key + kBlock, rows, scales);
    if (next) {
      find_rows(*next, first_key(*next), rows, scales);
      found = next;
    } else {
      std::copy_n(places[which], kBlock, rows);
      std::copy_n(scale_places[which], kBlock, scales);
    }
  }

  void prefetch_next() const {
    const int bytes = row_bytes(head_dim);
    for (const char* row : places[which ^ 1])
      for (int byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(row + byte);
        __builtin_prefetch(row + to_value + byte);
      }
  }

  // Reads the scales of this block and prefetches the next one's.
  void read_scales() {
    for (int i = 0; i < kBlock; ++i) {
      key_scales[i] = scale_places[which][i][0] * Format::kDecodeScale;
      value_scales[i] = scale_places[which][i][num_rows] * Format::kDecodeScale;
      __builtin_prefetch(scale_places[which ^ 1][i]);
      __builtin_prefetch(scale_places[which ^ 1][i] + num_rows);
    }
  }

  // Transposes K of the block and interleaves V.
  void read_block() {
    const char* const* const rows = places[which];
    for (int i = 0; i < kBlock; i += kLanes) {
      const char* keys[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) keys[lane] = decoded(rows[i + lane], lane);
      for (int word = 0; word < words; word += kLanes) {
        Words tile[kLanes];
        for (int lane = 0; lane < kLanes; ++lane)
          tile[lane] = load<Words>(keys[lane] + word * 4);
        transpose(tile, scratch.keys.data() + word * kBlock + i, kBlock);
      }
    }
    for (int i = 0; i < kBlock; i += kStep) interleave(rows[i] + to_value, rows[i + kStep - 1] + to_value, i / kStep);
  }

  // Calls `call` with the number of rows as a constant.
  template <class Call> static void with_rows(int rows, const Call& call) {
    switch (rows) {
      case 1: return call(std::integral_constant<int, 1>());
      case 2: return call(std::integral_constant<int, 2>());
      case 3: return call(std::integral_constant<int, 3>());
      default: return call(std::integral_constant<int, 4>());
    }
  }

  // Scores few rows, four at a time, against keys that are transposed in registers.
  void score_few(int rows) {
    for (int i = 0; i < kBlock; i += kLanes) {
      const char* keys[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) keys[lane] = decoded(places[which][i + lane], lane);
      const char* const* const next = places[which ^ 1] + i;
      for (int row = 0; row < rows; row += 4)
        with_rows(rows - row, [&](auto count) { score_keys<decltype(count)::value>(keys, next, row, i); });
    }
  }

  template <int R> void score_keys(const char* const* keys, const char* const* next, int row, int i) {
    Floats total[R] = {};
    const uint32_t* queries = scratch.queries.data() + row * words;
    for (int word = 0; word < words; word += kLanes) {
      Words tile[kLanes], columns[kLanes];
      const int byte = word * T::kPerWord * row_bytes(1);
      for (int lane = 0; row == 0 && byte % 64 == 0 && lane < kLanes; ++lane)
        __builtin_prefetch(next[lane] + byte, 0, 2);
      for (int lane = 0; lane < kLanes; ++lane) tile[lane] = load<Words>(keys[lane] + word * 4);
      transpose(tile, columns);
      for (int lane = 0; lane < kLanes; ++lane)
        for (int r = 0; r < R; ++r)
          total[r] = multiply_add<T>(total[r], Words{} + queries[r * words + word + lane], columns[lane]);
    }
    for (int r = 0; r < R; ++r) store(scratch.scores.data() + (row + r) * kBlock + i, total[r]);
  }

  void accumulate_few(int rows) {
    for (int row = 0; row < rows; row += 4)
      for (int d = 0; d < head_dim; d += 2 * kLanes)
        with_rows(rows - row, [&](auto count) { accumulate_values<decltype(count)::value>(row, d); });
  }

  // Adds the weighted values from `d` on of all pairs of keys. In the totals of an unquantized pool the values of even
  // dimensions are before those of odd ones.
  template <int R> void accumulate_values(int row, int d) {
    const char *const *const values = places[which], *const *const next = places[which ^ 1];
    const bool prefetches = row == 0 && row_bytes(d) % 64 == 0;
    const uint32_t* weights = scratch.weights.data() + row * kBlock;
    float* totals = scratch.totals.data() + row * head_dim + d;
    Floats total[R][2];
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2; ++c) total[r][c] = load<Floats>(totals + r * head_dim + c * kLanes);
    for (int pair = 0; pair < kBlock / 2; ++pair) {
      const char *first = values[2 * pair] + to_value, *second = values[2 * pair + 1] + to_value;
      if (prefetches) {
        __builtin_prefetch(next[2 * pair] + to_value + row_bytes(d), 0, 2);
        __builtin_prefetch(next[2 * pair + 1] + to_value + row_bytes(d), 0, 2);
      }
      Words value[2];
      if constexpr (Format::kQuantized) {
        for (int c = 0; c < 2; ++c)
          value[c] = (Words)decode(first, d + c * kLanes) >> 16 | ((Words)decode(second, d + c * kLanes) & 0xffff0000u);
      } else {
        const Words a = load<Words>(first + d * 2), b = load<Words>(second + d * 2);
        value[0] = (a & 0xffffu) | b << 16;
        value[1] = a >> 16 | (b & 0xffff0000u);
      }
      for (int r = 0; r < R; ++r) {
        const Words weight = Words{} + weights[r * kBlock + pair];
        for (int c = 0; c < 2; ++c) total[r][c] = multiply_add<T>(total[r][c], weight, value[c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < 2; ++c) store(totals + r * head_dim + c * kLanes, total[r][c]);
  }

  // Returns a row of the pool in T's dtype; a quantized row is decoded into the scratch row `lane`.
  const char* decoded(const char* row, int lane) {
    if constexpr (!Format::kQuantized) return row;
    char* to = reinterpret_cast<char*>(scratch.decoded.data() + lane * words);
    for (int d = 0; d < head_dim; d += kLanes)
      store_floats(reinterpret_cast<Stored*>(to) + d, decode(row, d), kLanes);
    return to;
  }

  static Floats decode(const char* row, int d) {
    if constexpr (Format::kQuantized) return Format::decode(reinterpret_cast<const uint8_t*>(row) + d);
    return Floats{};
  }

  void interleave(const char* first, const char* second, int place) {
    uint32_t* to = scratch.values.data() + place * head_dim;
    if (kStep == 1) {
      std::memcpy(to, decoded(first, 0), head_dim * 4);
      return;
    }
    for (int d = 0; d < head_dim; d += kLanes) {
      Words low, high;
      if constexpr (Format::kQuantized) {  // exact in bf16: the upper halves of the floats
        low = (Words)decode(first, d) >> 16;
        high = (Words)decode(second, d) & 0xffff0000u;
      } else {
        low = __builtin_convertvector(load<Shorts>(first + d * 2), Words);
        high = __builtin_convertvector(load<Shorts>(second + d * 2), Words) << 16;
      }
      store(to + d, low | high);
    }
  }

  void score_all(int rows) {
    if (uses_tiles) {
      for (int row = 0; row < rows; row += tiles::kSide)
        tiles::multiply_four<false>(scratch.scores.data() + row * kBlock, kBlock, scratch.queries.data() + row * words,
                                    words, scratch.keys.data(), kBlock, words / tiles::kSide);
      return;
    }
    for (int row = 0; row < rows;) row += score_rows(row, rows);
  }

  // Scores up to four rows at a time, which load each vector of K once.
  int score_rows(int row, int rows) {
    switch (std::min(rows - row, 4)) {
      case 1: score<1>(row); return 1;
      case 2: score<2>(row); return 2;
      case 3: score<3>(row); return 3;
      default: score<4>(row); return 4;
    }
  }

  template <int R> void score(int row) {
    for (int key = 0; key < kBlock; key += kColumns * kLanes) {
      Floats total[R][kColumns] = {};
      const uint32_t* keys = scratch.keys.data() + key;
      const uint32_t* queries = scratch.queries.data() + row * words;
      for (int word = 0; word < words; ++word, keys += kBlock) {
        Words these[kColumns];
        for (int v = 0; v < kColumns; ++v) these[v] = load<Words>(keys + v * kLanes);
        for (int r = 0; r < R; ++r) {
          const Words query = Words{} + queries[r * words + word];
          for (int v = 0; v < kColumns; ++v) total[r][v] = multiply_add<T>(total[r][v], query, these[v]);
        }
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < kColumns; ++v)
          store(scratch.scores.data() + (row + r) * kBlock + key + v * kLanes, total[r][v]);
    }
  }

  // Turns the scores of one row into weights relative to the maximum so far, and rescales what was accumulated before.
  void update_softmax(int row, int first_key, int position) {
    constexpr int kVectors = kBlock / kLanes;
    const int lowest = problem.window ? position - problem.window + 1 : 0;
    const bool is_whole = first_key >= lowest && first_key + kBlock <= position + 1;
    const Ints lane = lane_numbers();
    Floats score[kVectors], best = splat(kMasked);
    for (int v = 0; v < kVectors; ++v) {
      score[v] = load<Floats>(scratch.scores.data() + row * kBlock + v * kLanes) * (problem.scale * 1.44269504f);
      if constexpr (Format::kQuantized) score[v] *= load<Floats>(key_scales + v * kLanes);
      if (!is_whole) {
        Ints key = lane + (first_key + v * kLanes);
        score[v] = ((key >= lowest) & (key <= position)) ? score[v] : splat(kMasked);
      }
      best = maximum(best, score[v]);
    }
    const float before = scratch.row_max[row], now = std::max(before, largest(best));
    Floats total{};
    for (int v = 0; v < kVectors; ++v) {
      Floats weight = exp2(score[v] - now);
      total += weight;
      if constexpr (Format::kQuantized) weight *= load<Floats>(value_scales + v * kLanes);
      store_floats(reinterpret_cast<Stored*>(scratch.weights.data() + row * kBlock) + v * kLanes, weight, kLanes);
    }
    const float rescale = before == now ? 1.0f : exp2(splat(before - now))[0];
    scratch.row_max[row] = now;
    float* sums = scratch.sums.data() + row * kLanes;
    store(sums, load<Floats>(sums) * rescale + total);
    if (rescale != 1.0f) {
      float* totals = scratch.totals.data() + row * head_dim;
      for (int d = 0; d < head_dim; d += kLanes) store(totals + d, load<Floats>(totals + d) * rescale);
    }
  }

  void accumulate_all(int rows) {
    if (!uses_tiles) {
      for (int row = 0; row < rows;) row += accumulate_rows(row, rows);
      return;
    }
    constexpr int kDepth = kBlock / kStep / tiles::kSide;
    for (int row = 0; row < rows; row += tiles::kSide) {
      float* totals = scratch.totals.data() + row * head_dim;
      const uint32_t *weights = scratch.weights.data() + row * kBlock, *values = scratch.values.data();
      int d = 0;
      for (; d + 4 * tiles::kSide <= head_dim; d += 4 * tiles::kSide)
        tiles::multiply_four<true>(totals + d, head_dim, weights, kBlock, values + d, head_dim, kDepth);
      for (; d < head_dim; d += tiles::kSide)
        tiles::multiply_one(totals + d, head_dim, weights, kBlock, values + d, head_dim, kDepth);
    }
  }

  int accumulate_rows(int row, int rows) {
    switch (std::min(rows - row, 4)) {
      case 1: accumulate<1>(row); return 1;
      case 2: accumulate<2>(row); return 2;
      case 3: accumulate<3>(row); return 3;
      default: accumulate<4>(row); return 4;
    }
  }

  template <int R> void accumulate(int row) {
    int d = 0;
    for (; d + kColumns * kLanes <= head_dim; d += kColumns * kLanes) accumulate_columns<R, kColumns>(row, d);
    for (; d < head_dim; d += kLanes) accumulate_columns<R, 1>(row, d);
  }

  template <int R, int C> void accumulate_columns(int row, int d) {
    Floats total[R][C];
    float* totals = scratch.totals.data() + row * head_dim + d;
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) total[r][c] = load<Floats>(totals + r * head_dim + c * kLanes);
    const uint32_t* values = scratch.values.data() + d;
    const uint32_t* weights = scratch.weights.data() + row * kBlock;
    for (int place = 0; place < kBlock / kStep; ++place, values += head_dim) {
      Words value[C];
      for (int c = 0; c < C; ++c) value[c] = load<Words>(values + c * kLanes);
      for (int r = 0; r < R; ++r) {
        Words weight = Words{} + weights[r * kBlock + place];
        for (int c = 0; c < C; ++c) total[r][c] = multiply_add<T>(total[r][c], weight, value[c]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int c = 0; c < C; ++c) store(totals + r * head_dim + c * kLanes, total[r][c]);
  }

  // `is_split`: of each two vectors of totals, one has the even dimensions and one the odd ones.
  void write_out(const Item& item, int start, int rows, bool is_split) {
    for (int row = 0; row < rows; ++row) {
      const int64_t token = start + item.first_query + row / group;
      const int head = item.kv_head * group + row % group, width = problem.num_heads * head_dim;
      Stored* to = static_cast<Stored*>(problem.out);
      const float factor = 1.0f / sum(load<Floats>(scratch.sums.data() + row * kLanes));
      const float* totals = scratch.totals.data() + row * head_dim;
      const auto at = [&](int d) {
        const int i = head * head_dim + d;
        return to + (problem.out_is_tiled ? linear::place(token, i, width) : token * width + i);
      };
      if (!is_split) {
        for (int d = 0; d < head_dim; d += kLanes) store_floats(at(d), load<Floats>(totals + d) * factor, kLanes);
        continue;
      }
      for (int d = 0; d < head_dim; d += 2 * kLanes) {
        const Words even = __builtin_convertvector(narrow(load<Floats>(totals + d) * factor), Words);
        const Words odd = __builtin_convertvector(narrow(load<Floats>(totals + d + kLanes) * factor), Words);
        store(at(d), even | odd << 16);
      }
    }
  }
};

std::vector<Item> list_items(const Problem& problem, int queries_per_item) {
  std::vector<Item> items;
  for (int b = 0; b < problem.num_sequences; ++b) {
    const int num_queries = problem.query_start[b + 1] - problem.query_start[b];
    // The last queries see the most keys: they go first, so that no thread begins a long item at the end.
    for (int first = (num_queries - 1) / queries_per_item * queries_per_item; first >= 0; first -= queries_per_item)
      for (int k = 0; k < problem.num_kv_heads; ++k)
        items.push_back({b, k, first, std::min(queries_per_item, num_queries - first)});
  }
  return items;
}

template <class T, class Format>
inline void attend_over(const Problem& problem, const std::vector<Item>& items, int num_threads) {
  thread_team::parallel_for(num_threads, items.size(), [&](thread_team::Tasks& tasks) {
    const int rows = rows_of_item(problem.num_heads / problem.num_kv_heads);
    static thread_local Scratch scratch;
    scratch.fit(rows, problem.head_dim / T::kPerWord, problem.head_dim);
    Attention<T, Format> attention(problem, scratch);
    const int count = items.size();
    for (int i; tasks.take(i);) attention.run(items[i], i + 1 < count ? &items[i + 1] : nullptr);  // likely next
  });
}

// Attends without attention_tiles.h, for dtypes without tiles and pages of other sizes.
template <class T>
inline void attend_by_vectors(const Problem& problem, const std::vector<Item>& items, int num_threads) {
  switch (problem.kv_kind) {
    case kFp8Kv: return attend_over<T, Fp8Kv>(problem, items, num_threads);
    case kInt8Kv: return attend_over<T, Int8Kv>(problem, items, num_threads);
    default: return attend_over<T, UnquantizedKv>(problem, items, num_threads);
  }
}

}  // namespace
