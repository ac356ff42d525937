#include "format/detect.h"

#include "base/error.h"
#include "format/bare_pickle.h"
#include "format/dcp.h"
#include "format/hf.h"
#include "format/pt.h"
#include "format/safetensors.h"

namespace shardsmith {
namespace {

// checkpoint/ stands above this room, so its manifest is known here by name and one key only.
bool has_manifest(Storage& storage, const std::string& directory) {
  const std::string path = join(directory, "manifest.json");
  if (!storage.stat(path).exists) return false;
  try {
    return parse_json(read_text(storage, path), path).find("format_version") != nullptr;
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kCorrupt) throw;
    return true;  // ours by its name, and damaged: whoever reads it says how
  }
}

}  // namespace

std::string detect_format(Storage& storage, const std::string& path) {
  const Stat stat = storage.stat(path);
  if (!stat.exists) fail(ErrorKind::kNotFound, path, ": not there");
  bool is_directory = stat.is_directory;
  if (stat.is_link) {
    // Follow it: a directory answers to a path inside of it.
    is_directory = storage.stat(join(path, ".")).exists;
  }
  if (is_directory) {
    if (has_manifest(storage, path)) return "partial";
    if (is_hf(storage, path)) return "hf";
    if (is_dcp(storage, path)) return "dcp";
    return is_safetensors_folder(storage, path) ? "safetensors" : "";
  }
  if (is_safetensors(storage, path)) return "safetensors";
  if (is_pt(storage, path)) return "pt";
  return is_bare_pickle(storage, path) ? "pickle" : "";
}

}  // namespace shardsmith
