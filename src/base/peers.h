// What a save or a load needs of the other ranks, and nothing more.
//
// Implemented over c10d's store by comm/, over threads and socket pairs by tests, so that the
// whole of save and commit is tested, killed and fault-injected without torch.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace shardsmith {

class Peers {
 public:
  virtual ~Peers() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // Every rank gives a message and gets all of them, in rank order. Called by all ranks in the
  // same order, by one thread a rank. Throws Error(kTimeout) that names the absent ranks when
  // `deadline` passes, and Error(kPeer) when a rank is known to be dead.
  virtual std::vector<std::string> exchange(const std::string& message, std::chrono::milliseconds deadline) = 0;
};

// One process on its own.
class NoPeers final : public Peers {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  std::vector<std::string> exchange(const std::string& message, std::chrono::milliseconds) override {
    return {message};
  }
};

// Ranks as threads of this process, for tests: `make_thread_peers(n)[r]` belongs to thread r.
std::vector<std::unique_ptr<Peers>> make_thread_peers(int size);

}  // namespace shardsmith
