// The entry points of attention; attention.h and attention_tiles.h do the work. Reference: engine/kernels/reference.py.
#include "attention_tiles.h"

template <> std::vector<Item> list_items_of<BFloat16>(const Problem& problem, int num_threads) {
  const int group = problem.num_heads / problem.num_kv_heads;
  if (!TileAttention::fits(problem)) return list_items(problem, queries_of_item(group));
  std::vector<Item> items;
  for (const int rows : {kMaxTileRows, kMaxTileRows / 2, kMaxTileRows / 6}) {
    items = list_items(problem, TileAttention::queries_of_item(group, rows));
    if (num_threads == 1 || items.size() >= size_t(num_threads) * kItemsPerThread) break;
  }
  return items;
}

template <> void attend_in<BFloat16>(const Problem& problem, const std::vector<Item>& items, int num_threads) {
  if (!TileAttention::fits(problem)) return attend_by_vectors<BFloat16>(problem, items, num_threads);
  const int count = items.size();
  thread_team::parallel_for(num_threads, count, [&](thread_team::Tasks& tasks) {
    TileAttention attention(problem);
    for (int i; tasks.take(i);) attention.run(items[i], i + 1 < count ? &items[i + 1] : nullptr);  // likely next
  });
}

template <> std::vector<Item> list_items_of<Float32>(const Problem& problem, int) {
  return list_items(problem, queries_of_item(problem.num_heads / problem.num_kv_heads));
}

template <> void attend_in<Float32>(const Problem& problem, const std::vector<Item>& items, int num_threads) {
  attend_by_vectors<Float32>(problem, items, num_threads);
}

// Head dim is a multiple of 16 for float32 and of 32 for bf16. `is_bf16` is the dtype of q, out and an unquantized
// pool; `kv_kind` is kFp8Kv or kInt8Kv for a quantized pool, else 0.
extern "C" void penstock_paged_attention(
    void* out, const void* q, const void* pool, const int32_t* page_table, const int32_t* query_start,
    const int32_t* context_lens, int64_t q_stride, int64_t page_stride, int32_t num_sequences, int32_t table_width,
    int32_t num_heads, int32_t num_kv_heads, int32_t page_size, int32_t head_dim, int32_t window, float scale,
    int32_t is_bf16, int32_t kv_kind, int32_t num_threads) {
  const Problem problem{q,           pool,        out,       page_table,   query_start, context_lens, q_stride,
                        page_stride, num_sequences, table_width, num_heads, num_kv_heads, page_size,  head_dim,
                        window,      scale,       false,     kv_kind};
  if (is_bf16)
    attend_in<BFloat16>(problem, list_items_of<BFloat16>(problem, num_threads), num_threads);
  else
    attend_in<Float32>(problem, list_items_of<Float32>(problem, num_threads), num_threads);
}
