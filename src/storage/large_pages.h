// Memory in large pages, where the kernel gives them on request: touching gigabytes for the first time costs a fault
// for every 4 KiB otherwise, which takes longer than reading them from a fast disk.
#pragma once

#include <cstddef>
#include <span>

namespace shardsmith {

// Asks for them inside `memory`, in whole large pages, so that no more memory comes to be used than `memory` has. Only
// for memory that is going to be filled from end to end. It is a wish: nothing tells whether it came true.
void prefer_large_pages(std::span<std::byte> memory);

}  // namespace shardsmith
