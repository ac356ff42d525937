// What the writers of .pt files and of DCP's data files share: a torch.save archive, laid out before it is written.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "format/pt.h"
#include "format/stream_writer.h"
#include "format/zip.h"

namespace shardsmith {

// kInvalidArgument, naming the tensor, unless it lies inside of its storage, and its box inside of the whole tensor.
void check_pt_tensor(const PtContent& content, size_t number, const std::string& path);

// `text` must stay where it is.
inline ByteSource bytes_of(std::string_view text) {
  return {text.size(), reinterpret_cast<const std::byte*>(text.data()), {}};
}

// data.pkl, byteorder, data/0 ... data/N, version, and whatever is added; then the directory. Records of 64 KiB and
// more begin at multiples of 4096, counted from the archive's start.
class TorchZip {
 public:
  explicit TorchZip(std::string_view pickle);  // must stay where it is
  void add_storage(const ByteSource& source);  // data/0, data/1, ...
  void add_version();                          // after the storages
  void add(const std::string& name, const ByteSource& source, uint64_t alignment);

  size_t records() const { return sources_.size(); }
  uint64_t end() const { return layout_.end(); }  // of the records so far
  uint64_t size() const;                          // of the whole archive
  const ZipLayout& layout() const { return layout_; }
  const ByteSource& source(size_t record) const { return sources_[record]; }
  // Appends it; `before` is called before each record.
  void write(StreamWriter& out, const std::function<void(size_t record)>& before = {}) const;

 private:
  ZipLayout layout_;
  std::vector<ByteSource> sources_;
  size_t storages_ = 0;
};

}  // namespace shardsmith
