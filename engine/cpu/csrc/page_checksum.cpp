// Computes one checksum for each of some pages of a pool. Reference, with the definition: `checksum_rows` in
// engine/kernels/checksum_words.py.
//
// A word costs a load that widens it, a 32-bit product and a sum, which compilers turn into vectors; so it is as fast
// as memory, and the table of multipliers stays in the cache.
#include <cstdint>
#include <cstring>

namespace {

constexpr int64_t kBlockWords = 1024;

uint64_t block_sum(const char* words, const uint64_t* multipliers, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t word;
    std::memcpy(&word, words + 4 * i, 4);
    sum += static_cast<uint64_t>(word) * multipliers[i];
  }
  return sum;
}

}  // namespace

// `multipliers` holds 1024 odd numbers below 2^32, `factors` one odd number for each block of 1024 words of a page.
extern "C" void penstock_page_checksums(const char* pool, const int64_t* pages, int64_t count, int64_t page_words,
                                        const uint64_t* multipliers, const uint64_t* factors, uint64_t* checksums) {
  for (int64_t i = 0; i < count; ++i) {
    const char* page = pool + pages[i] * page_words * 4;
    uint64_t sum = 0;
    for (int64_t first = 0, block = 0; first < page_words; first += kBlockWords, ++block) {
      const int64_t left = page_words - first;
      sum += block_sum(page + 4 * first, multipliers, left < kBlockWords ? left : kBlockWords) * factors[block];
    }
    checksums[i] = sum;
  }
}
