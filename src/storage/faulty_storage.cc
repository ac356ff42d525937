#include "storage/faulty_storage.h"

#include <unistd.h>

#include <mutex>

#include "base/error.h"

namespace shardsmith {

using Kind = Fault::Kind;

struct FaultyStorage::State {
  State(Storage& b, Fault f) : base(b), fault(f) {}

  // Counts a changing call; throws or ends the process where its turn has come. `takes_space`: a full disk refuses
  // it. `half` puts half of a write down.
  void step(const char* name, const std::string& path, bool takes_space, const std::function<void()>& half = {}) {
    std::lock_guard lock(mutex);
    const int64_t number = calls++;
    log.emplace_back(name);
    switch (fault.kind) {
      case Kind::kKill:
        if (number == fault.at) ::_exit(137);
        break;
      case Kind::kKillHalf:
        if (number == fault.at) {
          if (half) half();
          ::_exit(137);
        }
        break;
      case Kind::kNoSpace:
        if (fault.at >= 0 && number >= fault.at && takes_space) {
          if (half) half();
          fail(ErrorKind::kIo, path, ": ", name, " failed: No space left on device (ENOSPC)");
        }
        break;
      case Kind::kIoError:
        if (number == fault.at) fail(ErrorKind::kIo, path, ": ", name, " failed: Input/output error (EIO)");
        break;
      case Kind::kSyncFails:
        if (fault.at >= 0 && number >= fault.at && !sync_failed && log.back().starts_with("sync")) {
          sync_failed = true;
          fail(ErrorKind::kIo, path, ": fsync failed: Input/output error (EIO)");
        }
        break;
      case Kind::kNone:
      case Kind::kShortRead:
      case Kind::kReadError:
      case Kind::kNoExchange:
        break;
    }
  }

  Storage& base;
  Fault fault;
  std::mutex mutex;
  std::vector<std::string> log;
  int64_t calls = 0;
  std::atomic<int64_t> reads{0};
  bool sync_failed = false;
};

namespace {

// `State` is private to FaultyStorage, so these are templates over it.
template <typename State>
class FaultyReadFile final : public ReadFile {
 public:
  FaultyReadFile(std::shared_ptr<State> state, std::unique_ptr<ReadFile> base)
      : state_(std::move(state)), base_(std::move(base)) {}
  uint64_t size() const override { return base_->size(); }
  const std::string& path() const override { return base_->path(); }
  void read(uint64_t offset, std::span<std::byte> out) override {
    const int64_t number = state_->reads.fetch_add(1);
    if (state_->fault.kind == Kind::kShortRead && number == state_->fault.at) {
      base_->read(offset, out.first(out.size() / 2));
      fail(ErrorKind::kCorrupt, path(), ": truncated: ", out.size(), " bytes expected at ", offset, ", ",
           out.size() / 2, " found");
    }
    if (state_->fault.kind == Kind::kReadError && number == state_->fault.at)
      fail(ErrorKind::kIo, path(), ": reading failed at ", offset, ": Input/output error (EIO)");
    base_->read(offset, out);
  }

 private:
  std::shared_ptr<State> state_;
  std::unique_ptr<ReadFile> base_;
};

template <typename State>
class FaultyWriteFile final : public WriteFile {
 public:
  FaultyWriteFile(std::shared_ptr<State> state, std::unique_ptr<WriteFile> base)
      : state_(std::move(state)), base_(std::move(base)) {}
  const std::string& path() const override { return base_->path(); }
  void write(uint64_t offset, std::span<const std::byte> bytes) override {
    state_->step("write", path(), true, [&] { base_->write(offset, bytes.first(bytes.size() / 2)); });
    base_->write(offset, bytes);
  }
  void truncate(uint64_t size) override {
    state_->step("truncate", path(), false);
    base_->truncate(size);
  }
  void sync() override {
    state_->step("sync", path(), false);
    base_->sync();
  }
  void close() override { base_->close(); }

 private:
  std::shared_ptr<State> state_;
  std::unique_ptr<WriteFile> base_;
};

}  // namespace

FaultyStorage::FaultyStorage(Storage& base, Fault fault) : state_(std::make_shared<State>(base, fault)) {}

int64_t FaultyStorage::calls() const {
  std::lock_guard lock(state_->mutex);
  return state_->calls;
}

std::vector<std::string> FaultyStorage::log() const {
  std::lock_guard lock(state_->mutex);
  return state_->log;
}

std::unique_ptr<ReadFile> FaultyStorage::open_read(const std::string& path, Access access) {
  return std::make_unique<FaultyReadFile<State>>(state_, state_->base.open_read(path, access));
}

std::unique_ptr<WriteFile> FaultyStorage::create(const std::string& path, Access access, uint64_t size_hint) {
  state_->step("create", path, true);
  return std::make_unique<FaultyWriteFile<State>>(state_, state_->base.create(path, access, size_hint));
}

std::unique_ptr<WriteFile> FaultyStorage::open_write(const std::string& path, Access access) {
  return std::make_unique<FaultyWriteFile<State>>(state_, state_->base.open_write(path, access));
}

Stat FaultyStorage::stat(const std::string& path) { return state_->base.stat(path); }
std::string FaultyStorage::read_link(const std::string& path) { return state_->base.read_link(path); }

std::vector<std::string> FaultyStorage::list(const std::string& directory) { return state_->base.list(directory); }

void FaultyStorage::make_directory(const std::string& path) {
  state_->step("mkdir", path, true);
  state_->base.make_directory(path);
}

void FaultyStorage::rename(const std::string& from, const std::string& to) {
  state_->step("rename", from, false);
  state_->base.rename(from, to);
}

bool FaultyStorage::exchange(const std::string& a, const std::string& b) {
  state_->step("exchange", a, false);
  if (state_->fault.kind == Kind::kNoExchange) return false;
  return state_->base.exchange(a, b);
}

void FaultyStorage::remove_file(const std::string& path) {
  state_->step("remove", path, false);
  state_->base.remove_file(path);
}

void FaultyStorage::remove_directory(const std::string& path) {
  state_->step("remove", path, false);
  state_->base.remove_directory(path);
}

void FaultyStorage::sync_directory(const std::string& path) {
  state_->step("sync_directory", path, false);
  state_->base.sync_directory(path);
}

uint64_t FaultyStorage::free_bytes(const std::string& path) { return state_->base.free_bytes(path); }

}  // namespace shardsmith
