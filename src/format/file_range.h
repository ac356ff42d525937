// A range of a file that is read as if it were a file of its own: an item of a DCP data file is a whole torch.save
// archive.
#pragma once

#include <string>

#include "storage/storage.h"

namespace shardsmith {

// `file` must outlive this and hold [offset, offset + length). `name` stands for it in errors. Its first and last bytes
// are read once and kept, as a small archive's directory, headers and pickle lie there: two reads serve them all.
// Used by one thread.
class FileRange final : public ReadFile {
 public:
  FileRange(ReadFile& file, uint64_t offset, uint64_t length, std::string name);
  uint64_t size() const override { return length_; }
  void read(uint64_t offset, std::span<std::byte> out) override;
  const std::string& path() const override { return name_; }

 private:
  struct Kept {
    uint64_t offset = 0;
    std::string bytes;
  };
  void keep(Kept& kept, uint64_t from, uint64_t count);

  ReadFile& file_;
  uint64_t offset_, length_;
  std::string name_;
  Kept head_, tail_;
};

}  // namespace shardsmith
