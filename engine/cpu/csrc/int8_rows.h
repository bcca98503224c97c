// Rows quantized to int8 for a product in integers, each with its own scale: 127 for its largest magnitude. Reference:
// `quantize_rows` of engine/kernels/int8_products.py.
#pragma once

#include "int8_dots.h"
#include "packed_weight.h"
#include "thread_team.h"

namespace linear {

constexpr int kTileQuads = kDepth / kQuad;
constexpr int kInt8RowStride = kTileQuads * kRowWords;        // words of a row's tile: first words of all quads first
constexpr int kInt8TileStride = kSide * kInt8RowStride;       // of a strip's tile
constexpr float kLargestCode = 127.0f, kSmallestRow = 1e-30f;  // below it a row counts as zeros

struct Int8Rows {
  const uint32_t* words;  // [T / 16][I / 32][16][kInt8RowStride]
  const float* scales;    // [T]
  const int32_t* sums;    // [T, groups], of the codes
};

// Quantizes rows while they are rearranged. The memory is kept for the calling thread's next product.
class RowQuantizer {
 public:
  RowQuantizer(const PackedWeight& weight, int count)
      : inputs(weight.inputs), groups(num_groups(weight)), group_inputs(weight.tiles_in_group * kDepth),
        memory(buffers()) {
    const size_t rows = padded(count);
    grow(memory.words, rows * (inputs / kQuad) * kRowWords);
    grow(memory.scales, rows);
    grow(memory.sums, rows * groups);
  }

  // Quantizes `count` rows that lie in strips of bf16.
  Int8Rows run(const uint16_t* strips, int count, int num_threads) {
    thread_team::parallel_for(num_threads, (count + kSide - 1) / kSide, [&](thread_team::Tasks& tasks) {
      for (int strip; tasks.take(strip);)
        for (int row = strip * kSide; row < std::min(count, (strip + 1) * kSide); ++row) quantize(strips, row);
    });
    return {memory.words.data(), memory.scales.data(), memory.sums.data()};
  }

 private:
  struct Buffers {
    Lines<uint32_t> words;
    Lines<float> scales;
    Lines<int32_t> sums;
  };
  typedef int8_t Codes __attribute__((vector_size(kLanes)));

  const int inputs, groups, group_inputs;
  Buffers& memory;

  static Buffers& buffers() {
    static thread_local Buffers* const kept = new Buffers;
    return *kept;
  }
  template <class T> static void grow(Lines<T>& lines, size_t size) {
    if (lines.size() < size) lines.resize(size);
  }

  void quantize(const uint16_t* strips, int row) const {
    Floats most{}, poison{};  // NaN if a value is not finite
    for (int i = 0; i < inputs; i += kLanes) {
      const Floats value = load_floats(strips + place(row, i, inputs), kLanes);
      most = maximum(most, maximum(value, -value));
      poison += value * 0.0f;
    }
    const float top = largest(most);
    memory.scales[row] = top / kLargestCode + sum(poison);
    const float inverse = top >= kSmallestRow ? kLargestCode / top : 0.0f;
    for (int group = 0; group < groups; ++group) {
      Ints total{};
      for (int i = group * group_inputs; i < std::min(inputs, (group + 1) * group_inputs); i += kDepth)
        total += quantize_tile(strips, row, i, inverse);
      int32_t all = 0;
      for (int lane = 0; lane < kLanes; ++lane) all += total[lane];
      memory.sums[int64_t(row) * groups + group] = all;
    }
  }

  // Returns sums of the tile's codes.
  Ints quantize_tile(const uint16_t* strips, int row, int first, float inverse) const {
    alignas(64) int8_t codes[kDepth];
    Ints total{};
    for (int i = 0; i < kDepth; i += kLanes) {
      const Floats value = load_floats(strips + place(row, first + i, inputs), kLanes);
      const Ints code = nearest(value * inverse);
      store(codes + i, __builtin_convertvector(code, Codes));
      total += code;
    }
    const int64_t tile = int64_t(row / kSide) * (inputs / kDepth) + first / kDepth;
    uint32_t* const to = memory.words.data() + tile * kInt8TileStride + row % kSide * kInt8RowStride;
    if (kRowWords == 1) {
      std::memcpy(to, codes, kDepth);
      return total;
    }
    for (int quad = 0; quad < kTileQuads; ++quad) {
      const int8_t* const four = codes + quad * kQuad;
      to[quad * kRowWords] = pair(four[0], four[2]);
      to[quad * kRowWords + kRowWords - 1] = pair(four[1], four[3]);
    }
    return total;
  }

  static uint32_t pair(int8_t low, int8_t high) { return uint16_t(low) | uint32_t(uint16_t(high)) << 16; }
};

}  // namespace linear
