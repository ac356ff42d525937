// libFuzzer's entry into the one target that is linked.
#include <cstddef>
#include <cstdint>

#include "support.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  shardsmith::fuzz::targets().at(0).run({reinterpret_cast<const char*>(data), size});
  return 0;
}
