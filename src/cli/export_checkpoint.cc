#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>

#include "base/error.h"
#include "checkpoint/load.h"
#include "cli/describe.h"
#include "cli/export.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "cli/tensor_stream.h"
#include "family/family.h"
#include "format/detect.h"
#include "format/safetensors.h"
#include "layout/plan.h"

namespace shardsmith::cli {
namespace {

constexpr const char* kModelPrefix = "model/";
constexpr uint64_t kChunk = 4 << 20;

// Removes what was begun, unless it has its name.
class TemporaryFolder {
 public:
  TemporaryFolder(Storage& storage, std::string path) : storage_(storage), path_(std::move(path)) {
    remove_tree(storage_, path_);
    storage_.make_directory(path_);
  }
  ~TemporaryFolder() {
    if (kept_) return;
    try {
      remove_tree(storage_, path_);
    } catch (const Error&) {  // the error that brought us here says more
    }
  }
  const std::string& path() const { return path_; }
  void keep() { kept_ = true; }

 private:
  Storage& storage_;
  std::string path_;
  bool kept_ = false;
};

bool floating(Dtype dtype) {
  return dtype == Dtype::kF16 || dtype == Dtype::kBF16 || dtype == Dtype::kF32 || dtype == Dtype::kF64;
}

std::string choose_checkpoint(Storage& storage, const std::string& from) {
  const auto stat = storage.stat(from);
  if (!stat.exists) fail(ErrorKind::kNotFound, from, ": there is nothing");
  if (storage.stat(join(from, kManifestName)).exists || !holds_checkpoints(storage, from)) {
    open_manifest(storage, from);  // throws with the reason where it is none
    return from;
  }
  std::vector<std::string> passed_over;
  const auto found = find_checkpoint(storage, from, "", &passed_over);
  if (!found)
    fail(ErrorKind::kCorrupt, from, ": no complete checkpoint", passed_over.empty() ? "" : ": " + passed_over[0]);
  return found->folder;
}

// "model/transformer..." -> "transformer...": the model's part of the checkpoint under its logical names.
Index logical_model(Index partial) {
  const std::string_view prefix = kModelPrefix;
  std::erase_if(partial.tensors, [&](const TensorEntry& tensor) { return tensor.name.rfind(prefix, 0) != 0; });
  for (auto& tensor : partial.tensors) {
    tensor.name.erase(0, prefix.size());
    if (tensor.alias_of.rfind(prefix, 0) == 0) tensor.alias_of.erase(0, prefix.size());
  }
  partial.values = Value();
  partial.reindex();
  return partial;
}

// The output files' tensors: greedily in the model's order; a tensor larger than the limit has a file of its own.
std::vector<std::vector<StreamTensor>> shards_of(const std::vector<StreamTensor>& tensors, uint64_t limit) {
  std::vector<std::vector<StreamTensor>> shards;
  uint64_t filled = 0;
  for (const auto& tensor : tensors) {
    if (shards.empty() || (filled > 0 && filled + tensor.bytes() > limit)) {
      shards.emplace_back();
      filled = 0;
    }
    shards.back().push_back(tensor);
    filled += tensor.bytes();
  }
  for (auto& shard : shards) {
    // As the writer orders them, so that the window is filled once.
    std::stable_sort(shard.begin(), shard.end(), [](const StreamTensor& a, const StreamTensor& b) {
      return a.dtype != b.dtype ? a.dtype > b.dtype : a.entry->name < b.entry->name;
    });
  }
  return shards;
}

std::string shard_name(size_t number, size_t count) {
  if (count == 1) return "model.safetensors";
  char text[64];
  std::snprintf(text, sizeof text, "model-%05zu-of-%05zu.safetensors", number + 1, count);
  return text;
}

void write_index(Storage& storage, const std::string& folder, const std::vector<std::vector<StreamTensor>>& shards,
                 uint64_t bytes) {
  std::map<std::string, std::string> sorted;
  int64_t parameters = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const auto& tensor : shards[i]) {
      sorted[tensor.entry->name] = shard_name(i, shards.size());
      parameters += volume(tensor.entry->shape);
    }
  }
  Value metadata, map, index;
  for (const auto& [name, file] : sorted) map.set(name, file);
  metadata.set("total_parameters", parameters);
  metadata.set("total_size", static_cast<int64_t>(bytes));
  index.set("metadata", metadata);
  index.set("weight_map", map);
  write_text_atomic(storage, join(folder, "model.safetensors.index.json"), to_json(index, 2) + "\n");
}

