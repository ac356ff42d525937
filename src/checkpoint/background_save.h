// Saving while training goes on: begin() copies, one background thread writes and commits.
//
// What dies when: the snapshot is memory of this process, so a process that dies loses a running save like any other
// (commit.h, full.h: the old state stays). A save that fails leaves its failure here, and the next begin(), wait() or
// close() throws it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "checkpoint/save.h"
#include "checkpoint/save_full.h"
#include "checkpoint/snapshot.h"

namespace shardsmith {

enum class IfBusy { kWait, kSkip };

// begin(), wait() and close() by one thread, the one that trains.
class BackgroundSave {
 public:
  // `peers` and `transport` are the background thread's alone, from construction to close(): the ranks' savings go on
  // there while they exchange other things elsewhere. `transport` may be null (save_full.h).
  BackgroundSave(Storage& storage, std::unique_ptr<Peers> peers, std::unique_ptr<Transport> transport);
  ~BackgroundSave();  // waits for the thread; a failure that nobody has asked for is gone
  BackgroundSave(const BackgroundSave&) = delete;

  // Called by all ranks. Returns when everything is copied: what the request points at may change from then on. False,
  // on all ranks alike, where `if_busy` is kSkip and any rank is still writing. Throws, on all ranks alike, the failure
  // of the save before; that of a copy (nothing is written then); and what `check` throws, which is called when all is
  // copied. `foreground`: this thread's.
  bool begin(Peers& foreground, SaveRequest request, IfBusy if_busy, const std::function<void()>& check = {});
  bool begin(Peers& foreground, FullRequest request, IfBusy if_busy, const std::function<void()>& check = {});

  // Of the last save, nullopt where there was none since the last wait(). Throws its failure, once.
  std::optional<SaveResult> wait();
  // Whether nothing is being written any more, within `time`. Throws nothing.
  bool is_idle_within(std::chrono::milliseconds time);
  // As wait(), and the thread ends: no begin() after that.
  std::optional<SaveResult> close();

  // Bytes of memory that a snapshot takes, and those that are held now, from one save to the next.
  static uint64_t memory_for(const SaveRequest& request);
  static uint64_t memory_for(const FullRequest& request);
  uint64_t memory() const { return buffer_.capacity(); }

 private:
  bool may_begin(Peers& foreground, std::chrono::milliseconds deadline, IfBusy if_busy);
  void copy(Peers& foreground, std::chrono::milliseconds deadline, const std::vector<PtContent*>& contents,
            const std::function<void()>& check);
  void start(std::function<SaveResult()> job);
  void run();
  void stop() noexcept;

  Storage& storage_;
  std::unique_ptr<Peers> peers_;
  std::unique_ptr<Transport> transport_;
  SnapshotBuffer buffer_;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::function<SaveResult()> job_;  // set while one is to be run or running
  bool stop_ = false;
  std::optional<SaveResult> result_;
  std::exception_ptr failure_;
  std::thread thread_;  // starts with the first save
};

}  // namespace shardsmith
