// base/peers.h over c10d's store, and who is to blame when a step breaks off.
#pragma once

#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/peers.h"

namespace shardsmith {

// `name` separates independent users of one store. One thread a rank calls exchange(); fail() and explain() may be
// called from any thread.
class StorePeers final : public Peers {
 public:
  StorePeers(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name);
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> exchange(const std::string& message, std::chrono::milliseconds deadline) override;

  // Says that this rank has failed by itself, and why. Never throws.
  void fail(const std::string& text) noexcept;
  // After a communication error or a time-out: a group knows an address at most, so the ranks tell each other. Waits
  // up to `grace` for all to speak; returns a line that names the rank at fault: one that failed by itself, else those
  // that say nothing (dead or stalled).
  std::string explain(const std::string& text, std::chrono::milliseconds grace) noexcept;

 private:
  std::string key(const char* kind, int rank) const;
  // The text under which a rank has failed, "" while it hasn't.
  std::string failure(int rank);

  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_;
  std::string name_;
  uint64_t sequence_ = 0;
};

// Runs work that other ranks take part in. What it throws is everybody's: a failure of this rank's own is told to the
// others and passed on; after a communication error (kPeer, kTimeout), which blames at most a neighbour, Error(kPeer)
// is thrown with what explain() says, within `grace`. That must be longer than a rank waits for another, so that those
// who wait for somebody who waits still speak in time.
void guarded(StorePeers& peers, std::chrono::milliseconds grace, const std::function<void()>& work);

}  // namespace shardsmith
