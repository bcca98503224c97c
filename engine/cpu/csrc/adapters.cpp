// Adds low-rank adapters to the rows of a product, for products that are computed one by one; decoder.cpp adds its own.
// Reference: engine/kernels/adapter_weights.py.
//
// Shapes: T rows, I inputs, O outputs.
#include "adapters.h"
#include "thread_team.h"

namespace {

// Adds B of a slot to `y`, which are up to kLanes outputs from `output` on. They may belong to several parts.
template <class T>
void add_outputs(const adapters::Slots& all, int64_t slot, const float* inner, int output, typename T::Stored* y) {
  const int count = std::min(kLanes, all.outputs - output);
  for (int done = 0; done < count;) {
    const int part = all.part_of(output + done), end = std::min(count, all.part_ends[part] - output);
    const Floats total = adapters::expand<T>(all, slot, inner, part, output, load_floats(y, count));
    for (; done < end; ++done) store_floats(y + done, Floats{} + total[done], 1);
  }
}

template <class T>
void add_rows(const adapters::Slots& all, const int64_t* slots, void* y, const void* x, int64_t y_stride,
              int64_t x_stride, int rows, int num_threads) {
  typedef typename T::Stored Stored;
  constexpr int kRows = adapters::kRows;
  std::vector<float> inner(int64_t(rows) * all.inner_width());
  const auto values_at = [&](int row, int i) { return static_cast<const Stored*>(x) + row * x_stride + i; };
  thread_team::parallel_for(num_threads, (rows + kRows - 1) / kRows, [&](thread_team::Tasks& tasks) {
    for (int task; tasks.take(task);) {
      const int first = task * kRows, end = std::min(rows, first + kRows);
      adapters::shrink_rows<T>(all, slots, first, end, values_at, inner.data());
      for (int o = 0; o < all.outputs; o += kLanes)
        for (int row = first; row < end; ++row)
          if (slots[row])
            add_outputs<T>(all, slots[row], inner.data() + int64_t(row) * all.inner_width(), o,
                           static_cast<Stored*>(y) + row * y_stride + o);
    }
  });
}

}  // namespace

// `slots` is [T], 0 for rows without an adapter; `y` [T, O] and `x` [T, I] are float32 or bf16.
extern "C" void penstock_add_adapters(const adapters::Slots* all, const int64_t* slots, void* y, const void* x,
                                      int64_t y_stride, int64_t x_stride, int32_t rows, int32_t is_float32,
                                      int32_t num_threads) {
  const auto add = is_float32 ? add_rows<Float32> : add_rows<BFloat16>;
  add(*all, slots, y, x, y_stride, x_stride, rows, num_threads);
}
