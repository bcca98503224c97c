// Vectors as wide as a register, in GCC and Clang vector extensions: 16 lanes with AVX-512, 8 with AVX2, else 4. The
// compiler's flags decide which instructions a library has (engine/cpu/isa.py).
//
// A row of K or V is read as 32-bit words: one float, or a pair of neighbouring bf16. `multiply_add` adds the product
// of two vectors of words to floats, for pairs the sum of both products.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Shorts __attribute__((vector_size(kLanes * 2)));

// An instruction that multiplies pairs of bf16 and adds them to a float. On processors with AMX it is not used: there
// it makes attention a third slower (measured 2026-11 on Sapphire Rapids).
#if (defined(__AVX512BF16__) && !defined(__AMX_TILE__)) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define PENSTOCK_DOTS 1
#endif

// Allocates from the start of a cache line: a tile row that crosses two lines costs two loads.
template <class T> struct LineAllocator {
  typedef T value_type;
  LineAllocator() = default;
  template <class U> LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64))); }
  void deallocate(T* at, size_t) { ::operator delete(at, std::align_val_t(64)); }
  bool operator==(const LineAllocator&) const { return true; }
  bool operator!=(const LineAllocator&) const { return false; }
};
template <class T> using Lines = std::vector<T, LineAllocator<T>>;

struct Float32 {
  typedef float Stored;
  static constexpr int kPerWord = 1;
};
struct BFloat16 {
  typedef uint16_t Stored;
  static constexpr int kPerWord = 2;
};

template <class V> inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}
template <class V> inline void store(void* to, V value) { std::memcpy(to, &value, sizeof(V)); }
inline Floats splat(float value) {  // `Floats{} + value` would be an addition: the sum of 0 and -0 is 0
#if defined(__AVX512F__)
  return (Floats)_mm512_set1_ps(value);
#elif defined(__AVX2__)
  return (Floats)_mm256_set1_ps(value);
#elif defined(__aarch64__)
  return (Floats)vdupq_n_f32(value);
#else
  return Floats{} + value;
#endif
}

inline Floats widen(Shorts bits) { return (Floats)(__builtin_convertvector(bits, Words) << 16); }

// Rounds to nearest, ties to even. NaN stays NaN: its quiet bit is set, because rounding could carry its payload away.
inline Shorts narrow(Floats value) {
#if defined(__AVX512BF16__)
  return (Shorts)_mm512_cvtneps_pbh((__m512)value);
#else
  Words bits = (Words)value;
  Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  Ints is_nan = value != value;
  rounded = (((bits >> 16) | 0x40u) & (Words)is_nan) | (rounded & ~(Words)is_nan);
  return __builtin_convertvector(rounded, Shorts);
#endif
}

// Load or store `count` values as floats; lanes past `count` are 0 and are not written.
inline Floats load_floats(const float* from, int count) {
  if (count >= kLanes) return load<Floats>(from);
  Floats value{};
  std::memcpy(&value, from, count * sizeof(float));
  return value;
}
inline Floats load_floats(const uint16_t* from, int count) {
  if (count >= kLanes) return widen(load<Shorts>(from));
  Shorts value{};
  std::memcpy(&value, from, count * sizeof(uint16_t));
  return widen(value);
}
inline void store_floats(float* to, Floats value, int count) {
  std::memcpy(to, &value, std::min(count, kLanes) * sizeof(float));
}
inline void store_floats(uint16_t* to, Floats value, int count) {
  Shorts bits = narrow(value);
  std::memcpy(to, &bits, std::min(count, kLanes) * sizeof(uint16_t));
}

// Rounds to the dtype of `Stored`.
template <class Stored> inline Floats rounded(Floats value) {
  if constexpr (sizeof(Stored) == sizeof(float)) return value;
  else return widen(narrow(value));
}

inline Floats maximum(Floats a, Floats b) { return a > b ? a : b; }
inline float largest(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)value);
#else
  float best = value[0];
  for (int i = 1; i < kLanes; ++i) best = std::max(best, value[i]);
  return best;
#endif
}
inline float sum(Floats value) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)value);
#else
  float total = 0;
  for (int i = 0; i < kLanes; ++i) total += value[i];
  return total;
#endif
}

