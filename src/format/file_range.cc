#include "format/file_range.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"

namespace shardsmith {
namespace {

constexpr uint64_t kKept = 4096;

}  // namespace

FileRange::FileRange(ReadFile& file, uint64_t offset, uint64_t length, std::string name)
    : file_(file), offset_(offset), length_(length), name_(std::move(name)) {
  if (offset > file.size() || length > file.size() - offset)
    fail(ErrorKind::kCorrupt, name_, ": truncated: its ", length, " bytes at ", offset, " leave the file of ",
         file.size());
}

void FileRange::keep(Kept& kept, uint64_t from, uint64_t count) {
  kept.offset = from;
  kept.bytes.resize(static_cast<size_t>(count));
  file_.read(offset_ + from, std::as_writable_bytes(std::span(kept.bytes)));
}

void FileRange::read(uint64_t offset, std::span<std::byte> out) {
  if (offset > length_ || out.size() > length_ - offset)
    fail(ErrorKind::kCorrupt, name_, ": truncated: ", out.size(), " bytes at ", offset, " of ", length_);
  if (out.empty()) return;
  const uint64_t piece = std::min(kKept, length_);
  Kept* kept = offset + out.size() <= piece ? &head_ : offset >= length_ - piece ? &tail_ : nullptr;
  if (!kept) return file_.read(offset_ + offset, out);
  if (kept->bytes.empty()) keep(*kept, kept == &head_ ? 0 : length_ - piece, piece);
  std::memcpy(out.data(), kept->bytes.data() + (offset - kept->offset), out.size());
}

}  // namespace shardsmith
