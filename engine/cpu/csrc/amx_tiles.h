// Products of bf16 matrices on Intel AMX tiles, in the layouts of the vector code. Only on Linux and where
// the library is built for AMX; `available` asks the Linux kernel, which must permit a process to use tiles.
//
// A tile is 16 rows of 16 words. `left` has rows of words; in `right` a row holds one word of each of 16 columns.
#pragma once

#include <cstdint>

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define PENSTOCK_TILES 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tiles {

constexpr int kSide = 16;

#if defined(PENSTOCK_TILES)
inline bool available() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // Linux: arch_prctl(2), <asm/prctl.h>
  static const bool allowed = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return allowed;
}

// Configures tiles 0-3 for results, 4 for left (`rows` rows each) and 5-7 with 16 rows, for the calling thread until
// `release`.
inline void configure(int rows) {
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {};
  } config;
  for (int tile = 0; tile < 5; ++tile) config.rows[tile] = uint8_t(rows);
  for (int tile = 5; tile < 8; ++tile) config.rows[tile] = kSide;
  asm volatile("" : : "m"(config));  // all of it is read, though GCC's intrinsic declares only the first eight bytes
  _tile_loadconfig(&config);
}
inline void release() { _tile_release(); }

// result[:, 16 t : 16 t + 16] (+)= left @ right for t < 4; strides in words, `depth` in tiles.
template <bool kAdd>
inline void multiply_four(
    float* result, int result_stride, const uint32_t* left, int left_stride, const uint32_t* right, int right_stride,
    int depth) {
  if (kAdd) {
    _tile_loadd(0, result, result_stride * 4);
    _tile_loadd(1, result + 16, result_stride * 4);
    _tile_loadd(2, result + 32, result_stride * 4);
    _tile_loadd(3, result + 48, result_stride * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < depth; ++i, left += kSide, right += kSide * right_stride) {
    _tile_loadd(4, left, left_stride * 4);
    _tile_loadd(5, right, right_stride * 4);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, right + 16, right_stride * 4);
    _tile_dpbf16ps(1, 4, 5);
    _tile_loadd(5, right + 32, right_stride * 4);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(5, right + 48, right_stride * 4);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, result, result_stride * 4);
  _tile_stored(1, result + 16, result_stride * 4);
  _tile_stored(2, result + 32, result_stride * 4);
  _tile_stored(3, result + 48, result_stride * 4);
}

// result[:, :16] += left @ right.
inline void multiply_one(
    float* result, int result_stride, const uint32_t* left, int left_stride, const uint32_t* right, int right_stride,
    int depth) {
  _tile_loadd(0, result, result_stride * 4);
  for (int i = 0; i < depth; ++i, left += kSide, right += kSide * right_stride) {
    _tile_loadd(4, left, left_stride * 4);
    _tile_loadd(5, right, right_stride * 4);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, result, result_stride * 4);
}
#else
inline bool available() { return false; }
inline void configure(int) {}
inline void release() {}
template <bool>
inline void multiply_four(float*, int, const uint32_t*, int, const uint32_t*, int, int) {}
inline void multiply_one(float*, int, const uint32_t*, int, const uint32_t*, int, int) {}
#endif

}  // namespace tiles
