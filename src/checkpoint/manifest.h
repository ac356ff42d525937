// manifest.json: written last; of ours only a folder with one is a checkpoint.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/value.h"
#include "layout/mesh.h"
#include "layout/partition.h"
#include "storage/storage.h"

namespace shardsmith {

inline constexpr int kFormatVersion = 1;
inline constexpr const char* kManifestName = "manifest.json";

struct ManifestFile {
  std::string name;  // inside the folder
  uint64_t size = 0;
  std::string digest;  // of the file's extra record, which covers all bytes before it
  std::string
      tail;  // CRC-32 in hex of the bytes that the extra record's blocks don't cover, itself and the zip directory
};

struct Manifest {
  int format_version = kFormatVersion;
  std::string save_id;  // unique a save
  std::string tag;
  int64_t step = 0;
  double time = 0;  // seconds since 1970, of the commit; order among checkpoints is (step, time)
  int world_size = 1, pp = 1, tp = 1, rdp = 1;
  std::string placement = "DPT";
  Partition partition;
  Value model_config;  // the Hugging Face config.json, so that a family can be told; None for foreign modules
  std::string hf;      // path, relative to the folder's parent, of config and tokenizer ("hf"); may be empty
  std::vector<ManifestFile> files;
};

// One path element: not empty, no '/', no control character, not "." or "..".
bool is_bare_name(std::string_view name);

// As JSON has it, and back; `path` is for messages. kCorrupt for what is no manifest; a newer format_version is
// kUnsupported and says so.
Value to_value(const Manifest& manifest);
Manifest manifest_from(const Value& json, const std::string& path);

std::string to_json_text(const Manifest& manifest);
// kCorrupt with the path; a newer format_version is kUnsupported and says so.
Manifest read_manifest(Storage& storage, const std::string& folder);

}  // namespace shardsmith
