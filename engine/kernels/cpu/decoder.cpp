// All layers of a dense decoder in one call: bf16, packed weights, AMX tiles, pages of bf16 or of codes. Twin: the same layers operation by
// operation (engine/models/decoder.py), whose roundings are kept.
//
// One thread goes through the operations, and others share the pieces of each (crew.h). What an operation leaves for a
// matrix product is written as strips of tiles (linear.h), so that nothing is laid out anew.
//
// Shapes: T tokens, D hidden, N query heads, K KV heads, H head dim, A = N * H, F intermediate, R rows that draw.
#include "attention_tiles.h"
#include "linear.h"
#include "rows.h"

#if defined(PENSTOCK_TILES)
namespace {

using linear::kSide;

// The same in engine/kernels/cpu_stack.py, field by field.
struct Layer {
  const uint16_t *input_norm, *mlp_norm, *q_norm, *k_norm;  // the last two may be null
  linear::Packed qkv, out, gate_up, down;
  void* pool;      // this layer of the pool's first page
  int64_t window;        // 0: none
};

// The same in engine/kernels/cpu_stack.py, field by field.
struct Step {
  const uint16_t* residual;  // [T, D], changed
  const float* cos_sin;      // [T, 2, H / 2]
  const int32_t *page_table, *query_start, *context_lens;
  const int64_t *slot_page, *slot_offset;
  const int64_t* draw_rows;   // rising
  const uint16_t* next_norm;  // the norm after the last of these layers
  uint16_t* drawn;            // [R, D]: residual of the rows that draw, normalised by `next_norm`
  int64_t page_stride;        // bytes
  int32_t num_tokens, num_drawn, num_sequences, table_width, page_size;
  int32_t hidden, num_heads, num_kv_heads, head_dim, intermediate;
  int32_t codes;  // as in attention.h
  float eps, scale;
};

// What stands between the operations of a step; one for all layers. The memory is kept for the thread's next step: to
// get some megabytes anew each time means a page fault for every 4 KB of them.
struct Between {
  uint16_t *normed, *qkv, *mixed, *inner;
  explicit Between(const Step& step) {
    const int64_t rows = linear::padded(step.num_tokens), heads = step.num_heads * step.head_dim;
    const int64_t sizes[] = {rows * step.hidden, rows * (heads + 2 * step.num_kv_heads * step.head_dim), rows * heads,
                             rows * step.intermediate};
    static thread_local Lines<uint16_t> memory;
    const size_t all = sizes[0] + sizes[1] + sizes[2] + sizes[3];  // each a multiple of a cache line
    if (memory.size() < all) memory.resize(all);
    normed = memory.data();
    qkv = normed + sizes[0];
    mixed = qkv + sizes[1];
    inner = mixed + sizes[2];
  }
};

class Decoder {
 public:
  Decoder(const Step& step, int num_threads)
      : step(step), between(step), num_threads(num_threads), residual(const_cast<uint16_t*>(step.residual)),
        num_rows(step.num_tokens) {
    Problem shape{};
    shape.query_start = step.query_start;
    shape.num_sequences = step.num_sequences;
    shape.num_kv_heads = step.num_kv_heads;
    shape.num_heads = step.num_heads;
    shape.page_size = step.page_size;
    items = list_items_of_bf16(shape, num_threads);
  }

  void normalise_first(const Layer& layer) { normalise_rows(layer.input_norm); }

  // `next_norm` is null after the last layer of the model: then only the rows that draw go on.
  void run(const Layer& layer, const uint16_t* next_norm) {
    uint16_t* const qkv = between.qkv;
    multiply(layer.qkv, between.normed, [&](int row, int panel, Floats sums) {
      store_rounded(qkv + int64_t(row) * layer.qkv.outputs + panel * kSide, sums, layer.qkv, panel);
    });
    place_tokens(layer);
    attend(layer);
    if (!next_norm && !keep_drawing()) return;
    add_to_residual(layer.out, between.mixed);
    normalise_rows(layer.mlp_norm);
    activate(layer.gate_up);
    add_to_residual(layer.down, between.inner);
    if (next_norm) {
      normalise_rows(next_norm);
      return;
    }
    for_rows(kSide, [&](int64_t row) {
      normalise(step.drawn + row * step.hidden, residual + row * step.hidden, step.next_norm, step.hidden, step.eps);
    });
  }

 private:
  const Step& step;
  const Between between;
  const int num_threads;
  std::vector<Item> items;
  uint16_t* const residual;
  int num_rows;

  static Floats with_bias(Floats sums, const linear::Packed& weight, int panel) {
    return weight.bias ? sums + load_floats(weight.bias + panel * kSide, kLanes) : sums;
  }

  static void store_rounded(uint16_t* to, Floats sums, const linear::Packed& weight, int panel) {
    store_floats(to, with_bias(sums, weight, panel), kLanes);
  }

  // Calls take(row) for each; `of_piece` rows are worth some microseconds.
  template <class Take> void for_rows(int of_piece, const Take& take) const {
    crew::share(num_threads, (num_rows + of_piece - 1) / of_piece, [&](crew::Pieces& pieces) {
      for (int piece; pieces.take(piece);)
        for (int64_t row = piece * of_piece; row < std::min(num_rows, (piece + 1) * of_piece); ++row) take(row);
    });
  }

