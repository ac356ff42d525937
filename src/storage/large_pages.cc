#include "storage/large_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace shardsmith {

void prefer_large_pages(std::span<std::byte> memory) {
  constexpr uintptr_t kLarge = 2 << 20;
  const auto begin = (reinterpret_cast<uintptr_t>(memory.data()) + kLarge - 1) / kLarge * kLarge;
  const auto end = (reinterpret_cast<uintptr_t>(memory.data()) + memory.size()) / kLarge * kLarge;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace shardsmith
