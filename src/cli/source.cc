#include "cli/source.h"

#include <filesystem>

#include "base/error.h"
#include "checkpoint/full.h"
#include "checkpoint/load.h"
#include "cli/describe.h"
#include "format/dcp.h"
#include "format/detect.h"
#include "format/hf.h"
#include "format/pt.h"
#include "format/safetensors.h"

namespace shardsmith::cli {

std::string given_path(const std::string& path) {
  std::string result = path;
  while (result.size() > 1 && result.back() == '/') result.pop_back();
  std::error_code error;
  if (!std::filesystem::is_symlink(result, error)) return result;
  const auto target = std::filesystem::canonical(result, error);
  return error ? result : target.string();
}

std::string known_format(Storage& storage, const std::string& path) {
  const std::string format = detect_format(storage, path);
  if (format == "pt" && is_full(storage, path)) return "full";
  if (!format.empty()) return format;
  if (!storage.stat(path).is_directory) {
    fail(ErrorKind::kCorrupt, path, ": no format that we know (pt, safetensors, full, or a folder: hf, partial, dcp)");
  }
  if (holds_checkpoints(storage, path)) {
    fail(ErrorKind::kInvalidArgument, path, ": holds checkpoints, name one of them (shardsmith ls ", path, ")");
  }
  fail(ErrorKind::kCorrupt, path, ": no checkpoint and no model: neither a ", kManifestName,
       " (a save that did not finish has none) nor a config.json with weights");
}

Source open_source(Storage& storage, const std::string& path) {
  Source source;
  source.format = known_format(storage, path);
  if (source.format == "pt") {
    source.index = read_pt(storage, path);
  } else if (source.format == "safetensors") {
    const bool folder = storage.stat(join(path, ".")).is_directory;
    source.index = folder ? read_safetensors_folder(storage, path) : read_safetensors(storage, path);
  } else if (source.format == "hf") {
    source.index = read_hf(storage, path);
  } else if (source.format == "dcp") {
    source.index = read_dcp(storage, path);
  } else if (source.format == "full") {
    source.manifest.emplace();
    source.index = read_full(storage, path, &*source.manifest);
  } else {
    source.manifest = read_manifest(storage, path);
    source.index = read_partial(storage, path, *source.manifest);
  }
  return source;
}

}  // namespace shardsmith::cli
