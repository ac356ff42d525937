#include "storage/streaming_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace shardsmith {
namespace {

TEST(StreamingCopy, CopiesWhatMemcpyWouldAndNothingElse) {
  std::vector<std::byte> from(200'000), to(from.size());
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 2654435761u >> 11);
  for (const size_t size : {0, 1, 15, 16, 63, 64, 4096, 16383, 16384, 16400, 50'001, 150'000})
    for (const size_t a : {0, 1, 7, 16, 33, 4095})
      for (const size_t b : {0, 3, 16, 40, 4096}) {
        std::fill(to.begin(), to.end(), std::byte{0x5a});
        streaming_copy(to.data() + b, from.data() + a, size);
        EXPECT_TRUE(std::equal(from.data() + a, from.data() + a + size, to.data() + b)) << size << ' ' << a << ' ' << b;
        EXPECT_TRUE(std::all_of(to.begin(), to.begin() + static_cast<int64_t>(b),
                                [](std::byte v) { return v == std::byte{0x5a}; }));
        EXPECT_TRUE(std::all_of(to.begin() + static_cast<int64_t>(b + size), to.end(),
                                [](std::byte v) { return v == std::byte{0x5a}; }));
      }
}

}  // namespace
}  // namespace shardsmith
