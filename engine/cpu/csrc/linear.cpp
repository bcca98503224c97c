// The entry points of packing a weight and of a product with a packed weight. Reference: torch's linear.
#include "linear.h"

namespace {

template <class Stored>
void multiply(Stored* out, const Stored* rows, const linear::PackedWeight& weight, int count, int64_t stride,
              int num_threads) {
  using namespace linear;
  const Stored* const bias = static_cast<const Stored*>(weight.bias);
  const int inputs = weight.inputs, outputs = weight.outputs;
  static thread_local Lines<Stored> buffer;
  if (buffer.size() < size_t(padded(count)) * inputs) buffer.resize(padded(count) * inputs);
  Stored* const strips = buffer.data();
  const auto finish = [=](int row, int output, Floats first, bool is_pair, Floats second) {
    Stored* to = out + int64_t(row) * outputs + output;
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
          std::memcpy(strips + place(row, i, inputs), rows + row * stride + i, kDepth * sizeof(Stored));
  });
  for_outputs(num_threads, weight, static_cast<const Stored*>(strips), count, 1, finish);
}

}  // namespace

extern "C" int32_t penstock_has_tiles() { return tiles::available(); }

// weight: words of a float32 or of two bf16, [outputs, words], contiguous; packed: as many words. A panel is the
// transpose of its outputs' words.
extern "C" void penstock_pack_linear(
    uint32_t* packed, const uint32_t* weight, int32_t outputs, int32_t words, int32_t num_threads) {
  using namespace linear;
  thread_team::parallel_for(num_threads, outputs / kSide, [&](thread_team::Tasks& panels) {
    for (int p; panels.take(p);)
      for (int word = 0; word < words; word += kLanes)
        for (int first = 0; first < kSide; first += kLanes) {  // outputs
          Words rows[kLanes];
          for (int lane = 0; lane < kLanes; ++lane)
            rows[lane] = load<Words>(weight + int64_t(p * kSide + first + lane) * words + word);
          transpose(rows, packed + int64_t(p) * words * kSide + word * kSide + first, kSide);
        }
  });
}

// out [count, outputs] = rows [count, inputs] @ weight + bias, in float32 for a weight of kFloat32, else in bf16. `stride`
// is in values.
extern "C" void penstock_linear(
    void* out, const void* rows, const linear::PackedWeight* weight, int32_t count, int64_t stride,
    int32_t num_threads) {
  if (weight->kind == linear::kFloat32)
    multiply(static_cast<float*>(out), static_cast<const float*>(rows), *weight, count, stride, num_threads);
  else
    multiply(static_cast<uint16_t*>(out), static_cast<const uint16_t*>(rows), *weight, count, stride, num_threads);
}
