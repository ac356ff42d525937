// A pickle without torch's magic number: a script's own. Nobody but Python could say what it is, so it is read for its
// names only.
#pragma once

#include <string>

#include "base/value.h"
#include "storage/storage.h"

namespace shardsmith {

// Begins like a pickle of protocol 2 or later, and is none of torch's.
bool is_bare_pickle(Storage& storage, const std::string& path);

// The tree of what it holds. Every class and function is an Opaque of its name and what would be given to it; nothing
// is executed or imported. kCorrupt for what is no pickle, kUnsupported over 256 MiB.
Value read_bare_pickle_names(Storage& storage, const std::string& path);

}  // namespace shardsmith
