// Counts the bytes that are read of the machine's files, by the way in which they were opened. All else ends the test.
#pragma once

#include <atomic>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "storage/storage.h"

namespace shardsmith {

class CountingStorage final : public Storage {
 public:
  std::atomic<uint64_t> direct{0}, buffered{0};

  std::unique_ptr<ReadFile> open_read(const std::string& path, Access access) override {
    return std::make_unique<File>(local_storage().open_read(path, access),
                                  access == Access::kDirect ? direct : buffered);
  }
  std::unique_ptr<WriteFile> create(const std::string&, Access, uint64_t) override { std::abort(); }
  std::unique_ptr<WriteFile> open_write(const std::string&, Access) override { std::abort(); }
  Stat stat(const std::string& path) override { return local_storage().stat(path); }
  std::vector<std::string> list(const std::string&) override { std::abort(); }
  void make_directory(const std::string&) override { std::abort(); }
  void rename(const std::string&, const std::string&) override { std::abort(); }
  bool exchange(const std::string&, const std::string&) override { std::abort(); }
  void remove_file(const std::string&) override { std::abort(); }
  void remove_directory(const std::string&) override { std::abort(); }
  void sync_directory(const std::string&) override { std::abort(); }
  uint64_t free_bytes(const std::string&) override { return 0; }

 private:
  class File final : public ReadFile {
   public:
    File(std::unique_ptr<ReadFile> base, std::atomic<uint64_t>& bytes) : base_(std::move(base)), bytes_(bytes) {}
    uint64_t size() const override { return base_->size(); }
    void read(uint64_t offset, std::span<std::byte> out) override {
      bytes_ += out.size();
      base_->read(offset, out);
    }
    const std::string& path() const override { return base_->path(); }

   private:
    const std::unique_ptr<ReadFile> base_;
    std::atomic<uint64_t>& bytes_;
  };
};

}  // namespace shardsmith
