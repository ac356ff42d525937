// A file that appears whole or not at all.
#pragma once

#include <functional>
#include <string>

#include "storage/storage.h"

namespace shardsmith {

// `fill` writes a temporary beside `path`, which is then synced and renamed, and the directory synced. Whatever fails,
// the temporary is removed and what was at `path` is still there.
void write_file_atomic(Storage& storage, const std::string& path, Access access, uint64_t size_hint,
                       const std::function<void(WriteFile&)>& fill);

}  // namespace shardsmith
