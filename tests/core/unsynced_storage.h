// What tests that kill processes share.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "memory_storage.h"

namespace shardsmith {

// The machine's files without waiting for the disk: a process that dies takes nothing with it that the kernel has.
// (What a power cut takes is tried in memory, below.)
class UnsyncedStorage final : public ForwardingStorage {
 public:
  using ForwardingStorage::ForwardingStorage;
  std::unique_ptr<WriteFile> create(const std::string& path, Access access, uint64_t size) override {
    return std::make_unique<File>(base.create(path, access, size));
  }
  std::unique_ptr<WriteFile> open_write(const std::string& path, Access access) override {
    return std::make_unique<File>(base.open_write(path, access));
  }
  void sync_directory(const std::string&) override {}

 private:
  class File final : public WriteFile {
   public:
    explicit File(std::unique_ptr<WriteFile> base) : base_(std::move(base)) {}
    void write(uint64_t offset, std::span<const std::byte> bytes) override { base_->write(offset, bytes); }
    void truncate(uint64_t size) override { base_->truncate(size); }
    void sync() override {}
    void close() override { base_->close(); }
    const std::string& path() const override { return base_->path(); }

   private:
    std::unique_ptr<WriteFile> base_;
  };
};

inline Storage& unsynced_files() {
  static UnsyncedStorage storage(local_storage());
  return storage;
}

// Runs `work` in a child process that ends with what it returns; its exit code.
inline int in_child_with_code(const std::function<int()>& work) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(work());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

inline int in_child(const std::function<void()>& work) {
  return in_child_with_code([&] {
    work();
    return 0;
  });
}

}  // namespace shardsmith