// transformers loads in the type that the config names, so it has to be the weights' own.
Value config_for(Value config, const std::vector<StreamTensor>& tensors) {
  std::optional<Dtype> common;
  bool mixed = false;
  for (const auto& tensor : tensors) {
    if (!floating(tensor.dtype)) continue;
    mixed = mixed || (common && *common != tensor.dtype);
    common = tensor.dtype;
  }
  if (common && !mixed) {
    const bool old_word = config.find("torch_dtype") != nullptr;
    if (old_word) config.set("torch_dtype", std::string(to_string(*common)));
    if (!old_word || config.find("dtype")) config.set("dtype", std::string(to_string(*common)));
  }
  if (!config.find("architectures") || config.find("architectures")->is_none()) {
    const Value* type = config.find("model_type");
    const auto* word = type ? type->get_if<std::string>() : nullptr;
    if (word && *word == "gpt2") config.set("architectures", List{Value("GPT2LMHeadModel")});
    if (word && *word == "llama") config.set("architectures", List{Value("LlamaForCausalLM")});
  }
  return config;
}

void copy_file(Storage& storage, const std::string& from, const std::string& to) {
  const auto input = storage.open_read(from);
  const auto output = storage.create(to, Access::kBuffered, 0);
  AlignedBuffer buffer(kChunk);
  for (uint64_t at = 0; at < input->size();) {
    const std::span chunk(buffer.data(), std::min<uint64_t>(buffer.size(), input->size() - at));
    input->read(at, chunk);
    output->write(at, chunk);
    at += chunk.size();
  }
  output->sync();
  output->close();
}

// Tokenizer, generation settings and the like: every small file beside the checkpoints but weights and the config.
// Returns whether a tokenizer was among them.
bool copy_companions(Storage& storage, const std::string& hf, const std::string& folder) {
  bool tokenizer = false;
  for (const auto& name : storage.list(hf)) {
    const auto stat = storage.stat(join(hf, name));
    const bool weights = name.find(".safetensors") != std::string::npos || name.find(".bin") != std::string::npos;
    if (stat.is_directory || stat.is_link || weights || name == "config.json" || name == kExportMarker) continue;
    copy_file(storage, join(hf, name), join(folder, name));
    tokenizer = tokenizer || name == "tokenizer.json" || name == "tokenizer.model" || name == "vocab.json";
  }
  return tokenizer;
}

std::string absolute(const std::string& path) {
  std::error_code error;
  auto result = std::filesystem::weakly_canonical(path, error);
  if (error) fail(ErrorKind::kIo, path, ": ", error.message());
  std::string text = result.lexically_normal().string();
  while (text.size() > 1 && text.back() == '/') text.pop_back();
  return text;
}

bool is_inside(const std::string& path, const std::string& folder) {
  return path == folder || path.rfind(folder == "/" ? folder : folder + "/", 0) == 0;
}

// Whether `to` may be written. `source` and `to` are absolute.
void check_target(Storage& storage, const std::string& to, const std::string& source, bool overwrite) {
  if (is_inside(source, to)) fail(ErrorKind::kInvalidArgument, to, ": holds the checkpoint that is to be exported");
  if (is_inside(to, source))
    fail(ErrorKind::kInvalidArgument, to, ": lies inside the checkpoint that is to be exported");
  const auto stat = storage.stat(to);
  if (!stat.exists) return;
  if (!stat.is_directory) fail(ErrorKind::kInvalidArgument, to, ": is a file; an export is a folder");
  if (storage.list(to).empty() || storage.stat(join(to, kExportMarker)).exists) return;
  if (storage.stat(join(to, kManifestName)).exists || holds_checkpoints(storage, to)) {
    fail(ErrorKind::kInvalidArgument, to, ": holds checkpoints; choose another folder for the export");
  }
  if (!overwrite) {
    fail(ErrorKind::kInvalidArgument, to, ": is not empty and no export of ours (--overwrite replaces it)");
  }
}

