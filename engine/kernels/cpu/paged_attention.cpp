// Attention by itself; the work is done in attention.h. The twin is in engine/kernels/reference.py, in plain torch.
#include "attention_tiles.h"

namespace {

template <class T, class Codes> void attend_over(const Problem& problem, int num_threads) {
  const int group = problem.num_heads / problem.num_kv_heads, rows = rows_of_item(group);
  const std::vector<Item> items = list_items(problem, queries_of_item(group));
  crew::share(num_threads, items.size(), [&](crew::Pieces& pieces) {
    Scratch scratch(rows, problem.head_dim / T::kPerWord, problem.head_dim);
    Attention<T, Codes> attention(problem, scratch);
    for (int i; pieces.take(i);) attention.run(items[i]);
  });
}

void attend_over_bf16(const Problem& problem, int num_threads) {
  attend_in_bf16(problem, list_items_of_bf16(problem, num_threads), num_threads);
}

template <class T> void attend(const Problem& problem, int codes, int num_threads) {
  switch (codes) {
    case 0: return attend_over<T, Plain>(problem, num_threads);
    case 1: return attend_over<T, Fp8Codes>(problem, num_threads);
    default: return attend_over<T, Int8Codes>(problem, num_threads);
  }
}

}  // namespace

// Head dim is a multiple of 16 for float32 and of 32 for bf16. `is_bf16`: what q, out, and the pool hold; `codes`: 0, or
// the pool holds codes, 1: fp8, 2: int8.
extern "C" void penstock_paged_attention(
    void* out, const void* q, const void* pool, const int32_t* page_table, const int32_t* query_start,
    const int32_t* context_lens, int64_t q_stride, int64_t page_stride, int32_t num_sequences, int32_t table_width,
    int32_t num_heads, int32_t num_kv_heads, int32_t page_size, int32_t head_dim, int32_t window, float scale,
    int32_t is_bf16, int32_t codes, int32_t num_threads) {
  const Problem problem{q,           pool,        out,       page_table,   query_start, context_lens, q_stride,
                        page_stride, num_sequences, table_width, num_heads, num_kv_heads, page_size,  head_dim,
                        window,      scale,       false};
  if (is_bf16 && codes == 0)
    attend_over_bf16(problem, num_threads);
  else if (is_bf16)
    attend<BFloat16>(problem, codes, num_threads);
  else
    attend<Float32>(problem, codes, num_threads);
}
