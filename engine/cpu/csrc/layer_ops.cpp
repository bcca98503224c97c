// The operations between a decoder's matrix products, each in one pass over its rows. Reference:
// engine/kernels/layer_ops.py.
#include "kv_quantization.h"
#include "thread_team.h"
#include "row_ops.h"

namespace {

constexpr int64_t kValuesPerTask = 1 << 14;  // below, waking a thread costs more than it saves

// Calls take(token) for each of `tokens` tokens of `values` values.
template <class Take> void for_tokens(int num_threads, int64_t tokens, int64_t values, const Take& take) {
  constexpr int64_t kMaxTasks = thread_team::kMaxTasks;
  const int64_t per_task = std::max(kValuesPerTask / values, (tokens + kMaxTasks - 1) / kMaxTasks) + 1;
  thread_team::parallel_for(num_threads, (tokens + per_task - 1) / per_task, [&](thread_team::Tasks& tasks) {
    for (int task; tasks.take(task);)
      for (int64_t t = task * per_task; t < std::min(tokens, (task + 1) * per_task); ++t) take(t);
  });
}

// Rows are `heads` runs of `width` values, tokens `stride` values apart; `to` is contiguous.
template <class S>
void rms_norm(S* to, const S* x, const S* weight, int64_t tokens, int heads, int width, int64_t stride, float eps,
              int n) {
  for_tokens(n, tokens, int64_t(heads) * width, [=](int64_t t) {
    for (int head = 0; head < heads; ++head)
      normalise(to + (t * heads + head) * width, x + t * stride + head * width, weight, width, eps);
  });
}

// `residual` becomes the sum, `x` its norm.
template <class S> void add_rms_norm(S* x, S* residual, const S* weight, int64_t tokens, int width, float eps, int n) {
  for_tokens(n, tokens, width, [=](int64_t t) {
    S *row = x + t * width, *total = residual + t * width;
    for (int i = 0; i < width; i += kLanes)
      store_floats(total + i, load_floats(total + i, width - i) + load_floats(row + i, width - i), width - i);
    normalise(row, total, weight, width, eps);
  });
}

template <class S> void silu_and_mul(S* to, const S* gate_up, int64_t tokens, int width, int n) {
  for_tokens(n, tokens, width, [=](int64_t t) {
    const S *gate = gate_up + t * 2 * width, *up = gate + width;
    for (int i = 0; i < width; i += kLanes) {
      Floats g = load_floats(gate + i, width - i), u = load_floats(up + i, width - i);
      store_floats(to + t * width + i, silu(g) * u, width - i);
    }
  });
}

// cos_sin: float [tokens, 2, width / 2]; the halves of a head are paired.
template <class S>
void rope(S* to, const S* x, const float* cos_sin, int64_t tokens, int heads, int width, int64_t stride, int n) {
  const int half = width / 2;
  for_tokens(n, tokens, int64_t(heads) * width, [=](int64_t t) {
    const float* cosine = cos_sin + t * width;
    for (int head = 0; head < heads; ++head) {
      rotate(to + (t * heads + head) * width, x + t * stride + head * width, cosine, half);
    }
  });
}

}  // namespace

// Copies raw values of any dtype of `value_bytes` bytes.
extern "C" void penstock_write_kv(
    char* pool, const char* k, const char* v, const int64_t* slot_page, const int64_t* slot_offset, int64_t tokens,
    int64_t k_stride, int64_t v_stride, int64_t page_stride, int32_t num_kv_heads, int32_t page_size, int32_t head_dim,
    int32_t value_bytes) {
  const int64_t row = int64_t(head_dim) * value_bytes, to_value = num_kv_heads * page_size * row;
  for (int64_t t = 0; t < tokens; ++t)
    for (int head = 0; head < num_kv_heads; ++head) {
      char* to = pool + slot_page[t] * page_stride * value_bytes + (head * page_size + slot_offset[t]) * row;
      std::memcpy(to, k + t * k_stride * value_bytes + head * row, row);
      std::memcpy(to + to_value, v + t * v_stride * value_bytes + head * row, row);
    }
}

// Writes a quantized pool: codes, and their scales behind the layer's codes. `page_stride` is in bytes, the strides of
// k and v in values.
template <class C, class S>
static void write_kv_quantized(
    uint8_t* pool, const S* k, const S* v, const int64_t* slot_page, const int64_t* slot_offset, int64_t tokens,
    int64_t k_stride, int64_t v_stride, int64_t page_stride, int num_kv_heads, int page_size, int head_dim, int n) {
  const int64_t num_rows = int64_t(num_kv_heads) * page_size;
  for_tokens(n, tokens, int64_t(num_kv_heads) * head_dim, [=](int64_t t) {
    for (int head = 0; head < num_kv_heads; ++head) {
      const int64_t row = int64_t(head) * page_size + slot_offset[t];
      encode_token<C>(pool + slot_page[t] * page_stride, k + t * k_stride + head * head_dim,
                      v + t * v_stride + head * head_dim, row, num_rows, head_dim);
    }
  });
}

#define PENSTOCK_FOR_DTYPE(call)     \
  if (is_bf16) {                     \
    typedef uint16_t S;              \
    call;                            \
  } else {                           \
    typedef float S;                 \
    call;                            \
  }

extern "C" void penstock_write_kv_quantized(
    uint8_t* pool, const void* k, const void* v, const int64_t* slot_page, const int64_t* slot_offset, int64_t tokens,
    int64_t k_stride, int64_t v_stride, int64_t page_stride, int32_t num_kv_heads, int32_t page_size, int32_t head_dim,
    int32_t is_bf16, int32_t kv_kind, int32_t n) {
  if (kv_kind == kFp8Kv) {
    PENSTOCK_FOR_DTYPE(write_kv_quantized<Fp8Kv>(
        pool, (const S*)k, (const S*)v, slot_page, slot_offset, tokens, k_stride, v_stride, page_stride, num_kv_heads,
        page_size, head_dim, n))
  } else {
    PENSTOCK_FOR_DTYPE(write_kv_quantized<Int8Kv>(
        pool, (const S*)k, (const S*)v, slot_page, slot_offset, tokens, k_stride, v_stride, page_stride, num_kv_heads,
        page_size, head_dim, n))
  }
}

extern "C" void penstock_rms_norm(
    void* to, const void* x, const void* weight, int64_t tokens, int32_t heads, int32_t width, int64_t stride,
    float eps, int32_t is_bf16, int32_t num_threads) {
  PENSTOCK_FOR_DTYPE(rms_norm((S*)to, (const S*)x, (const S*)weight, tokens, heads, width, stride, eps, num_threads))
}

extern "C" void penstock_add_rms_norm(
    void* x, void* residual, const void* weight, int64_t tokens, int32_t width, float eps, int32_t is_bf16,
    int32_t num_threads) {
  PENSTOCK_FOR_DTYPE(add_rms_norm((S*)x, (S*)residual, (const S*)weight, tokens, width, eps, num_threads))
}

extern "C" void penstock_silu_and_mul(
    void* to, const void* gate_up, int64_t tokens, int32_t width, int32_t is_bf16, int32_t num_threads) {
  PENSTOCK_FOR_DTYPE(silu_and_mul((S*)to, (const S*)gate_up, tokens, width, num_threads))
}

extern "C" void penstock_rope(
    void* to, const void* x, const float* cos_sin, int64_t tokens, int32_t heads, int32_t width, int64_t stride,
    int32_t is_bf16, int32_t num_threads) {
  PENSTOCK_FOR_DTYPE(rope((S*)to, (const S*)x, cos_sin, tokens, heads, width, stride, num_threads))
}
