// The checksums that a zip (torch's .pt and .bin) has of its records, compared with the bytes.
#pragma once

#include <string>
#include <vector>

#include "base/progress.h"
#include "storage/storage.h"

namespace shardsmith::cli {

bool looks_like_zip(Storage& storage, const std::string& path);

// One line per damaged record, naming file and record; empty = sound. Throws kCorrupt where the directory of
// the zip can't be read. A record whose checksum is 0 was written without one and is passed over.
std::vector<std::string> check_zip(Storage& storage, const std::string& path, const Progress& progress = {});

}  // namespace shardsmith::cli
