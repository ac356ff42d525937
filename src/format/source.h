// Where a writer gets a tensor's or a storage's bytes from: memory, or a function that fills them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

namespace shardsmith {

struct ByteSource {
  uint64_t size = 0;
  const std::byte* data = nullptr;  // used if set; must stay valid and unchanged until the write returns
  // Otherwise called with ascending, adjacent ranges, by one thread.
  std::function<void(uint64_t offset, std::span<std::byte> out)> fill;
};

}  // namespace shardsmith
