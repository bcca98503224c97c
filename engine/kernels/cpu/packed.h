// Packed weights and rows: what products of every kind of weight go by.
//
// A weight [O, I] is packed as panels of 16 outputs, each a run of tiles of 32 inputs: [O / 16][I / 32][16][16][2]; rows
// as strips of 16, each a run of tiles too: [T / 16][I / 32][16][32]. Either is read from front to back, which is what
// memory is best at.
#pragma once

#include <algorithm>
#include <cstdint>

namespace linear {

constexpr int kSide = 16;    // outputs of a panel, rows of a strip
constexpr int kDepth = 32;   // inputs of a tile
constexpr int kTile = kSide * kDepth;
constexpr int kBlock = 2 * kSide;  // rows and outputs that are computed at once
constexpr int kInputsInCache = 384 * 1024;  // of L2's 1024 * 1024 values: panels pass by, and outputs go out

enum Kind { kPlain, kInt4, kInt8, kFp8 };

struct Packed {
  const uint16_t* values;  // of a quantized weight null
  const uint16_t* bias;    // or null
  int32_t inputs, outputs;
  const uint8_t* codes;  // in the same tiles, laid out as codes_linear.h has it
  const float* scales;   // [O / 16][groups][16]
  const float* zeros;    // likewise, or null: weights are (value of the code - zero) * scale
  int32_t kind, tiles_in_group;
};

inline int64_t padded(int64_t rows) { return (rows + kBlock - 1) / kBlock * kBlock; }

// Where 16 values of a row from input `i` on stand among strips of tiles.
inline int64_t place(int64_t row, int i, int inputs) {
  return (row / kSide * (inputs / kDepth) + i / kDepth) * kTile + row % kSide * kDepth + i % kDepth;
}

}  // namespace linear
