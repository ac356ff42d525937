#include "comm/rendezvous.h"

#include <algorithm>

#include "base/error.h"

namespace shardsmith {

void Rendezvous::send(int from, int to, uint64_t tag, std::span<const std::byte> bytes) {
  std::lock_guard lock(mutex_);
  boxes_[{from, to, tag}].emplace_back(bytes.begin(), bytes.end());
  changed_.notify_all();
}

void Rendezvous::receive(int from, int to, uint64_t tag, std::span<std::byte> out, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const Key key{from, to, tag};
  const std::string& failure = failed_[static_cast<size_t>(from)];
  const bool there = changed_.wait_until(lock, deadline, [&] { return boxes_.contains(key) || !failure.empty(); });
  if (!boxes_.contains(key)) {
    if (!there) fail(ErrorKind::kTimeout, "rank ", from, " did not send to rank ", to, " in time");
    throw Error(ErrorKind::kPeer, str("rank ", from, " failed: ", failure), from);
  }
  auto box = boxes_.find(key);
  const std::vector<std::byte> bytes = std::move(box->second.front());
  box->second.erase(box->second.begin());
  if (box->second.empty()) boxes_.erase(box);
  if (bytes.size() != out.size())
    fail(ErrorKind::kInvalidArgument, "rank ", from, " sent ", bytes.size(), " bytes where rank ", to, " expects ",
         out.size());
  std::copy(bytes.begin(), bytes.end(), out.begin());
}

void Rendezvous::collective(int rank, std::span<std::byte> bytes,
                            const std::function<void(std::vector<std::span<std::byte>>&)>& combine, Deadline deadline) {
  std::unique_lock lock(mutex_);
  const uint64_t round = round_;
  came_[static_cast<size_t>(rank)] = true;
  arrived_[static_cast<size_t>(rank)] = bytes.empty() ? std::span(reinterpret_cast<std::byte*>(this), 0) : bytes;
  if (++waiting_ == size_) {
    outcome_ = {};
    try {
      if (const std::string text = unequal(); !text.empty()) fail(ErrorKind::kInvalidArgument, text);
      combine(arrived_);
    } catch (const Error& e) {
      outcome_ = {true, e.kind(), e.what(), e.rank()};
    } catch (const std::exception& e) {
      outcome_ = {true, ErrorKind::kPeer, e.what(), rank};
    }
    std::fill(arrived_.begin(), arrived_.end(), std::span<std::byte>());
    came_.assign(came_.size(), false);
    waiting_ = 0;
    ++round_;
    changed_.notify_all();
    if (outcome_.failed) throw Error(outcome_.kind, outcome_.text, outcome_.rank);
    return;
  }
  const auto failure = [&] {
    return std::find_if(failed_.begin(), failed_.end(), [](const std::string& text) { return !text.empty(); });
  };
  const bool woken = changed_.wait_until(lock, deadline, [&] { return round_ != round || failure() != failed_.end(); });
  if (round_ != round) {
    if (outcome_.failed) throw Error(outcome_.kind, outcome_.text, outcome_.rank);
    return;
  }
  // Leave, so that nobody writes into our bytes any more. Who came and left like us is not late.
  std::string absent;
  for (size_t r = 0; r < came_.size(); ++r)
    if (!came_[r]) absent += (absent.empty() ? "" : ", ") + std::to_string(r);
  arrived_[static_cast<size_t>(rank)] = {};
  if (--waiting_ == 0) came_.assign(came_.size(), false);
  if (!woken)
    fail(ErrorKind::kTimeout, absent.find(',') == std::string::npos ? "rank " : "ranks ", absent,
         " did not join a collective in time");
  const int culprit = static_cast<int>(failure() - failed_.begin());
  throw Error(ErrorKind::kPeer, str("rank ", culprit, " failed: ", *failure()), culprit);
}

std::string Rendezvous::unequal() const {
  for (size_t r = 1; r < arrived_.size(); ++r)
    if (arrived_[r].size() != arrived_[0].size())
      return str("rank ", r, " brings ", arrived_[r].size(), " bytes to a collective, rank 0 brings ",
                 arrived_[0].size(), ": they must have the same shapes");
  return {};
}

void Rendezvous::fail_rank(int rank, const std::string& text) {
  std::lock_guard lock(mutex_);
  failed_[static_cast<size_t>(rank)] = text.empty() ? "failed" : text;
  changed_.notify_all();
}

}  // namespace shardsmith
