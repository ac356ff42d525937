// The machine's own file system.
//
// Direct I/O: a file opened for it has two descriptors. Ranges whose offset, length and address are multiples of
// 4096 go around the page cache through the second; the unaligned head and tail of a range go through the first.
// The two never touch the same page in one call, and the kernel keeps the cache coherent with direct writes.
#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "storage/storage.h"

namespace shardsmith {
namespace {

constexpr uint64_t kPage = 4096;
constexpr size_t kMaxCall = 1 << 30;  // Linux moves at most 0x7ffff000 bytes a call

[[noreturn]] void fail_errno(const std::string& what, const std::string& path, int error) {
  const ErrorKind kind = error == ENOENT || error == ENOTDIR ? ErrorKind::kNotFound : ErrorKind::kIo;
  const char* name = strerrorname_np(error);
  fail(kind, path, ": ", what, " failed: ", std::strerror(error), " (", name ? name : "?", ")");
}

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  explicit operator bool() const { return fd_ >= 0; }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

int retry_open(const std::string& path, int flags, mode_t mode = 0) {
  int fd;
  do {
    fd = ::open(path.c_str(), flags | O_CLOEXEC, mode);
  } while (fd < 0 && errno == EINTR);
  return fd;
}

// How a range splits: [0, head) buffered, [head, head + direct) direct, the rest buffered.
struct Split {
  size_t head = 0, direct = 0;
};

Split split(uint64_t offset, const void* address, size_t length) {
  const uint64_t misalignment = (kPage - offset % kPage) % kPage;
  if (misalignment >= length || (reinterpret_cast<uintptr_t>(address) + misalignment) % kPage != 0) return {length, 0};
  return {static_cast<size_t>(misalignment), static_cast<size_t>((length - misalignment) / kPage * kPage)};
}

class LocalReadFile final : public ReadFile {
 public:
  LocalReadFile(std::string path, Descriptor buffered, Descriptor direct, uint64_t size)
      : path_(std::move(path)), buffered_(std::move(buffered)), direct_(std::move(direct)), size_(size) {}

  uint64_t size() const override { return size_; }
  const std::string& path() const override { return path_; }

  void read(uint64_t offset, std::span<std::byte> out) override {
    if (offset > size_ || out.size() > size_ - offset) truncated(offset, out.size());
    const Split parts = direct_ ? split(offset, out.data(), out.size()) : Split{out.size(), 0};
    read_buffered(offset, out.first(parts.head));
    size_t done = parts.head;
    const size_t end = parts.head + parts.direct;
    while (done < end) {
      const ssize_t n = ::pread(direct_.get(), out.data() + done, std::min(end - done, kMaxCall), offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno != EINVAL) fail_errno("reading", path_, errno);
      // Refused after all, or cut short at an odd place: the page cache serves the rest.
      if (n <= 0 || n % kPage != 0) break;
      done += n;
    }
    read_buffered(offset + done, out.subspan(done));
  }

 private:
  void read_buffered(uint64_t offset, std::span<std::byte> out) {
    size_t done = 0;
    while (done < out.size()) {
      const ssize_t n =
          ::pread(buffered_.get(), out.data() + done, std::min(out.size() - done, kMaxCall), offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_errno("reading", path_, errno);
      if (n == 0) truncated(offset + done, out.size() - done);
      done += n;
    }
  }

  [[noreturn]] void truncated(uint64_t offset, uint64_t length) const {
    fail(ErrorKind::kCorrupt, path_, ": truncated: ", length, " bytes expected at ", offset, ", but the file has ",
         size_);
  }

  std::string path_;
  Descriptor buffered_, direct_;
  uint64_t size_;
};

class LocalWriteFile final : public WriteFile {
 public:
  LocalWriteFile(std::string path, Descriptor buffered, Descriptor direct)
      : path_(std::move(path)), buffered_(std::move(buffered)), direct_(std::move(direct)) {}

  const std::string& path() const override { return path_; }

  void write(uint64_t offset, std::span<const std::byte> bytes) override {
    const Split parts = direct_ ? split(offset, bytes.data(), bytes.size()) : Split{bytes.size(), 0};
    write_buffered(offset, bytes.first(parts.head));
    size_t done = parts.head;
    const size_t end = parts.head + parts.direct;
    while (done < end) {
      const ssize_t n = ::pwrite(direct_.get(), bytes.data() + done, std::min(end - done, kMaxCall), offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0 && errno != EINVAL) fail_errno("writing", path_, errno);
      if (n <= 0 || n % kPage != 0) break;
      done += n;
    }
    write_buffered(offset + done, bytes.subspan(done));
  }

  void truncate(uint64_t size) override {
    if (::ftruncate(buffered_.get(), static_cast<off_t>(size)) != 0) fail_errno("setting the size", path_, errno);
  }

  void sync() override {
    if (::fsync(buffered_.get()) != 0) fail_errno("fsync", path_, errno);
  }

  void close() override {
    direct_ = Descriptor();
    const int fd = buffered_.release();
    if (fd >= 0 && ::close(fd) != 0 && errno != EINTR) fail_errno("closing", path_, errno);
  }

 private:
  void write_buffered(uint64_t offset, std::span<const std::byte> bytes) {
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n =
          ::pwrite(buffered_.get(), bytes.data() + done, std::min(bytes.size() - done, kMaxCall), offset + done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail_errno("writing", path_, errno);
      done += n;
    }
  }

