#include "storage/atomic_file.h"

#include <unistd.h>

#include <atomic>

#include "base/error.h"

namespace shardsmith {

void write_file_atomic(Storage& storage, const std::string& path, Access access, uint64_t size_hint,
                       const std::function<void(WriteFile&)>& fill) {
  static std::atomic<uint64_t> counter{0};
  const std::string folder = parent(path);
  const std::string temporary = join(folder, str(".", base_name(path), ".tmp-", ::getpid(), "-", counter.fetch_add(1)));
  try {
    const auto file = storage.create(temporary, access, size_hint);
    fill(*file);
    file->sync();
    file->close();
    storage.rename(temporary, path);
  } catch (...) {
    try {
      storage.remove_file(temporary);
    } catch (const Error&) {  // the first error is the one to tell
    }
    throw;
  }
  storage.sync_directory(folder);
}

}  // namespace shardsmith
