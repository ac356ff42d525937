#include "storage/storage.h"

#include <cstdlib>
#include <new>
#include <utility>

#include "base/error.h"
#include "storage/atomic_file.h"

namespace shardsmith {

AlignedBuffer::AlignedBuffer(size_t size) : size_(size) {
  const size_t rounded = (size + 4095) / 4096 * 4096;
  if (rounded < size) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(std::aligned_alloc(4096, rounded == 0 ? 4096 : rounded));
  if (!data_) throw std::bad_alloc();
}

AlignedBuffer::~AlignedBuffer() { std::free(data_); }

AlignedBuffer::AlignedBuffer(AlignedBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

AlignedBuffer& AlignedBuffer::operator=(AlignedBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

void remove_tree(Storage& storage, const std::string& path) {
  const Stat stat = storage.stat(path);
  if (!stat.exists) return;
  if (!stat.is_directory) {
    storage.remove_file(path);
    return;
  }
  std::vector<std::string> names;
  try {
    names = storage.list(path);
  } catch (const Error& e) {
    if (e.kind() == ErrorKind::kNotFound) return;  // someone else has removed it
    throw;
  }
  for (const std::string& name : names) remove_tree(storage, join(path, name));
  storage.remove_directory(path);
}

std::string read_text(Storage& storage, const std::string& path, uint64_t limit) {
  const auto file = storage.open_read(path);
  if (file->size() > limit)
    fail(ErrorKind::kCorrupt, path, ": ", file->size(), " bytes, more than the ", limit, " that are expected at most");
  std::string text(file->size(), '\0');
  file->read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void write_text_atomic(Storage& storage, const std::string& path, const std::string& text) {
  write_file_atomic(storage, path, Access::kBuffered, 0,
                    [&](WriteFile& file) { file.write(0, std::as_bytes(std::span(text))); });
}

std::string join(const std::string& a, const std::string& b) {
  if (a.empty()) return b;
  return a.back() == '/' ? a + b : a + "/" + b;
}

std::string base_name(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path.empty() ? "" : "/";
  const size_t slash = path.find_last_of('/', end);
  return path.substr(slash == std::string::npos ? 0 : slash + 1,
                     end - (slash == std::string::npos ? 0 : slash + 1) + 1);
}

std::string parent(const std::string& path) {
  const size_t end = path.find_last_not_of('/');
  if (end == std::string::npos) return path.empty() ? "." : "/";
  const size_t slash = path.find_last_of('/', end);
  if (slash == std::string::npos) return ".";
  const size_t last = path.find_last_not_of('/', slash);
  return last == std::string::npos ? "/" : path.substr(0, last + 1);
}

}  // namespace shardsmith
