#include "base/transport.h"

#include <condition_variable>
#include <cstring>
#include <mutex>

#include "base/error.h"

namespace shardsmith {
namespace {

// What lies between two ranks: the sender's bytes until the receiver has copied them.
struct Slot {
  const Outgoing* message = nullptr;
};

struct Hall {
  explicit Hall(int size) : slots(static_cast<size_t>(size) * size), gone(size, false) {}
  Slot& slot(int from, int to) { return slots[static_cast<size_t>(from) * gone.size() + to]; }
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<Slot> slots;
  std::vector<bool> gone;
};

class ThreadTransport final : public Transport {
 public:
  ThreadTransport(std::shared_ptr<Hall> hall, int rank) : hall_(std::move(hall)), rank_(rank) {}
  ~ThreadTransport() override {
    std::lock_guard lock(hall_->mutex);
    hall_->gone[rank_] = true;
    withdraw();
    hall_->changed.notify_all();
  }

  void move(std::span<const Outgoing> out, std::span<const Incoming> in, std::chrono::milliseconds deadline) override {
    const auto until = std::chrono::steady_clock::now() + deadline;
    std::unique_lock lock(hall_->mutex);
    try {
      for (const Outgoing& message : out) hall_->slot(rank_, message.to).message = &message;
      hall_->changed.notify_all();
      for (const Incoming& message : in) {
        Slot& slot = hall_->slot(message.from, rank_);
        wait(lock, until, message.from, [&] { return slot.message != nullptr; });
        if (slot.message->bytes.size() != message.bytes.size())
          fail(ErrorKind::kPeer, "rank ", message.from, " sends ", slot.message->bytes.size(), " bytes, rank ", rank_,
               " expects ", message.bytes.size());
        if (!message.bytes.empty()) std::memcpy(message.bytes.data(), slot.message->bytes.data(), message.bytes.size());
        slot.message = nullptr;
        hall_->changed.notify_all();
      }
      for (const Outgoing& message : out)
        wait(lock, until, message.to, [&] { return hall_->slot(rank_, message.to).message != &message; });
    } catch (...) {
      withdraw();  // the spans are the caller's again
      throw;
    }
  }

 private:
  template <typename Ready>
  void wait(std::unique_lock<std::mutex>& lock, std::chrono::steady_clock::time_point until, int peer, Ready ready) {
    while (!ready()) {
      if (hall_->gone[peer]) fail(ErrorKind::kPeer, "rank ", peer, " ended before it had sent or received all");
      if (hall_->changed.wait_until(lock, until) == std::cv_status::timeout && !ready())
        fail(ErrorKind::kTimeout, "rank ", peer, " did not send or receive in time");
    }
  }
  void withdraw() {
    for (size_t to = 0; to < hall_->gone.size(); ++to) hall_->slot(rank_, static_cast<int>(to)).message = nullptr;
  }

  std::shared_ptr<Hall> hall_;
  int rank_;
};

}  // namespace

std::vector<std::unique_ptr<Transport>> make_thread_transports(int size) {
  auto hall = std::make_shared<Hall>(size);
  std::vector<std::unique_ptr<Transport>> transports;
  for (int rank = 0; rank < size; ++rank) transports.push_back(std::make_unique<ThreadTransport>(hall, rank));
  return transports;
}

}  // namespace shardsmith
