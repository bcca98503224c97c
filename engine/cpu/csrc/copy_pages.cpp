// Copies pages from one pool to another. Reference: `copy_rows` in engine/kernels/page_copy.py.
//
// Stores bypass the cache: a cached store first reads the line that it will overwrite, a third of the traffic, and
// evicts what the engine works on. On one core with pages of 360 KiB this reaches 17 GB/s against memcpy's 14, and 11
// against 7.7 once source and destination are far larger than the cache (2026-11, Sapphire Rapids).
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 4096;  // hardware prefetching stops at the end of a memory page; worth 6 %

#if defined(__AVX512F__)
inline void stream_line(char* to, const char* from) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
}
#elif defined(__x86_64__)
inline void stream_line(char* to, const char* from) {
  for (int64_t at = 0; at < kLine; at += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
}
#endif

void copy(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
  if (reinterpret_cast<uintptr_t>(to) % kLine == 0) {
    const int64_t whole = bytes - bytes % kLine;
    for (int64_t at = 0; at < whole; at += kLine) {
      _mm_prefetch(from + at + kAhead, _MM_HINT_T0);
      stream_line(to + at, from + at);
    }
    to += whole, from += whole, bytes -= whole;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace

// Copies page from_pages[i] of `from` to page to_pages[i] of `to`.
extern "C" void penstock_copy_pages(char* to, const char* from, const int64_t* to_pages, const int64_t* from_pages,
                                    int64_t count, int64_t page_bytes) {
  for (int64_t i = 0; i < count; ++i)
    copy(to + to_pages[i] * page_bytes, from + from_pages[i] * page_bytes, page_bytes);
#if defined(__x86_64__)
  _mm_sfence();  // streamed stores become visible before any later notification of them
#endif
}
