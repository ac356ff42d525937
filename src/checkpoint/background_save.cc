#include "checkpoint/background_save.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/error.h"
#include "checkpoint/outcome.h"

namespace shardsmith {
namespace {

// Behind the threads that train: they are what somebody waits for.
constexpr int kNiceness = 10;

std::vector<PtContent*> contents_of(SaveRequest& request) {
  std::vector<PtContent*> contents;
  for (SaveFile& file : request.files) contents.push_back(&file.content);
  return contents;
}

std::vector<PtContent*> contents_of(FullRequest& request) {
  std::vector<PtContent*> contents;
  for (std::optional<PtContent>* content : {&request.weights, &request.optimizer, &request.user_content})
    if (*content) contents.push_back(&**content);
  return contents;
}

template <typename Request>
uint64_t bytes_for(const Request& request) {
  const std::vector<PtContent*> contents = contents_of(const_cast<Request&>(request));
  return snapshot_bytes({contents.begin(), contents.end()});
}

}  // namespace

BackgroundSave::BackgroundSave(Storage& storage, std::unique_ptr<Peers> peers, std::unique_ptr<Transport> transport)
    : storage_(storage), peers_(std::move(peers)), transport_(std::move(transport)) {}

BackgroundSave::~BackgroundSave() { stop(); }

uint64_t BackgroundSave::memory_for(const SaveRequest& request) { return bytes_for(request); }
uint64_t BackgroundSave::memory_for(const FullRequest& request) { return bytes_for(request); }

bool BackgroundSave::begin(Peers& foreground, SaveRequest request, IfBusy if_busy, const std::function<void()>& check) {
  if (!may_begin(foreground, request.deadline, if_busy)) return false;
  copy(foreground, request.deadline, contents_of(request), check);
  start([this, request = std::move(request)] { return save_partial(storage_, *peers_, request); });
  return true;
}

bool BackgroundSave::begin(Peers& foreground, FullRequest request, IfBusy if_busy, const std::function<void()>& check) {
  if (!may_begin(foreground, request.deadline, if_busy)) return false;
  copy(foreground, request.deadline, contents_of(request), check);
  start([this, request = std::move(request)] { return save_full(storage_, *peers_, transport_.get(), request); });
  return true;
}

// One rank may be through with the save before while another is not: whether to begin is decided by all together.
bool BackgroundSave::may_begin(Peers& foreground, std::chrono::milliseconds deadline, IfBusy if_busy) {
  std::exception_ptr failure;
  const std::vector<Value> states = all_do(foreground, deadline, [&]() -> Value {
    std::unique_lock lock(mutex_);
    if (stop_) fail(ErrorKind::kInvalidArgument, "saving in the background was closed");
    if (if_busy == IfBusy::kWait) changed_.wait(lock, [&] { return !job_; });
    Value state;
    state.set("if_busy", if_busy == IfBusy::kWait ? "wait" : "skip");
    state.set("busy", static_cast<bool>(job_));
    return state;
  });
  bool any_busy = false;
  for (size_t rank = 0; rank < states.size(); ++rank) {
    if (*states[rank].find("if_busy") != *states[0].find("if_busy"))
      throw Error(ErrorKind::kInvalidArgument,
                  str("rank ", rank, " saves with if_busy ", to_json(*states[rank].find("if_busy")),
                      " but rank 0 with ", to_json(*states[0].find("if_busy"))),
                  static_cast<int>(rank));
    any_busy = any_busy || *states[rank].find("busy") == Value(true);
  }
  if (any_busy) return false;
  // No thread runs now, on any rank.
  {
    std::lock_guard lock(mutex_);
    failure = std::exchange(failure_, nullptr);
    result_.reset();
  }
  all_do(foreground, deadline, [&]() -> Value {
    if (failure) std::rethrow_exception(failure);
    return None{};
  });
  return true;
}

void BackgroundSave::copy(Peers& foreground, std::chrono::milliseconds deadline,
                          const std::vector<PtContent*>& contents, const std::function<void()>& check) {
  all_do(foreground, deadline, [&]() -> Value {
    take_snapshot(contents, buffer_);
    if (check) check();
    return None{};
  });
}

void BackgroundSave::start(std::function<SaveResult()> job) {
  std::lock_guard lock(mutex_);
  job_ = std::move(job);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  changed_.notify_all();
}

void BackgroundSave::run() {
  ::setpriority(PRIO_PROCESS, static_cast<id_t>(::syscall(SYS_gettid)), kNiceness);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return job_ || stop_; });
    if (!job_) return;
    const std::function<SaveResult()>& job = job_;  // nobody else touches it until it is reset here
    lock.unlock();
    std::optional<SaveResult> result;
    std::exception_ptr failure;
    try {
      result = job();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
    job_ = nullptr;
    result_ = std::move(result);
    failure_ = failure;
    changed_.notify_all();
  }
}

std::optional<SaveResult> BackgroundSave::wait() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !job_; });
  if (const std::exception_ptr failure = std::exchange(failure_, nullptr)) std::rethrow_exception(failure);
  return std::exchange(result_, std::nullopt);
}

bool BackgroundSave::is_idle_within(std::chrono::milliseconds time) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return !job_; });
}

std::optional<SaveResult> BackgroundSave::close() {
  stop();
  return wait();
}

void BackgroundSave::stop() noexcept {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace shardsmith
