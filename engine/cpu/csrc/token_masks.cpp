// Sets the logits of tokens that a mask forbids to minus infinity. Reference: `mask_on_host` in
// engine/sampling/grammar/masks.py.
#include <algorithm>
#include <cstdint>
#include <limits>

// Row `rows[i]` of the logits, which lie `stride` floats apart, obeys mask i: `num_words` words, a bit for each token,
// the lowest bit first. A mask has at least as many bits as a row has tokens.
extern "C" void penstock_mask_rows(float* logits, const int64_t* rows, const uint32_t* words, int64_t stride,
                                   int32_t num_rows, int32_t num_words, int32_t vocab_size) {
  constexpr float kBanned = -std::numeric_limits<float>::infinity();
  for (int i = 0; i < num_rows; ++i) {
    float* row = logits + rows[i] * stride;
    const uint32_t* mask = words + int64_t(i) * num_words;
    for (int first = 0; first < vocab_size; first += 32) {
      const uint32_t word = mask[first / 32];
      const int count = std::min(32, vocab_size - first);
      if (word == 0) {  // most words of most masks
        std::fill_n(row + first, count, kBanned);
      } else if (word != ~uint32_t{0}) {
        for (int bit = 0; bit < count; ++bit) row[first + bit] = word >> bit & 1 ? row[first + bit] : kBanned;
      }
    }
  }
}
