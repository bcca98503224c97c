// A product with a packed weight by itself, and the packing. Twin: torch's linear.
#include "linear.h"

extern "C" int32_t penstock_has_tiles() { return tiles::available(); }

#if defined(PENSTOCK_TILES)
// weight: bf16 [outputs, inputs], contiguous; packed: as many values.
extern "C" void penstock_pack_linear(
    uint16_t* packed, const uint16_t* weight, int32_t outputs, int32_t inputs, int32_t num_threads) {
  using namespace linear;
  const int steps = inputs / kDepth;
  crew::share(num_threads, outputs / kSide, [&](crew::Pieces& panels) {
    for (int p; panels.take(p);)
      for (int i = 0; i < steps; ++i) {
        Words rows[kLanes];
        for (int lane = 0; lane < kLanes; ++lane)
          rows[lane] = load<Words>(weight + int64_t(p * kSide + lane) * inputs + i * kDepth);
        transpose(rows, reinterpret_cast<uint32_t*>(packed + (int64_t(p) * steps + i) * kTile), kLanes);
      }
  });
}

// out [count, outputs] = rows [count, inputs] @ weight + bias.
extern "C" void penstock_linear(
    uint16_t* out, const uint16_t* rows, const linear::Packed* packed, int32_t count, int64_t stride,
    int32_t num_threads) {
  using namespace linear;
  const Packed weight = *packed;
  const uint16_t* const bias = weight.bias;
  const int inputs = weight.inputs, outputs = weight.outputs;
  static thread_local Lines<uint16_t> kept;
  if (kept.size() < size_t(padded(count)) * inputs) kept.resize(padded(count) * inputs);
  uint16_t* const strips = kept.data();
  const auto finish = [=](int row, int panel, Floats first, bool is_pair, Floats second) {
    uint16_t* to = out + int64_t(row) * outputs + panel * kSide;
    if (bias) first += load_floats(bias + panel * kSide, kLanes);
    store_floats(to, first, kLanes);
    if (!is_pair) return;
    if (bias) second += load_floats(bias + (panel + 1) * kSide, kLanes);
    store_floats(to + kSide, second, kLanes);
  };
  crew::share(num_threads, (count + kSide - 1) / kSide, [&](crew::Pieces& pieces) {
    for (int strip; pieces.take(strip);)
      for (int row = strip * kSide; row < std::min(count, (strip + 1) * kSide); ++row)
        for (int i = 0; i < inputs; i += kDepth)
          store(strips + place(row, i, inputs), load<Words>(rows + row * stride + i));
  });
  for_outputs(num_threads, weight, strips, count, 1, finish);
}
#endif
