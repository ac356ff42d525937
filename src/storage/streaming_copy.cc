#include "storage/streaming_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace shardsmith {
namespace {

#ifdef __SSE2__

constexpr size_t kVector = sizeof(__m128i), kLine = 64, kPage = 4096;
constexpr size_t kPages = 4;  // in turn, a line of each: memory has that many rows open anyway

void copy_line(std::byte* to, const std::byte* from) {
  _mm_prefetch(from + 2 * kLine, _MM_HINT_T0);
  __m128i held[kLine / kVector];
  for (size_t i = 0; i < kLine / kVector; ++i)
    held[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i * kVector));
  for (size_t i = 0; i < kLine / kVector; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to + i * kVector), held[i]);
}

#endif

}  // namespace

void streaming_copy(std::byte* to, const std::byte* from, size_t size) {
#ifdef __SSE2__
  const size_t head = std::min(size, (kVector - reinterpret_cast<uintptr_t>(to) % kVector) % kVector);
  std::memcpy(to, from, head);
  size_t at = head;
  for (; size - at >= kPages * kPage; at += kPages * kPage)
    for (size_t line = 0; line < kPage; line += kLine)
      for (size_t page = 0; page < kPages; ++page)
        copy_line(to + at + page * kPage + line, from + at + page * kPage + line);
  _mm_sfence();  // other threads see these stores in no order otherwise
  std::memcpy(to + at, from + at, size - at);
#else
  std::memcpy(to, from, size);
#endif
}

}  // namespace shardsmith
