// Blocks of quantized pages for attention on AMX tiles: codes become bf16 in L1, which has all of their values exactly, and
// are read from there as plain pages are read where they stand. A key's scale goes into its scores, a value's into its
// weights, so that nothing is rounded on the way.
#pragma once

#include "attention_blocks.h"

#if defined(PENSTOCK_TILES)
namespace {

class CodedBlock {
 public:
  explicit CodedBlock(const TileBlocks& blocks)
      : codes_of_part(TileBlocks::kSide * blocks.head_dim),
        values(blocks.problem.codes ? 2 * TileBlocks::kParts * codes_of_part : 0), is_int8(blocks.problem.codes == kInt8Kv) {
    if (!blocks.problem.codes) return;
    alignas(64) uint8_t bytes[2][128];
    for (int size = 0; size < 128; ++size) {
      uint32_t bits;
      const float value = is_int8 ? float(size) : Fp8Codes::decode(Words{} + size)[0] * Fp8Codes::kDecodedBy;
      std::memcpy(&bits, &value, sizeof(bits));
      bytes[0][size] = uint8_t(bits >> 16), bytes[1][size] = uint8_t(bits >> 24);
    }
    for (int half = 0; half < 2; ++half) {
      low[half] = _mm512_load_si512(bytes[0] + 64 * half);
      high[half] = _mm512_load_si512(bytes[1] + 64 * half);
    }
  }

  // The same block as bf16, its scales one behind another; holds until the next one. Scales of keys from the `num_keys`th on are 0: what stands there may
  // be no number.
  TileBlocks::Place decode(const TileBlocks::Place& coded, int num_keys) {
    TileBlocks::Place place;
    for (int part = 0; part < TileBlocks::kParts; ++part, num_keys -= TileBlocks::kSide) {
      const __mmask16 seen = num_keys >= TileBlocks::kSide ? 0xffff : num_keys > 0 ? (1 << num_keys) - 1 : 0;
      const int at = part * TileBlocks::kSide;
      _mm512_store_ps(scales[0] + at, _mm512_maskz_loadu_ps(seen, coded.key_scales[part]));
      _mm512_store_ps(scales[1] + at, _mm512_maskz_loadu_ps(seen, coded.value_scales[part]));
      place.key_scales[part] = scales[0] + at, place.value_scales[part] = scales[1] + at;
      if (!seen) {
        place.keys[part] = place.keys[part - 1], place.values[part] = place.values[part - 1];
        continue;
      }
      uint16_t *const keys = values.data() + 2 * part * codes_of_part, *const weighed = keys + codes_of_part;
      if (is_int8) {
        decode_part<true>(keys, coded.keys[part]);
        decode_part<true>(weighed, coded.values[part]);
      } else {
        decode_part<false>(keys, coded.keys[part]);
        decode_part<false>(weighed, coded.values[part]);
      }
      place.keys[part] = keys, place.values[part] = weighed;
    }
    TileBlocks::finish_writes();
    return place;
  }

 private:
  const int codes_of_part;
  Lines<uint16_t> values;  // [part][keys, values][16][H]
  alignas(64) float scales[2][kBlock];  // of keys, of values
  const bool is_int8;
  __m512i low[2], high[2];  // of each size, which is a code without its sign, the two bytes of its bits in bf16

  template <bool kIsInt8> void decode_part(uint16_t* to, const void* codes) const {
    const __m512i sign = _mm512_set1_epi8(char(0x80)), order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const uint8_t* from = static_cast<const uint8_t*>(codes);
    for (int i = 0; i < codes_of_part; i += 64) {
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
