// Operations on a single row: norm, activation, rotation. Reference: engine/kernels/layer_ops.py.
#pragma once

#include "simd.h"

namespace {

template <class S> float root_mean_square_factor(const S* row, int width, float eps) {
  Floats total{};
  for (int i = 0; i < width; i += kLanes) {
    Floats x = load_floats(row + i, width - i);
    total += x * x;
  }
  return 1.0f / std::sqrt(sum(total) / width + eps);
}

template <class S> void normalise(S* to, const S* row, const S* weight, int width, float eps) {
  const float factor = root_mean_square_factor(row, width, eps);
  for (int i = 0; i < width; i += kLanes) {
    Floats x = load_floats(row + i, width - i) * factor;
    store_floats(to + i, x * load_floats(weight + i, width - i), width - i);
  }
}

inline Floats silu(Floats x) {
  Floats opposite = x * -1.44269504f;
  opposite = opposite < splat(120.0f) ? opposite : splat(120.0f);  // 2^120 acts as infinity here
  return x * reciprocal(1.0f + exp2(opposite));
}

// Rotates a head by its token's angles: `half` cosines, then as many sines. `to` may be `from`.
template <class S> void rotate(S* to, const S* from, const float* cosine, int half) {
  const float* sine = cosine + half;
  for (int i = 0; i < half; i += kLanes) {
    Floats a = load_floats(from + i, half - i), b = load_floats(from + half + i, half - i);
    Floats c = load_floats(cosine + i, half - i), s = load_floats(sine + i, half - i);
    store_floats(to + i, a * c - b * s, half - i);
    store_floats(to + half + i, b * c + a * s, half - i);
  }
}

}  // namespace
