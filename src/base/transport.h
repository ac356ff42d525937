// Bytes that ranks send each other while they save, where both sides know beforehand who sends how many.
//
// Beside base/peers.h, which tells outcomes and names: this moves tensors' data. Implemented over a process group by
// comm/, over threads by tests.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <vector>

namespace shardsmith {

struct Outgoing {
  int to = 0;
  std::span<const std::byte> bytes;
};
struct Incoming {
  int from = 0;
  std::span<std::byte> bytes;
};

class Transport {
 public:
  virtual ~Transport() = default;
  // Sends and receives all of these, at most one of each for a pair of ranks, and returns when the spans are the
  // caller's again. A pair's messages arrive in the order in which they were sent; who has none in a round need not
  // call. By one thread a rank. Throws Error(kTimeout) when `deadline` passes and Error(kPeer) for a dead rank; both
  // name it. After that no more may be moved.
  virtual void move(std::span<const Outgoing> out, std::span<const Incoming> in,
                    std::chrono::milliseconds deadline) = 0;
};

// Ranks as threads of this process, for tests: `make_thread_transports(n)[r]` belongs to thread r.
std::vector<std::unique_ptr<Transport>> make_thread_transports(int size);

}  // namespace shardsmith
