#include "comm/store_peers.h"

#include <algorithm>
#include <thread>

#include "base/error.h"

namespace shardsmith {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Looks again soon at first, then every 20 ms: a round takes about as long as its slowest rank, and an idle rank costs
// the store little.
class Backoff {
 public:
  void wait() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 2, std::chrono::microseconds(20000));
  }

 private:
  std::chrono::microseconds pause_{200};
};

std::string join_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

// torch's messages run over several lines with a C++ stack.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

StorePeers::StorePeers(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::string name)
    : store_(std::move(store)), rank_(rank), size_(size), name_(std::move(name)) {}

std::string StorePeers::key(const char* kind, int rank) const {
  return "shardsmith/" + name_ + "/" + kind + "/" + std::to_string(rank);
}

std::string StorePeers::failure(int rank) {
  const std::string k = key("failed", rank);
  return store_->check({k}) ? store_->get_to_str(k) : std::string();
}

std::vector<std::string> StorePeers::exchange(const std::string& message, milliseconds deadline) {
  const auto end = steady_clock::now() + deadline;
  const std::string round = "exchange/" + std::to_string(sequence_++);
  try {
    store_->set(key(round.c_str(), rank_), message.empty() ? "\n" : "=" + message);
    std::vector<std::string> all(static_cast<size_t>(size_));
    std::vector<int> absent;
    for (int r = 0; r < size_; ++r) absent.push_back(r);
    Backoff backoff;
    while (true) {
      std::erase_if(absent, [&](int r) {
        const std::string k = key(round.c_str(), r);
        if (!store_->check({k})) return false;
        all[static_cast<size_t>(r)] = store_->get_to_str(k).substr(1);
        return true;
      });
      if (absent.empty()) break;
      for (const int r : absent) {
        const std::string text = failure(r);
        if (!text.empty()) throw Error(ErrorKind::kPeer, str("rank ", r, " failed: ", text), r);
      }
      if (steady_clock::now() > end)
        throw Error(ErrorKind::kTimeout,
                    str(join_ranks(absent), " did not answer within ", deadline.count() / 1000.0, " s"), absent[0]);
      backoff.wait();
    }
    // Everybody has begun this round, so everybody has read the last but one.
    if (sequence_ > 2) store_->deleteKey(key(("exchange/" + std::to_string(sequence_ - 3)).c_str(), rank_));
    return all;
  } catch (const Error&) {
    throw;
  } catch (const std::exception&) {
    throw Error(ErrorKind::kPeer, "the store that connects the ranks does not answer: rank 0, or the launcher, is gone",
                0);
  }
}

void StorePeers::fail(const std::string& text) noexcept {
  try {
    store_->set(key("failed", rank_), text.empty() ? "failed" : text);
  } catch (...) {  // the others will notice that we are gone
  }
}

std::string StorePeers::explain(const std::string& text, milliseconds grace) noexcept {
  try {
    store_->set(key("victim", rank_), text.empty() ? "stopped" : text);
    const auto end = steady_clock::now() + grace;
    Backoff backoff;
    while (true) {
      std::vector<int> silent;
      for (int r = 0; r < size_; ++r) {
        const std::string reason = failure(r);
        if (!reason.empty() && r != rank_) return str("rank ", r, " failed: ", reason);
        if (reason.empty() && !store_->check({key("victim", r)})) silent.push_back(r);
      }
      if (silent.empty()) return str("rank ", rank_, ": ", text);
      if (steady_clock::now() > end)
        return str(join_ranks(silent), silent.size() == 1 ? " has died or stalled" : " have died or stalled",
                   ": no answer (rank ", rank_, " was ", text, ")");
      backoff.wait();
    }
  } catch (...) {
    return str("rank 0, or the launcher, has died: the store that connects the ranks does not answer (rank ", rank_,
               " was ", text, ")");
  }
}

void guarded(StorePeers& peers, milliseconds grace, const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kPeer && e.kind() != ErrorKind::kTimeout) {
      peers.fail(e.what());
      throw;
    }
    throw Error(ErrorKind::kPeer, peers.explain(e.what(), grace), peers.rank());
  } catch (const std::exception& e) {
    peers.fail(first_line(e.what()));
    throw;
  }
}

}  // namespace shardsmith
