// A partial checkpoint as a Hugging Face folder.
//
// Written to `.{name}.tmp-{pid}` beside the target, then renamed, so that the target appears whole or not at all.
// Memory: one window of fixed size, whatever the model's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/progress.h"
#include "layout/dtype.h"
#include "storage/storage.h"

namespace shardsmith::cli {

// In every folder that we export, so that the next export may replace it.
inline constexpr const char* kExportMarker = "shardsmith_export.json";

struct ExportOptions {
  std::string from;  // a partial checkpoint, or a folder of them (its newest)
  std::string to;
  uint64_t max_shard_size = 5'000'000'000;
  std::optional<Dtype> dtype;  // of floating-point tensors; as they are otherwise
  bool overwrite = false;      // replace a folder that isn't an export of ours
  uint64_t window = 64 << 20;
  Progress progress;
};

struct ExportResult {
  std::string checkpoint;
  int64_t step = 0;
  size_t tensors = 0, files = 0;
  uint64_t bytes = 0;  // of weights
  bool tokenizer = false;
};

ExportResult export_checkpoint(Storage& storage, const ExportOptions& options);

}  // namespace shardsmith::cli