// Gives `folder` the name `to`, replacing what is there.
void publish(Storage& storage, TemporaryFolder& folder, const std::string& to) {
  storage.sync_directory(folder.path());
  if (!storage.stat(to).exists) {
    storage.rename(folder.path(), to);
    folder.keep();
  } else if (!storage.exchange(folder.path(), to)) {
    const std::string old = join(parent(to), "." + base_name(to) + ".old");
    remove_tree(storage, old);
    storage.rename(to, old);
    try {
      storage.rename(folder.path(), to);
    } catch (const Error&) {
      storage.rename(old, to);
      throw;
    }
    folder.keep();
    remove_tree(storage, old);
  }
  // After an exchange the temporary name holds the old content, which goes with it.
  storage.sync_directory(parent(to));
}

}  // namespace

ExportResult export_checkpoint(Storage& storage, const ExportOptions& options) {
  const std::string folder = absolute(choose_checkpoint(storage, options.from));
  const std::string to = absolute(options.to);
  check_target(storage, to, folder, options.overwrite);

  const Manifest manifest = open_manifest(storage, folder);
  if (manifest.model_config.is_none()) {
    fail(ErrorKind::kUnsupported, folder,
         ": was saved from a model of no known family, so it has no Hugging Face form");
  }
  const FamilyModel model = describe_model(manifest.model_config);
  const Index hf = to_hf(logical_model(read_partial(storage, folder, manifest)), model);

  // Ties once: to_hf drops the tied names, and entries that only repeat another one's elements are left out here.
  std::vector<StreamTensor> tensors;
  uint64_t bytes = 0;
  for (const auto& wanted : model.tensors) {
    const TensorEntry* entry = hf.find(wanted.hf_name);
    if (!entry) fail(ErrorKind::kCorrupt, folder, ": lacks ", wanted.hf_name, " ", to_string(wanted.shape));
    if (!entry->alias_of.empty()) continue;
    tensors.push_back({entry, options.dtype && floating(entry->dtype) ? *options.dtype : entry->dtype});
    bytes += tensors.back().bytes();
  }
  const auto shards = shards_of(tensors, options.max_shard_size);

  storage.make_directory(parent(to));
  const uint64_t available = storage.free_bytes(parent(to));
  if (available < bytes) {
    fail(ErrorKind::kNoSpace, to, ": the export needs ", human_bytes(bytes), ", ", human_bytes(available), " are free");
  }
  TemporaryFolder temporary(storage, join(parent(to), str(".", base_name(to), ".tmp-", getpid())));
  AlignedBuffer window(options.window);
  TransferOptions transfer;
  transfer.budget = 16 << 20;
  uint64_t done = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    TensorStream stream(hf, shards[i], window, storage, transfer);
    std::vector<SafetensorsTensor> out;
    for (size_t k = 0; k < shards[i].size(); ++k) {
      const StreamTensor& tensor = shards[i][k];
      ByteSource source;
      source.size = tensor.bytes();
      source.fill = [&, k](uint64_t offset, std::span<std::byte> bytes_out) {
        check_signals();
        stream.read(k, offset, bytes_out);
        done += bytes_out.size();
        if (options.progress) options.progress({"export", done, bytes, "bytes"});
      };
      out.push_back({tensor.entry->name, tensor.dtype, tensor.entry->shape, std::move(source)});
    }
    write_safetensors(storage, join(temporary.path(), shard_name(i, shards.size())), std::move(out),
                      {{"format", "pt"}});
    check_signals();
  }
  if (shards.size() > 1) write_index(storage, temporary.path(), shards, bytes);

  ExportResult result{folder, manifest.step, tensors.size(), shards.size(), bytes};
  if (manifest.hf.find('/') != std::string::npos || manifest.hf == "..") {
    fail(ErrorKind::kCorrupt, folder, ": its manifest names '", manifest.hf,
         "' for config and tokenizer, no plain name");
  }
  const std::string companions = manifest.hf.empty() ? "" : join(parent(folder), manifest.hf);
  const bool has_companions = !companions.empty() && storage.stat(companions).is_directory;
  if (has_companions) result.tokenizer = copy_companions(storage, companions, temporary.path());
  write_text_atomic(storage, join(temporary.path(), "config.json"),
                    to_json(config_for(manifest.model_config, tensors), 2) + "\n");
  Value marker;
  marker.set("checkpoint", base_name(folder));
  marker.set("save_id", manifest.save_id);
  marker.set("step", manifest.step);
  write_text_atomic(storage, join(temporary.path(), kExportMarker), to_json(marker, 2) + "\n");
  check_signals();
  publish(storage, temporary, to);
  return result;
}

}  // namespace shardsmith::cli
