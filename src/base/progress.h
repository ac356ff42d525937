// Progress is a stream of events; who listens draws bars, writes log lines or JSON.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace shardsmith {

struct ProgressEvent {
  std::string what;  // "read", "write", "verify", ...
  uint64_t done = 0;
  uint64_t total = 0;  // same unit as done; 0 where unknown
  std::string unit;    // "bytes", "steps", "tensors"
};

// Called from the thread that does the work; must be quick and must not throw. Empty = silent.
using Progress = std::function<void(const ProgressEvent&)>;

}  // namespace shardsmith
