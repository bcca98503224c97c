// The entry points of packing a weight and of a product with a packed weight. Reference: torch's linear.
#include "linear.h"

extern "C" int32_t penstock_has_tiles() { return tiles::available(); }

// weight: bf16 [outputs, inputs], contiguous; packed: as many values.
extern "C" void penstock_pack_linear(
    uint16_t* packed, const uint16_t* weight, int32_t outputs, int32_t inputs, int32_t num_threads) {
  using namespace linear;
  const int steps = inputs / kDepth;
  thread_team::parallel_for(num_threads, outputs / kSide, [&](thread_team::Tasks& panels) {
    for (int p; panels.take(p);)
      for (int i = 0; i < steps; ++i) {
        uint32_t* const tile = reinterpret_cast<uint32_t*>(packed + (int64_t(p) * steps + i) * kTile);
        for (int first = 0; first < kSide; first += kLanes)      // outputs
          for (int word = 0; word < kSide; word += kLanes) {
            Words rows[kLanes];
            for (int lane = 0; lane < kLanes; ++lane)
              rows[lane] = load<Words>(weight + int64_t(p * kSide + first + lane) * inputs + i * kDepth + word * 2);
            transpose(rows, tile + word * kSide + first, kSide);
          }
      }
  });
}

// out [count, outputs] = rows [count, inputs] @ weight + bias.
extern "C" void penstock_linear(
    uint16_t* out, const uint16_t* rows, const linear::PackedWeight* packed, int32_t count, int64_t stride,
    int32_t num_threads) {
  using namespace linear;
  const PackedWeight weight = *packed;
  const uint16_t* const bias = weight.bias;
  const int inputs = weight.inputs, outputs = weight.outputs;
  static thread_local Lines<uint16_t> buffer;
  if (buffer.size() < size_t(padded(count)) * inputs) buffer.resize(padded(count) * inputs);
  uint16_t* const strips = buffer.data();
  const auto finish = [=](int row, int output, Floats first, bool is_pair, Floats second) {
    uint16_t* to = out + int64_t(row) * outputs + output;
    if (bias) first += load_floats(bias + output, kLanes);
    store_floats(to, first, kLanes);
    if (!is_pair) return;
    if (bias) second += load_floats(bias + output + kSide, kLanes);
    store_floats(to + kSide, second, kLanes);
  };
  thread_team::parallel_for(num_threads, (count + kSide - 1) / kSide, [&](thread_team::Tasks& tasks) {
    for (int strip; tasks.take(strip);)
      for (int row = strip * kSide; row < std::min(count, (strip + 1) * kSide); ++row)
        for (int i = 0; i < inputs; i += kDepth)
          std::memcpy(strips + place(row, i, inputs), rows + row * stride + i, kDepth * sizeof(uint16_t));
  });
  for_outputs(num_threads, weight, strips, count, 1, finish);
}
