// The values that codes of quantized weights represent, decoded to bf16 a tile at a time. bf16 has all of them exactly:
// for int4 the code minus 8, for int8 the code plus a half, for fp8 (e4m3) the value itself.
//
// Layout of a tile of codes: a 16-bit word holds four int4 codes, of inputs 2k + j of the tile's rows 4q .. 4q + 3;
// bytes are stored in pairs of rows, so that two unpack instructions give both (engine/cpu/linear.py). Byte codes are a
// sign and a magnitude of seven bits.
#pragma once

#include "packed_weight.h"
#include "simd.h"

namespace linear {

inline uint16_t upper_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return uint16_t(bits >> 16);
}

inline float byte_value(int kind, int magnitude) {
  if (kind != kFp8) return float(magnitude) + 0.5f;
  const int exponent = magnitude >> 3, fraction = magnitude & 7;
  if (magnitude == 127) return NAN;
  return exponent ? std::ldexp(8.0f + fraction, exponent - 10) : std::ldexp(float(fraction), -9);
}

// Decodes 16 rows of a panel's tile to bf16.
struct Int4Values {
  static constexpr int kTileBytes = 256;

  // Returns whether decoding again for each block of rows, in L1, is faster than decoding once and reading from L2: it
  // is with few blocks, and where panels take much of L2 (measured 2026-11).
  static bool decodes_per_block(int num_blocks, int steps) { return num_blocks == 2 || steps > 64; }

#if defined(__AVX512BW__)
  explicit Int4Values(int) {
    alignas(64) uint16_t values[32];
    for (int code = 0; code < 32; ++code) values[code] = upper_half(float(code % 16 - 8));
    table = _mm512_load_si512(values);
  }
  void decode(const uint8_t* codes, uint16_t* tile) const {
    for (int quarter = 0; quarter < 4; ++quarter, codes += 64, tile += 128) {
      const __m512i four = _mm512_loadu_si512(codes);
      _mm512_store_si512(tile, _mm512_permutexvar_epi16(four, table));
      _mm512_store_si512(tile + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4), table));
      _mm512_store_si512(tile + 64, _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 8), table));
      _mm512_store_si512(tile + 96, _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 12), table));
    }
  }

 private:
  __m512i table;  // the values twice: a look-up uses five bits, and the highest belongs to another code
#else
  explicit Int4Values(int) {
    for (int byte = 0; byte < kLanes * 4; ++byte) {
      const uint16_t bits = upper_half(float(byte % 16 - 8));
      low[byte] = uint8_t(bits), high[byte] = uint8_t(bits >> 8);
    }
  }
  void decode(const uint8_t* codes, uint16_t* tile) const {
    for (int quarter = 0; quarter < 4; ++quarter, codes += 64, tile += 128)
      for (int at = 0; at < 64; at += kLanes * 4) {
        const Words four = load<Words>(codes + at);
        for (int row = 0; row < 4; ++row) store(tile + row * 32 + at / 2, look_up(four >> (4 * row) & 0x000f000fu));
      }
  }

 private:
  alignas(64) uint8_t low[kLanes * 4], high[kLanes * 4];  // the two bytes of each value, repeated in every 16

  // Returns the values of two codes a word. An index from 128 on gives 0.
  Words look_up(Words codes) const {
#if defined(__AVX2__)
    const __m256i first = _mm256_shuffle_epi8(load<__m256i>(low), (__m256i)(codes | 0x80008000u));
    return (Words)_mm256_or_si256(first, _mm256_shuffle_epi8(load<__m256i>(high), (__m256i)(codes << 8 | 0x00800080u)));
#elif defined(__aarch64__)
    const uint8x16_t first = vqtbl1q_u8(vld1q_u8(low), (uint8x16_t)(codes | 0x80008000u));
    return (Words)vorrq_u8(first, vqtbl1q_u8(vld1q_u8(high), (uint8x16_t)(codes << 8 | 0x00800080u)));
#else
    const Floats even = __builtin_convertvector((Ints)(codes & 0xffffu), Floats) - 8.0f;
    const Floats odd = __builtin_convertvector((Ints)(codes >> 16), Floats) - 8.0f;
    return (Words)even >> 16 | ((Words)odd & 0xffff0000u);
#endif
  }
#endif
};

struct ByteValues {
  static constexpr int kTileBytes = 512;
  static bool decodes_per_block(int, int) { return false; }

#if defined(__AVX512VBMI__)
  explicit ByteValues(int kind) {
    alignas(64) uint8_t bytes[2][128];
    for (int code = 0; code < 128; ++code) {
      const uint16_t bits = upper_half(byte_value(kind, code));
      bytes[0][code] = uint8_t(bits), bytes[1][code] = uint8_t(bits >> 8);
    }
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_load_si512(bytes[0] + 64 * half);
      high[half] = _mm512_load_si512(bytes[1] + 64 * half);
    }
  }
  void decode(const uint8_t* codes, uint16_t* tile) const {
    const __m512i sign = _mm512_set1_epi8(char(0x80));
    for (int pair = 0; pair < 8; ++pair, codes += 64, tile += 64) {
      const __m512i code = _mm512_loadu_si512(codes);
      const __m512i lower = _mm512_permutex2var_epi8(low[0], code, low[1]);
      const __m512i size = _mm512_permutex2var_epi8(high[0], code, high[1]);
      const __m512i upper = _mm512_ternarylogic_epi32(size, code, sign, 0xf8);  // size | (code & sign)
      _mm512_store_si512(tile, _mm512_unpacklo_epi8(lower, upper));
      _mm512_store_si512(tile + 32, _mm512_unpackhi_epi8(lower, upper));
    }
  }

 private:
  __m512i low[2], high[2];  // the two bytes in bf16 of each magnitude
#else
  explicit ByteValues(int kind) : is_fp8(kind == kFp8) {}
  void decode(const uint8_t* codes, uint16_t* tile) const {
    if (is_fp8) decode_as<true>(codes, tile);
    else decode_as<false>(codes, tile);
  }

 private:
  const bool is_fp8;
  typedef uint8_t Codes __attribute__((vector_size(kLanes * 2)));
  typedef uint16_t WideCodes __attribute__((vector_size(kLanes * 4)));

  template <bool kIsFp8> static void decode_as(const uint8_t* codes, uint16_t* tile) {
    for (int pair = 0; pair < 8; ++pair, codes += 64, tile += 64)
      for (int at = 0; at < 64; at += kLanes * 4)
        for (int row = 0; row < 2; ++row) {
          Codes these;  // 8 of every 16 bytes
          for (int part = 0; part < kLanes / 4; ++part)
            std::memcpy(reinterpret_cast<char*>(&these) + 8 * part, codes + at + 16 * part + 8 * row, 8);
          const Words both = (Words)__builtin_convertvector(these, WideCodes);
          store(tile + row * 32 + at / 2,
                value<kIsFp8>(both & 0xffffu) >> 16 | (value<kIsFp8>(both >> 16) & 0xffff0000u));
        }
  }

  // Returns the bits of the values as floats.
  template <bool kIsFp8> static Words value(Words code) {
    const Words sign = (code & 0x80u) << 24, size = code & 0x7fu;
    const Floats number = __builtin_convertvector((Ints)size, Floats);
    if (!kIsFp8) return (Words)(number + 0.5f) | sign;
    const Words normal = (size << 20) + ((127u - 7u) << 23), tiny = (Words)(number * (1.0f / 512.0f));
    const Words finite = (Ints)size < 8 ? tiny : normal;
    return ((Ints)size == 127 ? (Words)splat(NAN) : finite) | sign;
  }
#endif
};

}  // namespace linear
