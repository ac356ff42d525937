// Where bytes live. A Storage is a small file system; LocalStorage is the machine's own,
// FaultyStorage wraps another one and fails, or ends the process, at a chosen call.
//
// Paths are plain strings; relative ones count from the process's working directory.
// All errors are Error(kIo) (kNotFound where a path is not there) that name the path and errno's text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace shardsmith {

// Page-aligned memory for direct I/O, allocated once and reused. Owner: whoever made it.
class AlignedBuffer {
 public:
  explicit AlignedBuffer(size_t size);
  ~AlignedBuffer();
  AlignedBuffer(AlignedBuffer&&) noexcept;
  AlignedBuffer& operator=(AlignedBuffer&&) noexcept;
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

// Reads may come from any thread, at once.
class ReadFile {
 public:
  virtual ~ReadFile() = default;
  virtual uint64_t size() const = 0;
  // Fills all of `out` or throws (kCorrupt with "truncated" where the file ends before).
  // Goes around the page cache where offset, length and address are multiples of 4096 and the
  // file was opened for direct reading.
  virtual void read(uint64_t offset, std::span<std::byte> out) = 0;
  virtual const std::string& path() const = 0;
};

// Writes to disjoint ranges may come from any thread, at once.
class WriteFile {
 public:
  virtual ~WriteFile() = default;
  virtual void write(uint64_t offset, std::span<const std::byte> bytes) = 0;
  virtual void truncate(uint64_t size) = 0;
  virtual void sync() = 0;   // durable when it returns
  virtual void close() = 0;  // errors of closing are thrown here; the destructor closes in silence
  virtual const std::string& path() const = 0;
};

enum class Access { kBuffered, kDirect };  // kDirect falls back to buffered where the file system has none

struct Stat {
  bool exists = false, is_directory = false, is_link = false;
  uint64_t size = 0;
};

// Thread rule: calls may come from any thread.
class Storage {
 public:
  virtual ~Storage() = default;
  virtual std::unique_ptr<ReadFile> open_read(const std::string& path, Access access = Access::kBuffered) = 0;
  // Creates or truncates; mode 0666 & ~umask. `size_hint` > 0 preallocates, so that a full disk is
  // found out before anything is written.
  virtual std::unique_ptr<WriteFile> create(const std::string& path, Access access = Access::kBuffered,
                                            uint64_t size_hint = 0) = 0;
  // A file that is there, to write into: nothing is truncated. Several may have it open, for disjoint ranges.
  virtual std::unique_ptr<WriteFile> open_write(const std::string& path, Access access = Access::kBuffered) = 0;
  virtual Stat stat(const std::string& path) = 0;  // follows no link; a missing path is not an error
  // What a link says, as it stands in it; "" where there are no links.
  virtual std::string read_link(const std::string& /*path*/) { return ""; }
  virtual std::vector<std::string> list(const std::string& directory) = 0;  // names, sorted; no "." and ".."
  virtual void make_directory(const std::string& path) = 0;  // parents too; an existing directory is success
  virtual void rename(const std::string& from, const std::string& to) = 0;  // replaces a file atomically
  // Swaps two paths atomically; false where the file system can't (nothing has happened then).
  virtual bool exchange(const std::string& a, const std::string& b) = 0;
  virtual void remove_file(const std::string& path) = 0;       // already gone is success
  virtual void remove_directory(const std::string& path) = 0;  // an empty one; already gone is success
  virtual void sync_directory(const std::string& path) = 0;
  // Whether processes on several machines may write disjoint ranges of one file at once.
  virtual bool is_shared_by_hosts() const { return false; }
  virtual uint64_t free_bytes(const std::string& path) = 0;
};

// Removes a directory and all below it, deepest first, never following links. Already gone is success.
void remove_tree(Storage& storage, const std::string& path);
// The whole of a small file; throws kCorrupt if it is larger than `limit`.
std::string read_text(Storage& storage, const std::string& path, uint64_t limit = 64 << 20);
// Appears whole or not at all: temporary beside it, fsync, rename, fsync of the directory.
void write_text_atomic(Storage& storage, const std::string& path, const std::string& text);
// a + "/" + b, and the last element, and what is before it.
std::string join(const std::string& a, const std::string& b);
std::string base_name(const std::string& path);
std::string parent(const std::string& path);

Storage& local_storage();  // the machine's file system; lives for ever

}  // namespace shardsmith
