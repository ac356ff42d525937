// The checksums that a zip (torch's .pt and .bin) has of its records, compared with the bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "format/zip.h"
#include "storage/parallel_read.h"
#include "storage/storage.h"

namespace shardsmith::cli {

bool looks_like_zip(Storage& storage, const std::string& path);

struct ZipCheck {
  std::vector<std::string> damage;  // one line a record, naming file and record; empty = sound
  size_t records = 0;
  size_t without_checksum = 0;  // written without one: passed over
};

// `records` of `file`, their places counted from its start. `done` is called with bytes, one call at a time.
ZipCheck check_records(ReadFile& file, std::vector<ZipRecord> records, ParallelReader& reader,
                       const std::function<void(uint64_t)>& done);

// The records of the items in a DCP folder's data files, by the files' names: each item is a zip of its own. None where
// the folder has no metadata of that kind (safetensors files).
std::map<std::string, std::vector<ZipRecord>> dcp_records(Storage& storage, const std::string& folder);

}  // namespace shardsmith::cli
