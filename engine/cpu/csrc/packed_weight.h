// The layout of packed weights and rows, shared by the products with every kind of weight.
//
// A weight [O, I] is packed as panels of 16 outputs, each a run of tiles of 32 inputs: [O / 16][I / 32][16][16][2] in
// bf16, where two inputs are one word, and [O / 16][I / 32][32][16] in float32. Rows are packed as strips of 16, each a
// run of tiles too: [T / 16][I / 32][16][32]. Both are read sequentially, which suits memory best.
#pragma once

#include <algorithm>
#include <cstdint>

namespace linear {

constexpr int kSide = 16;    // outputs of a panel, rows of a strip
constexpr int kDepth = 32;   // inputs of a tile
constexpr int kTile = kSide * kDepth;
constexpr int kBlock = 2 * kSide;  // rows and outputs that are computed at once
constexpr int kMaxInputsInCache = 384 * 1024;  // of L2's 1024 * 1024 values; the rest is for panels and outputs

// By kInt8ByInt8 and kInt4ByInt8 rows are quantized to int8. Rows are float32 with kFloat32 and bf16 with all others.
enum Kind { kPlain, kInt4, kInt8, kFp8, kInt8ByInt8, kInt4ByInt8, kFloat32 };

struct PackedWeight {
  const void* values;  // bf16 or float32; null for a quantized weight
  const void* bias;    // of the dtype of the rows, or null
  int32_t inputs, outputs;
  const uint8_t* codes;  // in the same tiles, laid out as code_values.h or int8_linear.h describes
  const float* scales;   // [O / 16][groups][16]
  const float* zeros;    // the same, or null: weights are (value of the code - zero) * scale
  int32_t kind, tiles_in_group;
};

inline int num_groups(const PackedWeight& weight) {
  return (weight.inputs / kDepth + weight.tiles_in_group - 1) / weight.tiles_in_group;
}

inline int64_t padded(int64_t rows) { return (rows + kBlock - 1) / kBlock * kBlock; }

// Returns the offset, among strips of tiles, of 16 values of a row from input `i` on.
inline int64_t place(int64_t row, int i, int inputs) {
  return (row / kSide * (inputs / kDepth) + i / kDepth) * kTile + row % kSide * kDepth + i % kDepth;
}

}  // namespace linear
