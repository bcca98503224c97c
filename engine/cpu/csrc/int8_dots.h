// Sums of products of bytes, four at a time: a quad of a row's int8 codes with quads of a weight's unsigned codes. Every
// instruction set gives the same 32-bit integers, so no instruction that saturates is used (`vpmaddubsw` adds two
// products in 16 bits, which overflow).
#pragma once

#include "simd.h"

namespace linear {

constexpr int kQuad = 4;

// Where there is an instruction for four products of bytes, a row's quad is one word. Elsewhere it is two pairs of 16-bit
// numbers, of its even and of its odd inputs, and the weight's quads are split into the same while they are loaded.
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
struct CodeQuad {
  Words codes;
  CodeQuad() = default;
  explicit CodeQuad(Words codes) : codes(codes) {}
};
struct RowQuad {
  Words codes;
  explicit RowQuad(const uint32_t* row) : codes(Words{} + *row) {}
};
inline Words add_dot(Words total, const RowQuad& row, const CodeQuad& weight) {
#if defined(__AVX512VNNI__)
  return (Words)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weight.codes, (__m512i)row.codes);
#else
  return (Words)_mm256_dpbusd_avx_epi32((__m256i)total, (__m256i)weight.codes, (__m256i)row.codes);
#endif
}
constexpr int kRowWords = 1;      // of a quad
constexpr bool kIsSigned = false;  // whether the weight's codes are multiplied as signed bytes
#elif defined(__ARM_NEON) && defined(__aarch64__)
struct CodeQuad {
  int8x16_t codes;
  CodeQuad() = default;
  explicit CodeQuad(Words codes) : codes((int8x16_t)codes) {}
};
struct RowQuad {
  int8x16_t codes;
  explicit RowQuad(const uint32_t* row) : codes((int8x16_t)vdupq_n_u32(*row)) {}
};
inline Words add_dot(Words total, const RowQuad& row, const CodeQuad& weight) {
#if defined(__ARM_FEATURE_DOTPROD)
  return (Words)vdotq_s32((int32x4_t)total, weight.codes, row.codes);
#else  // two products are at most 2 * 128 * 127
  const int16x8_t low = vmull_s8(vget_low_s8(weight.codes), vget_low_s8(row.codes));
  const int16x8_t high = vmull_high_s8(weight.codes, row.codes);
  return (Words)vpadalq_s16((int32x4_t)total, vpaddq_s16(low, high));
#endif
}
constexpr int kRowWords = 1;
constexpr bool kIsSigned = true;
#else
struct CodeQuad {
  Words even, odd;
  CodeQuad() = default;
  explicit CodeQuad(Words codes) : even(codes & 0x00ff00ffu), odd(codes >> 8 & 0x00ff00ffu) {}
};
struct RowQuad {
  Words even, odd;
  explicit RowQuad(const uint32_t* row) : even(Words{} + row[0]), odd(Words{} + row[1]) {}
};
inline Words dot_pairs(Words a, Words b) {  // of signed 16-bit numbers
#if defined(__AVX512BW__)
  return (Words)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
  return (Words)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  const Ints low = ((Ints)(a << 16) >> 16) * ((Ints)(b << 16) >> 16);
  return (Words)(low + ((Ints)a >> 16) * ((Ints)b >> 16));
#endif
}
inline Words add_dot(Words total, const RowQuad& row, const CodeQuad& weight) {
  return total + (dot_pairs(weight.even, row.even) + dot_pairs(weight.odd, row.odd));
}
constexpr int kRowWords = 2;
constexpr bool kIsSigned = false;
#endif

// Rounds to the nearest integer, ties to even.
inline Ints nearest(Floats value) {
#if defined(__AVX512F__)
  return (Ints)_mm512_cvtps_epi32((__m512)value);
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtps_epi32((__m256)value);
#elif defined(__aarch64__)
  return (Ints)vcvtnq_s32_f32((float32x4_t)value);
#else
  Ints result;
  for (int lane = 0; lane < kLanes; ++lane) result[lane] = int32_t(std::nearbyintf(value[lane]));
  return result;
#endif
}

}  // namespace linear
