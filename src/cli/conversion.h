// One checkpoint or model written as another: what merge, convert, export and reshard have in common.
//
//   path --> open_source --> content_of --> the target's writer --> StagedOutput
//                                             write_flat.cc      safetensors, hf
//                                             write_tree.cc      pt, dcp
//                                             write_sections.cc  partial, full
// Tensors go from the source's files to the target's through windows of fixed size (tensor_stream.h).
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "base/value.h"
#include "cli/content.h"
#include "layout/dtype.h"
#include "storage/storage.h"

namespace shardsmith::cli {

// In every Hugging Face folder that we write, so that the next one may replace it.
inline constexpr const char* kExportMarker = "shardsmith_export.json";

struct Conversion {
  std::string from, to;
  std::string format;  // "pt", "safetensors", "hf", "dcp", "partial", "full"
  Names names = Names::kAsTheyAre;
  bool weights_only = false;
  std::optional<Dtype> dtype;  // of floating-point weights; as they are otherwise
  std::vector<std::string> include, exclude;
  std::optional<uint64_t> max_shard_size;  // safetensors, hf
  Value config;                            // Hugging Face's, for sources that have none
  std::string family;                      // likewise: to infer the config of (family/infer.h)
  // partial: 0 is the source's, or 1.
  int pp = 0, tp = 0, world_size = 0;
  std::string placement;
  double memory_weight = 0.8;

  bool overwrite = false;
  uint64_t memory_limit = 256 << 20;
  int threads = 3;  // that read; each has one window under way
  Progress progress;
  std::function<void(std::string_view)> notice;  // lines for people, before and after
};

struct ConversionResult {
  std::string from_format, format;
  std::optional<Manifest> manifest;  // the source's
  size_t tensors = 0, files = 0;
  uint64_t bytes = 0;       // of tensors, as written
  uint64_t bytes_read = 0;  // of the source's files, for tensors
  bool tokenizer = false;
  std::vector<std::string> left_out;
  std::vector<std::string> left_behind;  // lines on old content that could not be removed: the output is whole
};

// Throws kUnsupported that names the tensor which the target can't hold, kNoSpace where disk or memory won't do, and
// what reading throws. Whatever goes wrong, nothing is left at `to` but what was there.
ConversionResult convert(Storage& storage, const Conversion& request);

// Whether --dtype is about weights of this type: those between which there are conversions (storage/convert.h).
bool is_castable(Dtype dtype);

// The words of formats that we write.
const std::vector<std::string>& writable_formats();

}  // namespace shardsmith::cli
