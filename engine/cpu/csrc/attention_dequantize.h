// Decodes blocks of quantized pages for attention on AMX tiles. Codes become bf16, which represents all of their values
// exactly, in L1, and are read from there as unquantized pages are read in place. A key's scale multiplies its scores,
// a value's scale its weights, so nothing is rounded on the way.
#pragma once

#include "attention_tile_blocks.h"

#if defined(PENSTOCK_TILES)
namespace {

class DequantizedBlock {
 public:
  explicit DequantizedBlock(const TileBlocks& blocks)
      : codes_per_part(TileBlocks::kSide * blocks.head_dim),
        values(blocks.problem.kv_kind ? 2 * TileBlocks::kParts * codes_per_part : 0),
        is_int8(blocks.problem.kv_kind == kInt8Kv) {
    if (!blocks.problem.kv_kind) return;
    alignas(64) uint8_t bytes[2][128];
    for (int size = 0; size < 128; ++size) {
      uint32_t bits;
      const float value = is_int8 ? float(size) : Fp8Kv::decode(Words{} + size)[0] * Fp8Kv::kDecodeScale;
      std::memcpy(&bits, &value, sizeof(bits));
      bytes[0][size] = uint8_t(bits >> 16), bytes[1][size] = uint8_t(bits >> 24);
    }
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_load_si512(bytes[0] + 64 * half);
      high[half] = _mm512_load_si512(bytes[1] + 64 * half);
    }
  }

  // Decode the block's keys or values to bf16 and collect their scales; both are valid until the next block is decoded.
  // Scales of keys from the `num_keys`th on are 0, because unwritten slots may hold NaN.
  void decode_keys(TileBlocks::Place& place, int num_keys) { decode(0, place.keys, place.key_scales, num_keys); }
  void decode_values(TileBlocks::Place& place, int num_keys) { decode(1, place.values, place.value_scales, num_keys); }

 private:
  const int codes_per_part;
  Lines<uint16_t> values;  // [keys, values][part][16][H]
  alignas(64) float scales[2][kBlock];  // of keys, of values
  const bool is_int8;
  __m512i low[2], high[2];  // the two bytes in bf16 of each magnitude, which is a code without its sign

  void decode(int which, const uint16_t** parts, const float** part_scales, int num_keys) {
    uint16_t* to = values.data() + which * TileBlocks::kParts * codes_per_part;
    float* to_scales = scales[which];
    for (int part = 0; part < TileBlocks::kParts; ++part, num_keys -= TileBlocks::kSide) {
      const __mmask16 seen = num_keys >= TileBlocks::kSide ? 0xffff : num_keys > 0 ? (1 << num_keys) - 1 : 0;
      _mm512_store_ps(to_scales, _mm512_maskz_loadu_ps(seen, part_scales[part]));
      part_scales[part] = to_scales;
      to_scales += TileBlocks::kSide;
      if (!seen) {
        parts[part] = parts[part - 1];
        continue;
      }
      if (is_int8) decode_part<true>(to, parts[part]);
      else decode_part<false>(to, parts[part]);
      parts[part] = to;
      to += codes_per_part;
    }
    TileBlocks::compiler_barrier();
  }

  template <bool kIsInt8> void decode_part(uint16_t* to, const void* codes) const {
    const __m512i sign = _mm512_set1_epi8(char(0x80)), order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const uint8_t* from = static_cast<const uint8_t*>(codes);
    for (int i = 0; i < codes_per_part; i += 64) {
      const __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i));
      const __m512i size = kIsInt8 ? _mm512_abs_epi8(code) : code;
      const __m512i lower = _mm512_permutex2var_epi8(low[0], size, low[1]);
      const __m512i upper =
          _mm512_ternarylogic_epi32(_mm512_permutex2var_epi8(high[0], size, high[1]), code, sign, 0xf8);  // a | (b & c)
      _mm512_store_si512(to + i, _mm512_unpacklo_epi8(lower, upper));
      _mm512_store_si512(to + i + 32, _mm512_unpackhi_epi8(lower, upper));
    }
  }
};

}  // namespace
#endif
