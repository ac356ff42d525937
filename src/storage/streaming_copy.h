// Copies of what is not going to be read soon.
#pragma once

#include <cstddef>

namespace shardsmith {

// As memcpy, around the caches where the processor can (SSE2): otherwise each line of the destination is read into them
// before it is overwritten, and what they held is lost. Of gigabytes in tensors of a few megabytes, with two threads,
// takes 0.6 of memcpy's time.
void streaming_copy(std::byte* to, const std::byte* from, size_t size);

}  // namespace shardsmith
