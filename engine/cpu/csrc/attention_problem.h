// The arguments of attention, shared by its callers (decoder.cpp, paged_attention.cpp) and by the kernels, which are
// compiled once, in paged_attention.cpp.
#pragma once

#include <cstdint>
#include <vector>

struct Problem {
  const void* q;       // [T, N, H], tokens `q_stride` values apart
  const void* pool;
  void* out;           // [T, N, H], contiguous or as strips of tiles (packed_weight.h)
  const int32_t* page_table;  // [B, table_width]
  const int32_t* query_start;  // [B + 1]
  const int32_t* context_lens;  // [B]
  int64_t q_stride;     // values
  int64_t page_stride;  // bytes
  int32_t num_sequences, table_width, num_heads, num_kv_heads, page_size, head_dim;
  int32_t window;  // 0: none
  float scale;
  bool out_is_tiled;
  int32_t kv_kind;  // kFp8Kv or kInt8Kv for a quantized pool, else 0
};

// Queries of a sequence under one KV head.
struct Item {
  int sequence, kv_head, first_query, num_queries;
};

// Splits `problem` into items for rows of T, one of simd.h's dtypes.
template <class T> std::vector<Item> list_items_of(const Problem& problem, int num_threads);

// Attends with queries and output of T.
template <class T> void attend_in(const Problem& problem, const std::vector<Item>& items, int num_threads);