  std::string path_;
  Descriptor buffered_, direct_;
};

class LocalStorage final : public Storage {
 public:
  std::unique_ptr<ReadFile> open_read(const std::string& path, Access access) override {
    Descriptor buffered(retry_open(path, O_RDONLY | O_NONBLOCK));  // a fifo must not make us wait
    if (!buffered) fail_errno("opening", path, errno);
    struct stat info;
    if (::fstat(buffered.get(), &info) != 0) fail_errno("opening", path, errno);
    if (S_ISDIR(info.st_mode)) fail_errno("opening", path, EISDIR);
    if (!S_ISREG(info.st_mode)) fail(ErrorKind::kIo, path, ": not a regular file");
    Descriptor direct;
    if (access == Access::kDirect) direct = Descriptor(retry_open(path, O_RDONLY | O_DIRECT));
    return std::make_unique<LocalReadFile>(path, std::move(buffered), std::move(direct), info.st_size);
  }

  std::unique_ptr<WriteFile> create(const std::string& path, Access access, uint64_t size_hint) override {
    Descriptor buffered(retry_open(path, O_RDWR | O_CREAT | O_TRUNC, 0666));
    if (!buffered) fail_errno("creating", path, errno);
    if (size_hint > 0) preallocate(buffered.get(), path, size_hint);
    Descriptor direct;
    if (access == Access::kDirect) direct = Descriptor(retry_open(path, O_WRONLY | O_DIRECT));
    return std::make_unique<LocalWriteFile>(path, std::move(buffered), std::move(direct));
  }

  std::unique_ptr<WriteFile> open_write(const std::string& path, Access access) override {
    Descriptor buffered(retry_open(path, O_RDWR | O_NONBLOCK | O_NOFOLLOW));
    if (!buffered) fail_errno("opening for writing", path, errno);
    struct stat info;
    if (::fstat(buffered.get(), &info) != 0) fail_errno("opening for writing", path, errno);
    if (!S_ISREG(info.st_mode)) fail(ErrorKind::kIo, path, ": not a regular file");
    Descriptor direct;
    if (access == Access::kDirect) direct = Descriptor(retry_open(path, O_WRONLY | O_DIRECT));
    return std::make_unique<LocalWriteFile>(path, std::move(buffered), std::move(direct));
  }

  Stat stat(const std::string& path) override {
    struct stat info;
    if (::lstat(path.c_str(), &info) != 0) {
      if (errno == ENOENT || errno == ENOTDIR) return {};
      fail_errno("looking at it", path, errno);
    }
    Stat result;
    result.exists = true;
    result.is_directory = S_ISDIR(info.st_mode);
    result.is_link = S_ISLNK(info.st_mode);
    result.size = info.st_size;
    return result;
  }

  std::string read_link(const std::string& path) override {
    std::string target(PATH_MAX, '\0');
    const ssize_t length = ::readlink(path.c_str(), target.data(), target.size());
    if (length < 0) fail_errno("reading the link", path, errno);
    target.resize(static_cast<size_t>(length));
    return target;
  }

  std::vector<std::string> list(const std::string& directory) override {
    DIR* handle = ::opendir(directory.c_str());
    if (!handle) fail_errno("listing", directory, errno);
    std::vector<std::string> names;
    errno = 0;
    while (const dirent* entry = ::readdir(handle)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
      errno = 0;
    }
    const int error = errno;
    ::closedir(handle);
    if (error != 0) fail_errno("listing", directory, error);
    std::sort(names.begin(), names.end());
    return names;
  }

  void make_directory(const std::string& path) override {
    if (path.empty() || ::mkdir(path.c_str(), 0777) == 0) return;
    int error = errno;
    if (error == ENOENT) {
      const std::string above = parent(path);
      if (above == path || above.empty()) fail_errno("making the directory", path, error);
      make_directory(above);
      if (::mkdir(path.c_str(), 0777) == 0) return;
      error = errno;
    }
    struct stat info;  // follows a link: a link to a directory serves as one
    if (error == EEXIST && ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return;
    fail_errno("making the directory", path, error);
  }

  void rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) fail_errno("renaming to '" + to + "'", from, errno);
  }

  bool exchange(const std::string& a, const std::string& b) override {
    if (::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), RENAME_EXCHANGE) == 0) return true;
    if (errno == EINVAL || errno == ENOSYS || errno == EOPNOTSUPP || errno == EPERM) return false;
    fail_errno("exchanging with '" + b + "'", a, errno);
  }

  void remove_file(const std::string& path) override {
    if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail_errno("removing", path, errno);
  }

  void remove_directory(const std::string& path) override {
    if (::rmdir(path.c_str()) != 0 && errno != ENOENT) fail_errno("removing the directory", path, errno);
  }

  void sync_directory(const std::string& path) override {
    Descriptor fd(retry_open(path.empty() ? "." : path, O_RDONLY | O_DIRECTORY));
    if (!fd) fail_errno("opening", path, errno);
    // Some network file systems have no fsync of directories: EINVAL says that there is nothing to do.
    if (::fsync(fd.get()) != 0 && errno != EINVAL) fail_errno("fsync", path, errno);
  }

  uint64_t free_bytes(const std::string& path) override {
    struct statvfs info;
    if (::statvfs(path.empty() ? "." : path.c_str(), &info) != 0) fail_errno("asking for free space", path, errno);
    return static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  }

 private:
  static void preallocate(int fd, const std::string& path, uint64_t size) {
    int result;
    do {
      result = ::fallocate(fd, 0, 0, static_cast<off_t>(size));
    } while (result != 0 && errno == EINTR);
    if (result == 0 || (errno != ENOSPC && errno != EDQUOT && errno != EFBIG)) return;  // else: it has no fallocate
    const int error = errno;
    ::unlink(path.c_str());
    fail(ErrorKind::kNoSpace, path, ": no room for ", size, " bytes: ", std::strerror(error), " (",
         strerrorname_np(error), "); free some space or choose another folder");
  }
};

}  // namespace

Storage& local_storage() {
  static LocalStorage storage;
  return storage;
}

}  // namespace shardsmith