// Returns the sums of `Count` vectors in the first lanes.
template <int Count> inline Floats sums(const Floats values[Count]) {
  static_assert(Count <= kLanes);
#if defined(__AVX512F__)
  if constexpr (Count >= 4) {
    // Each level adds the halves of two vectors into one. Their order makes that of the sums ascend at the end.
    const auto at = [&](int place) {
      const int index = place % 4 * 4 + place / 4;
      return index < Count ? (__m512)values[index] : _mm512_setzero_ps();
    };
    __m512 of4[4];
    for (int i = 0; i < 4; ++i) {
      __m512 of2[2];
      for (int half = 0; half < 2; ++half) {
        const __m512 a = at(4 * i + 2 * half), b = at(4 * i + 2 * half + 1);
        of2[half] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
      }
      of4[i] = _mm512_add_ps(_mm512_shuffle_f32x4(of2[0], of2[1], 0x88), _mm512_shuffle_f32x4(of2[0], of2[1], 0xdd));
    }
    __m512 of8[2];
    for (int i = 0; i < 2; ++i) {
      const __m512d a = (__m512d)of4[2 * i], b = (__m512d)of4[2 * i + 1];
      of8[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
    return (Floats)_mm512_add_ps(_mm512_shuffle_ps(of8[0], of8[1], 0x88), _mm512_shuffle_ps(of8[0], of8[1], 0xdd));
  }
#endif
  Floats found{};
  for (int i = 0; i < Count; ++i) found[i] = sum(values[i]);
  return found;
}

// 2^x for x <= 127, relative error below 3e-7; 0 far below -126.
#if defined(__AVX512DQ__)
inline Floats exp2(Floats x) {
  const Floats r = (Floats)_mm512_reduce_ps((__m512)x, 1);  // x - floor(x); scalef uses floor(x)
  Floats y = r * 1.8671300794e-3f + 9.0170302959e-3f;
  y = y * r + 5.5799913130e-2f;
  y = y * r + 2.4016445014e-1f;
  y = y * r + 6.9315131181e-1f;
  y = y * r + 1.0f;
  return (Floats)_mm512_scalef_ps((__m512)y, (__m512)x);
}
inline Floats reciprocal(Floats x) {  // for normal numbers, exact to the last bit or two: a Newton step from 14 bits
  const Floats about = (Floats)_mm512_rcp14_ps((__m512)x);
  return about * (2.0f - x * about);
}
#else
// The Taylor series of 2^r on [-1/2, 1/2].
inline Floats exp2(Floats x) {
  const Floats round_magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves no bits for a fraction
  Floats whole = (maximum(x, splat(-126.0f)) + round_magic) - round_magic;
  Floats r = maximum(x, splat(-126.0f)) - whole;
  Floats y = r * 1.5403530393e-4f + 1.3333558146e-3f;
  y = y * r + 9.6181291076e-3f;
  y = y * r + 5.5504108665e-2f;
  y = y * r + 2.4022650696e-1f;
  y = y * r + 6.9314718056e-1f;
  y = y * r + 1.0f;
  Floats result = (Floats)((Ints)y + (__builtin_convertvector(whole, Ints) << 23));
  return (Floats)((Ints)result & ~(Ints)(x < splat(-126.0f)));
}
inline Floats reciprocal(Floats x) { return 1.0f / x; }
#endif

template <class T> inline Floats multiply_add(Floats total, Words a, Words b);
template <> inline Floats multiply_add<Float32>(Floats total, Words a, Words b) {
  return total + (Floats)a * (Floats)b;
}
template <> inline Floats multiply_add<BFloat16>(Floats total, Words a, Words b) {
#if defined(PENSTOCK_DOTS) && defined(__AVX512BF16__)
  return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#elif defined(PENSTOCK_DOTS)
  return (Floats)vbfdotq_f32((float32x4_t)total, (bfloat16x8_t)a, (bfloat16x8_t)b);
#else
  total += (Floats)(a << 16) * (Floats)(b << 16);
  return total + (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
}

inline Ints lane_numbers() {
  Ints numbers;
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// Column i of `kLanes` rows of words becomes columns[i].
inline void transpose(const Words rows[kLanes], Words columns[kLanes]) {
#if defined(__AVX512F__)
  __m512i a[kLanes], b[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {  // b[4g + i]: column i of each 128-bit lane for rows 4g .. 4g + 3
    __m512i low01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), high01 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    __m512i low23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
    __m512i high23 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    columns[0 + i] = (Words)_mm512_shuffle_i32x4(low01, low23, 0x88);
    columns[4 + i] = (Words)_mm512_shuffle_i32x4(high01, high23, 0x88);
    columns[8 + i] = (Words)_mm512_shuffle_i32x4(low01, low23, 0xdd);
    columns[12 + i] = (Words)_mm512_shuffle_i32x4(high01, high23, 0xdd);
  }
#elif defined(__AVX2__)
  __m256i a[kLanes], b[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    a[i] = _mm256_unpacklo_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_epi32((__m256i)rows[i], (__m256i)rows[i + 1]);
  }
  for (int i = 0; i < kLanes; i += 4) {
    b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    columns[i] = (Words)_mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
    columns[4 + i] = (Words)_mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
  }
#elif defined(__aarch64__)
  const uint32x4_t a = (uint32x4_t)rows[0], b = (uint32x4_t)rows[1], c = (uint32x4_t)rows[2], d = (uint32x4_t)rows[3];
  const uint64x2_t ab_even = (uint64x2_t)vtrn1q_u32(a, b), ab_odd = (uint64x2_t)vtrn2q_u32(a, b);
  const uint64x2_t cd_even = (uint64x2_t)vtrn1q_u32(c, d), cd_odd = (uint64x2_t)vtrn2q_u32(c, d);
  columns[0] = (Words)vtrn1q_u64(ab_even, cd_even), columns[1] = (Words)vtrn1q_u64(ab_odd, cd_odd);
  columns[2] = (Words)vtrn2q_u64(ab_even, cd_even), columns[3] = (Words)vtrn2q_u64(ab_odd, cd_odd);
#else
  for (int i = 0; i < kLanes; ++i)
    for (int row = 0; row < kLanes; ++row) columns[i][row] = rows[row][i];
#endif
}

// Writes column i of `kLanes` rows of words to `to + i * stride`.
inline void transpose(const Words rows[kLanes], uint32_t* to, int stride) {
  Words columns[kLanes];
  transpose(rows, columns);
  for (int i = 0; i < kLanes; ++i) store(to + i * stride, columns[i]);
}
