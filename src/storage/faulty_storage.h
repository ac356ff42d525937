// A storage that fails on purpose. Wraps another one and counts every call that changes
// something (create, write, truncate, sync, rename, exchange, remove, mkdir, sync_directory).
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "storage/storage.h"

namespace shardsmith {

struct Fault {
  enum class Kind {
    kNone,
    kKill,        // the process ends at once (_exit(137)) before call number `at`
    kKillHalf,    // a write puts half of its bytes down, then the process ends
    kNoSpace,     // ENOSPC from call `at` on (writes put half their bytes down first)
    kIoError,     // EIO at call `at`
    kShortRead,   // a read returns too little (reads are counted on their own)
    kReadError,   // EIO at read number `at`
    kSyncFails,   // the first sync at or after call `at` fails with EIO
    kNoExchange,  // exchange() says that it can't, all else works
  };
  Kind kind = Kind::kNone;
  int64_t at = -1;
};

// `base` must outlive the result. Thread-safe as `base` is.
class FaultyStorage final : public Storage {
 public:
  explicit FaultyStorage(Storage& base, Fault fault = {});
  int64_t calls() const;  // changing calls so far
  // "write", "rename", ...: the names of the calls so far, in order.
  std::vector<std::string> log() const;

  std::unique_ptr<ReadFile> open_read(const std::string& path, Access access) override;
  std::unique_ptr<WriteFile> create(const std::string& path, Access access, uint64_t size_hint) override;
  std::unique_ptr<WriteFile> open_write(const std::string& path, Access access) override;
  Stat stat(const std::string& path) override;
  std::string read_link(const std::string& path) override;
  std::vector<std::string> list(const std::string& directory) override;
  void make_directory(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  bool exchange(const std::string& a, const std::string& b) override;
  void remove_file(const std::string& path) override;
  void remove_directory(const std::string& path) override;
  void sync_directory(const std::string& path) override;
  uint64_t free_bytes(const std::string& path) override;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace shardsmith
