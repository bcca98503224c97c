// Quantized KV pages: a code of one byte per value, and behind a layer's codes a float32 scale per token and head.
// The arithmetic is the same, bit for bit, as in engine/kernels/kv_quantization.py.
#pragma once

#include "simd.h"

typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
typedef int8_t SignedBytes __attribute__((vector_size(kLanes)));

constexpr int kFp8Kv = 1, kInt8Kv = 2;  // as engine/cpu/native.py numbers them; 0 is an unquantized pool
constexpr float kMinPeak = 1e-30f;

// Values of the model's own dtype.
struct UnquantizedKv {
  static constexpr bool kQuantized = false;
};

struct Int8Kv {
  static constexpr bool kQuantized = true;
  static constexpr float kMaxCode = 127.0f, kDecodeScale = 1.0f;
  static Floats decode(const uint8_t* from) {
    return __builtin_convertvector(load<SignedBytes>(from), Floats);
  }
  static Bytes encode(Floats value) {
    const Floats round_magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
    Ints whole = __builtin_convertvector((value + round_magic) - round_magic, Ints);
    return (Bytes)__builtin_convertvector(whole, SignedBytes);
  }
};

// e4m3: a sign, four exponent bits (bias 7), three fraction bits; no infinity.
struct Fp8Kv {
  static constexpr bool kQuantized = true;
  static constexpr float kMaxCode = 448.0f, kDecodeScale = 256.0f;  // `decode` returns values too small by this factor
  static Floats decode(const uint8_t* from) { return decode(__builtin_convertvector(load<Bytes>(from), Words)); }
  static Floats decode(Words code) {
#if defined(__AVX512F__)
    // As bits of a half, whose bias is 15: the processor converts its subnormals at full speed.
    Words half = ((code & 0x80u) << 8) | ((code & 0x7fu) << 7);
    return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)half));
#else
    Words sign = (code & 0x80u) << 24, size = code & 0x7fu;
    Floats normal = (Floats)((size << 20) + ((127u - 15u) << 23));
    Floats tiny = __builtin_convertvector((Ints)size, Floats) * (1.0f / 131072.0f);  // 2^-9 / 256
    Floats value = (Ints)size < 8 ? tiny : normal;
    return (Floats)((Words)value | sign);
#endif
  }
  // Rounds to nearest, ties to even.
  static Bytes encode(Floats value) {
    Words bits = (Words)value, sign = (bits >> 24) & 0x80u, size = bits & 0x7fffffffu;
    Words normal = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - ((127u - 7u) << 3);
    Words tiny = (Words)((Floats)size + splat(16384.0f)) - (Words)splat(16384.0f);  // in steps of 2^-9
    Words code = (Floats)size < splat(0.015625f) ? tiny : normal;
    return __builtin_convertvector(code | sign, Bytes);
  }
};

// Quantizes a row of `width` values; returns its scale.
template <class C, class S> inline float encode_row(uint8_t* to, const S* row, int width) {
  Floats peaks{};
  for (int i = 0; i < width; i += kLanes) {
    Floats x = load_floats(row + i, width - i);
    peaks = maximum(peaks, (Floats)((Words)x & 0x7fffffffu));
  }
  const float peak = largest(peaks), factor = peak < kMinPeak ? 0.0f : C::kMaxCode / peak;
  for (int i = 0; i < width; i += kLanes) {
    Floats scaled = load_floats(row + i, width - i) * factor;
    scaled = maximum(splat(-C::kMaxCode), scaled < splat(C::kMaxCode) ? scaled : splat(C::kMaxCode));
    Bytes codes = C::encode(scaled);
    std::memcpy(to + i, &codes, std::min(kLanes, width - i));
  }
  return peak < kMinPeak ? 0.0f : peak / C::kMaxCode;
}

// Quantizes K and V of one token's head into a page's layer of `num_rows` rows each, codes and then scales.
template <class C, class S>
inline void encode_token(uint8_t* layer, const S* k, const S* v, int64_t row, int64_t num_rows, int head_dim) {
  float* scales = reinterpret_cast<float*>(layer + 2 * num_rows * head_dim);
  scales[row] = encode_row<C>(layer + row * head_dim, k, head_dim);
  scales[num_rows + row] = encode_row<C>(layer + (num_rows + row) * head_dim, v, head_dim);
}
