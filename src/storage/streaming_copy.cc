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

constexpr size_t kVector = sizeof(__m128i), kLine = 64;
constexpr size_t kAhead = 32 * kLine;  // the source's, as the processor's own prefetching ends with a page

void copy_line(std::byte* to, const std::byte* from) {
  _mm_prefetch(from + kAhead, _MM_HINT_NTA);
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
  for (; size - at >= kLine; at += kLine) copy_line(to + at, from + at);
  _mm_sfence();  // other threads see these stores in no order otherwise
  std::memcpy(to + at, from + at, size - at);
#else
  std::memcpy(to, from, size);
#endif
}

}  // namespace shardsmith
