// Copies of what is not going to be read soon.
#pragma once

#include <cstddef>

namespace shardsmith {

// As memcpy, around the caches where the processor can (SSE2): otherwise each line of the destination is read into them
// before it is overwritten, and what they held is lost. Gigabytes in tensors of a few megabytes, with two threads, take
// 0.6 of memcpy's time or less. Line by line: several pages in turn are better on some processors and half as fast on
// others.
void streaming_copy(std::byte* to, const std::byte* from, size_t size);

}  // namespace shardsmith