  // Calls take(row, panel, sums).
  template <class Take> void multiply(const linear::Packed& weight, const uint16_t* strips, const Take& take) const {
    linear::for_outputs(num_threads, weight, strips, num_rows, 1,
                        [&](int row, int panel, Floats first, bool is_pair, Floats second) {
                          take(row, panel, first);
                          if (is_pair) take(row, panel + 1, second);
                        });
  }

  void add_to_residual(const linear::Packed& weight, const uint16_t* strips) const {
    multiply(weight, strips, [&](int row, int panel, Floats sums) {
      uint16_t* total = residual + int64_t(row) * step.hidden + panel * kSide;
      const Floats out = widen(narrow(with_bias(sums, weight, panel)));
      store_floats(total, load_floats(total, kLanes) + out, kLanes);
    });
  }

  void activate(const linear::Packed& gate_up) const {
    uint16_t* const inner = between.inner;
    const int panels = step.intermediate / kSide;
    linear::for_outputs(num_threads, gate_up, between.normed, num_rows, panels,
                        [&](int row, int panel, Floats gate, bool, Floats up) {
                          gate = widen(narrow(with_bias(gate, gate_up, panel)));
                          up = widen(narrow(with_bias(up, gate_up, panel + panels)));
                          store_floats(inner + linear::place(row, panel * kSide, step.intermediate), silu(gate) * up,
                                       kLanes);
                        });
  }

  // Rows of the residual to strips of tiles.
  void normalise_rows(const uint16_t* weight) const {
    const int width = step.hidden;
    uint16_t* const normed = between.normed;
    for_rows(kSide, [&](int64_t row) {
      const uint16_t* from = residual + row * width;
      const float factor = root_mean_square_factor(from, width, step.eps);
      for (int i = 0; i < width; i += kLanes)
        store_floats(normed + linear::place(row, i, width),
                     load_floats(from + i, kLanes) * factor * load_floats(weight + i, kLanes), kLanes);
    });
  }

  // Q and K are rotated, K and V go to their slots.
  void place_tokens(const Layer& layer) const {
    constexpr int kTokens = 4;
    const int head_dim = step.head_dim, num_heads = step.num_heads, num_kv_heads = step.num_kv_heads;
    for_rows(kTokens, [&](int64_t t) {
      uint16_t* const token = between.qkv + t * layer.qkv.outputs;
      const float* cosine = step.cos_sin + t * head_dim;
      for (int head = 0; head < num_heads + num_kv_heads; ++head) {
        uint16_t* at = token + head * head_dim;
        if (layer.q_norm) normalise(at, at, head < num_heads ? layer.q_norm : layer.k_norm, head_dim, step.eps);
        rotate(at, at, cosine, head_dim / 2);
      }
      for (int head = 0; head < num_kv_heads; ++head)
        write_head(static_cast<uint8_t*>(layer.pool) + step.slot_page[t] * step.page_stride,
                   token + (num_heads + head) * head_dim, token + (num_heads + num_kv_heads + head) * head_dim,
                   int64_t(head) * step.page_size + step.slot_offset[t]);
    });
  }

  // K and V of a token's head to a row of a page.
  void write_head(uint8_t* page, const uint16_t* k, const uint16_t* v, int64_t row) const {
    const int64_t num_rows = int64_t(step.num_kv_heads) * step.page_size, row_bytes = step.head_dim * 2;
    switch (step.codes) {
      case kFp8Kv: return encode_token<Fp8Codes>(page, k, v, row, num_rows, step.head_dim);
      case kInt8Kv: return encode_token<Int8Codes>(page, k, v, row, num_rows, step.head_dim);
      default:
        std::memcpy(page + row * row_bytes, k, row_bytes);
        std::memcpy(page + (num_rows + row) * row_bytes, v, row_bytes);
    }
  }

  void attend(const Layer& layer) const {
    const Problem problem{between.qkv, layer.pool,        between.mixed, step.page_table,
                          step.query_start,  step.context_lens, layer.qkv.outputs,   step.page_stride,
                          step.num_sequences, step.table_width, step.num_heads,      step.num_kv_heads,
                          step.page_size,    step.head_dim,     int32_t(layer.window), step.scale, true, step.codes};
    attend_in_bf16(problem, items, num_threads);
  }

  // The rows that draw move to the front; false where there is none.
  bool keep_drawing() {
    num_rows = step.num_drawn;
    const int width = step.num_heads * step.head_dim;
    uint16_t* const mixed = between.mixed;
    for (int64_t row = 0; row < num_rows; ++row) {
      const int64_t from = step.draw_rows[row];
      if (from == row) continue;
      std::memcpy(residual + row * step.hidden, residual + from * step.hidden, step.hidden * 2);
      for (int i = 0; i < width; i += kLanes)
        std::memcpy(mixed + linear::place(row, i, width), mixed + linear::place(from, i, width), kLanes * 2);
    }
    return num_rows > 0;
  }
};

}  // namespace

// Layers [first, last) of `layers`; at the first of them the residual is normalised anew. With `draws` the last of them
// is the model's last: only rows that draw go through its feed-forward, and `drawn` is written.
extern "C" void penstock_decoder(const Layer* layers, int32_t first, int32_t last, const Step* step, int32_t draws,
                                 int32_t num_threads) {
  Decoder decoder(*step, num_threads);
  decoder.normalise_first(layers[first]);
  for (int layer = first; layer < last; ++layer) {
    const bool is_end = layer + 1 == last;
    decoder.run(layers[layer], !is_end ? layers[layer + 1].input_norm : draws ? nullptr : layers[layer].input_norm);
  }
}
#endif
