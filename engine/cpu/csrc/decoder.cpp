// A dense decoder from token ids to logits in one call: bf16 or float32, packed weights, pages of the same dtype or quantized.
// Reference: the same layers operation by operation (engine/models/decoder.py), with the same roundings.
//
// One thread runs the operations, and others share the tasks of each (thread_team.h). The input of a matrix product is
// written as strips of tiles (packed_weight.h) by the operation before it, so that nothing is copied in between.
//
// Shapes: T tokens, D hidden, N query heads, K KV heads, H head dim, A = N * H, F intermediate, R sampled rows.
#include "adapters.h"
#include "attention_problem.h"
#include "kv_quantization.h"
#include "linear.h"
#include "row_ops.h"

namespace {

using linear::kSide;

// `_Product` of engine/cpu/decoder_stack.py has the same fields.
struct Product {
  linear::PackedWeight weight;
  adapters::Slots adapters;  // read only if the step has any
};

// `_Layer` of engine/cpu/decoder_stack.py has the same fields.
struct Layer {
  const void *input_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
  Product qkv, out, gate_up, down;
  void* pool;      // this layer of the pool's first page
  int64_t window;  // 0: none
};

// `_Step` of engine/cpu/decoder_stack.py has the same fields.
struct Step {
  const int64_t *token_ids, *positions;  // [T]
  const void* embedding;                 // [vocab_size, D]
  const float* cos_sin;                  // [num_positions, 2, H / 2]
  void* residual;                        // [T, D], written
  const int32_t *page_table, *query_start, *context_lens;
  const int64_t *slot_page, *slot_offset;
  const int64_t* adapter_slots;  // [T], 0 for rows without an adapter; or null
  const int64_t* sampled_rows;   // ascending
  const void* final_norm;        // the norm after the model's last layer
  const Product* head;  // or null; it has no adapters
  void* output;  // of the sampled rows: logits, [R, V], or without a head their normalised residual, [R, D]
  int64_t page_stride;          // bytes
  int32_t num_tokens, num_sampled, num_sequences, table_width, page_size;
  int32_t hidden, num_heads, num_kv_heads, head_dim, intermediate;
  int32_t kv_kind;     // as in attention.h
  int32_t is_float32;  // the dtype of embedding, residual, output, norms, biases and unquantized pages; else bf16
  int32_t vocab_size, num_positions;
  float eps, scale;
};

// Results that operations of a step pass on, in memory that all layers share. The memory is kept for the thread's next
// step, because allocating megabytes again costs a page fault for every 4 KB.
template <class Stored> struct Intermediates {
  Stored *normed, *qkv, *mixed, *inner;
  explicit Intermediates(const Step& step) {
    const int64_t rows = linear::padded(step.num_tokens), heads = step.num_heads * step.head_dim;
    const int64_t sizes[] = {rows * step.hidden, rows * (heads + 2 * step.num_kv_heads * step.head_dim), rows * heads,
                             rows * step.intermediate};
    static thread_local Lines<Stored> memory;
    const size_t all = sizes[0] + sizes[1] + sizes[2] + sizes[3];  // each a multiple of a cache line
    if (memory.size() < all) memory.resize(all);
    normed = memory.data();
    qkv = normed + sizes[0];
    mixed = qkv + sizes[1];
    inner = mixed + sizes[2];
  }
};

// What a product calls before rows are multiplied (vector_linear.h), and with their sums.
template <class Finish, class Prefetch> struct PrefetchingFinish {
  const Finish& finish;
  const Prefetch& prefetch;
  void operator()(int row, int output, Floats first, bool is_pair, Floats second) const {
    finish(row, output, first, is_pair, second);
  }
};

// T: one of simd.h's dtypes.
template <class T> class Decoder {
 public:
  typedef typename T::Stored Stored;
  Decoder(const Step& step, int num_threads)
      : step(step), intermediates(step), num_threads(num_threads), residual(static_cast<Stored*>(step.residual)),
        num_rows(step.num_tokens) {
    Problem shape{};
    shape.query_start = step.query_start;
    shape.num_sequences = step.num_sequences;
    shape.num_kv_heads = step.num_kv_heads;
    shape.num_heads = step.num_heads;
    shape.page_size = step.page_size;
    items = list_items_of<T>(shape, num_threads);
    if (step.adapter_slots) adapter_slots.assign(step.adapter_slots, step.adapter_slots + num_rows);
  }

  // Looks up the tokens; returns false if an id or a position is out of bounds.
  bool embed() {
    for (int t = 0; t < num_rows; ++t)
      if (uint64_t(step.token_ids[t]) >= uint64_t(step.vocab_size) ||
          uint64_t(step.positions[t]) >= uint64_t(step.num_positions))
        return false;
    const Stored* const embedding = static_cast<const Stored*>(step.embedding);
    for_rows(kSide, [&](int64_t row) {
      std::memcpy(residual + row * step.hidden, embedding + step.token_ids[row] * step.hidden,
                  step.hidden * sizeof(Stored));
    });
    return true;
  }

  void normalise_first(const Layer& layer) { normalise_rows(layer.input_norm); }

  // Computes a layer. `next_norm` is null for the last layer of the model, after whose attention only sampled rows go
  // on.
  void run(const Layer& layer, const void* next_norm) {
    Stored* const qkv = intermediates.qkv;
    multiply(layer.qkv, intermediates.normed, [&](int row, int output, Floats values) {
      store_floats(qkv + int64_t(row) * layer.qkv.weight.outputs + output, values, kLanes);
    });
    rotate_and_store(layer);
    attend(layer);
    if (!next_norm && !keep_sampled_rows()) return;
    add_to_residual(layer.out, intermediates.mixed);
    normalise_rows(layer.mlp_norm);
    activate(layer.gate_up);
    add_to_residual(layer.down, intermediates.inner);
    if (next_norm) {
      normalise_rows(next_norm);
      return;
    }
    if (step.head) return write_logits(*step.head);
    for_rows(kSide, [&](int64_t row) {
      normalise(static_cast<Stored*>(step.output) + row * step.hidden, residual + row * step.hidden,
                static_cast<const Stored*>(step.final_norm), step.hidden, step.eps);
    });
  }

 private:
  const Step& step;
  const Intermediates<Stored> intermediates;
  const int num_threads;
  std::vector<Item> items;
  Stored* const residual;
  int num_rows;
  std::vector<int64_t> adapter_slots;  // of each row, 0 for none; empty if no row has an adapter
  std::vector<float> shrunk;           // rows times A of their adapters, of the product at hand
  bool is_adapted = false;             // whether an adapter of any row changes the product at hand

  bool find_adapted(const adapters::Slots& all) const {
    const auto is_changed = [&](int64_t slot) { return all.changes(slot); };
    return all.down && std::any_of(adapter_slots.begin(), adapter_slots.end(), is_changed);
  }

  void shrink(const adapters::Slots& all, const Stored* strips) {
    constexpr int kTaskRows = adapters::kRows;
    shrunk.resize(std::max(shrunk.size(), size_t(num_rows) * all.inner_width()));
    const auto values_at = [&](int row, int i) { return strips + linear::place(row, i, all.inputs); };
    thread_team::parallel_for(num_threads, (num_rows + kTaskRows - 1) / kTaskRows, [&](thread_team::Tasks& tasks) {
      for (int task; tasks.take(task);) {
        const int first = task * kTaskRows, end = std::min(num_rows, first + kTaskRows);
        adapters::shrink_rows<T>(all, adapter_slots.data(), first, end, values_at, shrunk.data());
      }
    });
  }

  // Adds the bias and the row's adapter to a product.
  Floats finished(const Product& product, int row, int output, Floats sums) const {
    const void* const bias = product.weight.bias;
    if (bias) sums += load_floats(static_cast<const Stored*>(bias) + output, kLanes);
    if (!is_adapted || !adapter_slots[row]) return sums;
    const float* const inner = shrunk.data() + int64_t(row) * product.adapters.inner_width();
    return adapters::expand<T>(product.adapters, adapter_slots[row], inner, product.adapters.part_of(output), output,
                               rounded<Stored>(sums));
  }

  // Calls take(row) for each row; `per_task` rows should take some microseconds.
  template <class Take> void for_rows(int per_task, const Take& take) const {
    thread_team::parallel_for(num_threads, (num_rows + per_task - 1) / per_task, [&](thread_team::Tasks& tasks) {
      for (int task; tasks.take(task);)
        for (int64_t row = task * per_task; row < std::min(num_rows, (task + 1) * per_task); ++row) take(row);
    });
  }

  // Calls finish(row, output, sums of kLanes outputs from there, is_pair, sums of those `pair_distance` panels further
  // on) for each row of the product.
  template <class Finish>
  void multiply_pairs(const Product& product, const Stored* strips, int pair_distance, const Finish& finish) {
    is_adapted = find_adapted(product.adapters);
    if (is_adapted) shrink(product.adapters, strips);
    const adapters::Slots& all = product.adapters;
    const int num_lines = is_adapted ? adapters::lines_of<T>(all.rank) : 0;
    const auto prefetch = [&](int row, int count, int output, int begin, int end, int shares)
        __attribute__((always_inline)) {
      if (!is_adapted) return;
      const int first_line = num_lines * begin / shares, last_line = num_lines * end / shares;
      for (const int output_of_panel : {output, output + pair_distance * kSide}) {
        if (output_of_panel >= all.outputs) continue;
        const int part = all.part_of(output_of_panel);
        for (int each = row; each < row + count; ++each)
          if (const int64_t slot = adapter_slots[each])
            adapters::prefetch<T>(all, slot, part, output_of_panel, first_line, last_line);
      }
    };
    linear::for_outputs(num_threads, product.weight, strips, num_rows, pair_distance,
                        PrefetchingFinish<Finish, decltype(prefetch)>{finish, prefetch});
  }

  // Calls take(row, output, values) for each row of the product and every `kLanes` outputs, of which `output` is the
  // first.
  template <class Take> void multiply(const Product& product, const Stored* strips, const Take& take) {
    multiply_pairs(product, strips, 1, [&](int row, int output, Floats first, bool is_pair, Floats second) {
      take(row, output, finished(product, row, output, first));
      if (is_pair) take(row, output + kSide, finished(product, row, output + kSide, second));
    });
  }

  void add_to_residual(const Product& product, const Stored* strips) {
    multiply(product, strips, [&](int row, int output, Floats values) {
      Stored* total = residual + int64_t(row) * step.hidden + output;
      store_floats(total, load_floats(total, kLanes) + rounded<Stored>(values), kLanes);
    });
  }

  void write_logits(const Product& head) {
    normalise_rows(step.final_norm);
    Stored* const logits = static_cast<Stored*>(step.output);
    multiply(head, intermediates.normed, [&](int row, int output, Floats values) {
      store_floats(logits + int64_t(row) * head.weight.outputs + output, values, kLanes);
    });
  }

  void activate(const Product& gate_up) {
    Stored* const inner = intermediates.inner;
    const int width = step.intermediate;
    multiply_pairs(gate_up, intermediates.normed, width / kSide,
                   [&](int row, int output, Floats gate, bool, Floats up) {
                     gate = rounded<Stored>(finished(gate_up, row, output, gate));
                     up = rounded<Stored>(finished(gate_up, row, output + width, up));
                     store_floats(inner + linear::place(row, output, width), silu(gate) * up, kLanes);
                   });
  }

  // Writes the normalised rows of the residual as strips of tiles.
  void normalise_rows(const void* norm) const {
    const int width = step.hidden;
    const Stored* const weight = static_cast<const Stored*>(norm);
    Stored* const normed = intermediates.normed;
    for_rows(kSide, [&](int64_t row) {
      const Stored* from = residual + row * width;
      const float factor = root_mean_square_factor(from, width, step.eps);
      for (int i = 0; i < width; i += kLanes)
        store_floats(normed + linear::place(row, i, width),
                     load_floats(from + i, kLanes) * factor * load_floats(weight + i, kLanes), kLanes);
    });
  }

  // Rotates Q and K, and writes K and V to their slots.
  void rotate_and_store(const Layer& layer) const {
    constexpr int kTokens = 4;
    const int head_dim = step.head_dim, num_heads = step.num_heads, num_kv_heads = step.num_kv_heads;
    const auto *q_norm = static_cast<const Stored*>(layer.q_norm), *k_norm = static_cast<const Stored*>(layer.k_norm);
    for_rows(kTokens, [&](int64_t t) {
      Stored* const token = intermediates.qkv + t * layer.qkv.weight.outputs;
      const float* cosine = step.cos_sin + step.positions[t] * head_dim;
      for (int head = 0; head < num_heads + num_kv_heads; ++head) {
        Stored* at = token + head * head_dim;
        if (q_norm) normalise(at, at, head < num_heads ? q_norm : k_norm, head_dim, step.eps);
        rotate(at, at, cosine, head_dim / 2);
      }
      for (int head = 0; head < num_kv_heads; ++head)
        write_kv_head(static_cast<uint8_t*>(layer.pool) + step.slot_page[t] * step.page_stride,
                   token + (num_heads + head) * head_dim, token + (num_heads + num_kv_heads + head) * head_dim,
                   int64_t(head) * step.page_size + step.slot_offset[t]);
    });
  }

  // Writes K and V of a token's head to a row of a page.
  void write_kv_head(uint8_t* page, const Stored* k, const Stored* v, int64_t row) const {
    const int64_t num_rows = int64_t(step.num_kv_heads) * step.page_size, row_bytes = step.head_dim * sizeof(Stored);
    switch (step.kv_kind) {
      case kFp8Kv: return encode_token<Fp8Kv>(page, k, v, row, num_rows, step.head_dim);
      case kInt8Kv: return encode_token<Int8Kv>(page, k, v, row, num_rows, step.head_dim);
      default:
        std::memcpy(page + row * row_bytes, k, row_bytes);
        std::memcpy(page + (num_rows + row) * row_bytes, v, row_bytes);
    }
  }

  void attend(const Layer& layer) const {
    const Problem problem{intermediates.qkv, layer.pool,        intermediates.mixed, step.page_table,
                          step.query_start,  step.context_lens, layer.qkv.weight.outputs, step.page_stride,
                          step.num_sequences, step.table_width, step.num_heads,      step.num_kv_heads,
                          step.page_size,    step.head_dim,     int32_t(layer.window), step.scale, true, step.kv_kind};
    attend_in<T>(problem, items, num_threads);
  }

  // Moves the sampled rows to the front; returns false if there are none.
  bool keep_sampled_rows() {
    num_rows = step.num_sampled;
    const int width = step.num_heads * step.head_dim;
    Stored* const mixed = intermediates.mixed;
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t from = step.sampled_rows[row];
      if (from == row) continue;
      if (!adapter_slots.empty()) adapter_slots[row] = adapter_slots[from];
      std::memcpy(residual + row * step.hidden, residual + from * step.hidden, step.hidden * sizeof(Stored));
      for (int i = 0; i < width; i += kLanes)
        std::memcpy(mixed + linear::place(row, i, width), mixed + linear::place(from, i, width), kLanes * sizeof(Stored));
    }
    return num_rows > 0;
  }
};

template <class T>
bool run_layers(const Layer* layers, int first, int last, const Step& step, bool is_model_end, int num_threads) {
  Decoder<T> decoder(step, num_threads);
  if (first == 0 && !decoder.embed()) return false;
  decoder.normalise_first(layers[first]);
  for (int layer = first; layer < last; ++layer) {
    const void* const last_norm = is_model_end ? nullptr : layers[layer].input_norm;
    decoder.run(layers[layer], layer + 1 < last ? layers[layer + 1].input_norm : last_norm);
  }
  return true;
}

}  // namespace

// Computes layers [first, last) of `layers`; the first one begins with the embedding. With `is_model_end` the last of
// them is the model's last: only sampled rows go through its feed-forward, and `output` is written. Returns 0 if a token
// or a position is out of bounds; nothing is computed then.
extern "C" int32_t penstock_decoder(const Layer* layers, int32_t first, int32_t last, const Step* step,
                                    int32_t is_model_end, int32_t num_threads) {
  const auto run = step->is_float32 ? run_layers<Float32> : run_layers<BFloat16>;
  return run(layers, first, last, *step, is_model_end, num_threads);
}
