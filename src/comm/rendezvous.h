// Ranks as threads of one process: messages and sums over byte spans. No torch header, so that every line can run
// under ThreadSanitizer. All functions may be called from any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "base/error.h"

namespace shardsmith {

class Rendezvous {
 public:
  using Deadline = std::chrono::steady_clock::time_point;
  explicit Rendezvous(int size)
      : size_(size),
        arrived_(static_cast<size_t>(size)),
        came_(static_cast<size_t>(size)),
        failed_(static_cast<size_t>(size)) {}

  // Copies the bytes; returns at once.
  void send(int from, int to, uint64_t tag, std::span<const std::byte> bytes);
  // Waits for the message and fills `out`. Throws Error(kTimeout) that names `from`, Error(kPeer) if it has failed,
  // Error(kInvalidArgument) if the sizes differ.
  void receive(int from, int to, uint64_t tag, std::span<std::byte> out, Deadline deadline);
  // Every rank gives as many bytes; `combine` is called on one thread with all of them in rank order, in place, and
  // what it leaves in each span is what that rank gets. Throws Error(kTimeout) that names absent ranks, Error(kPeer) if
  // some rank has failed, and on every rank Error(kInvalidArgument) that names two ranks whose sizes differ, or what
  // `combine` throws (an Error's kind and text, any other exception's text as kPeer). Afterwards the next collective is
  // as good as the first.
  void collective(int rank, std::span<std::byte> bytes,
                  const std::function<void(std::vector<std::span<std::byte>>&)>& combine, Deadline deadline);
  // From now on whoever waits for `rank` gets Error(kPeer) with this text.
  void fail_rank(int rank, const std::string& text);

 private:
  using Key = std::tuple<int, int, uint64_t>;
  struct Outcome {
    bool failed = false;
    ErrorKind kind = ErrorKind::kPeer;
    std::string text;
    int rank = -1;
  };
  std::string unequal() const;  // text where the arrived sizes differ; holds mutex_

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Key, std::vector<std::vector<std::byte>>> boxes_;
  std::vector<std::span<std::byte>> arrived_;
  std::vector<bool> came_;           // since somebody waits: those that wait, and those that have given up
  std::vector<std::string> failed_;  // text, empty while well
  Outcome outcome_;                  // of the last round; nobody ends the next one before all have read it
  int waiting_ = 0;
  uint64_t round_ = 0;
};

}  // namespace shardsmith
