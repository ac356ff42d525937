#include "base/peers.h"

#include <condition_variable>
#include <map>
#include <mutex>
#include <optional>

#include "base/error.h"

namespace shardsmith {
namespace {

// One exchange: filled by each rank, freed by the last one that has read it.
struct Round {
  std::vector<std::optional<std::string>> messages;
  int arrived = 0;
  int left = 0;
};

struct Meeting {
  explicit Meeting(int size) : gone(size, false) {}
  std::mutex mutex;
  std::condition_variable changed;
  std::map<uint64_t, Round> rounds;
  std::vector<bool> gone;  // whose Peers object was destroyed: its thread has ended
};

class ThreadPeers final : public Peers {
 public:
  ThreadPeers(std::shared_ptr<Meeting> meeting, int rank) : meeting_(std::move(meeting)), rank_(rank) {}
  ~ThreadPeers() override {
    std::lock_guard lock(meeting_->mutex);
    meeting_->gone[rank_] = true;
    meeting_->changed.notify_all();
  }

  int rank() const override { return rank_; }
  int size() const override { return static_cast<int>(meeting_->gone.size()); }

  std::vector<std::string> exchange(const std::string& message, std::chrono::milliseconds deadline) override {
    const auto until = std::chrono::steady_clock::now() + deadline;
    std::unique_lock lock(meeting_->mutex);
    const uint64_t number = next_++;
    Round& round = meeting_->rounds[number];
    round.messages.resize(size());
    round.messages[rank_] = message;
    if (++round.arrived == size()) meeting_->changed.notify_all();
    while (round.arrived < size()) {
      if (const std::string dead = absent(round, true); !dead.empty())
        fail(ErrorKind::kPeer, "rank ", dead, " ended before exchange ", number);
      if (meeting_->changed.wait_until(lock, until) == std::cv_status::timeout && round.arrived < size())
        fail(ErrorKind::kTimeout, "no answer from rank ", absent(round, false), " within ", deadline.count(), " ms");
    }
    std::vector<std::string> all;
    for (const auto& m : round.messages) all.push_back(*m);
    if (++round.left == size()) meeting_->rounds.erase(number);
    return all;
  }

 private:
  // "1, 3": the ranks that have not come (and never will, if `only_gone`).
  std::string absent(const Round& round, bool only_gone) const {
    std::string names;
    for (int r = 0; r < size(); ++r) {
      if (round.messages[r] || (only_gone && !meeting_->gone[r])) continue;
      names += (names.empty() ? "" : ", ") + std::to_string(r);
    }
    return names;
  }

  std::shared_ptr<Meeting> meeting_;
  int rank_;
  uint64_t next_ = 0;
};

}  // namespace

std::vector<std::unique_ptr<Peers>> make_thread_peers(int size) {
  auto meeting = std::make_shared<Meeting>(size);
  std::vector<std::unique_ptr<Peers>> peers;
  for (int rank = 0; rank < size; ++rank) peers.push_back(std::make_unique<ThreadPeers>(meeting, rank));
  return peers;
}

}  // namespace shardsmith
