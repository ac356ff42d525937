// safetensors and hf: formats that hold named tensors and nothing else.
#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

#include "base/error.h"
#include "cli/companions.h"
#include "cli/describe.h"
#include "cli/signals.h"
#include "cli/writers.h"
#include "format/safetensors.h"

namespace shardsmith::cli {
namespace {

constexpr uint64_t kShardSize = 5'000'000'000;  // transformers' own default

struct Named {
  std::string name;
  StreamTensor tensor;
};
using Shard = std::vector<Named>;

// What a flat target gets: each tensor once, and the other names of those that have several.
struct Flat {
  std::vector<Named> tensors;
  std::vector<std::pair<std::string, std::string>> ties;  // name -> the name that is written
  uint64_t bytes = 0;
};

Flat flat_of(const Job& job) {
  Flat flat;
  size_t plain = 0;
  std::string first_plain;
  std::map<size_t, std::string> written;
  std::set<std::string> names;
  for (const NamedTensor& named : flat_names(job.content.model, &plain, &first_plain)) {
    if (!names.insert(named.name).second)
      fail(ErrorKind::kUnsupported, job.request.from, ": two tensors would be called '", named.name, "'");
    const auto [place, is_new] = written.emplace(named.tensor, named.name);
    if (!is_new) {
      flat.ties.emplace_back(named.name, place->second);
      continue;
    }
    const StreamTensor tensor = whole_tensor(job.content.index.tensors[named.tensor], job.feed.dtypes[named.tensor]);
    if (safetensors_name(tensor.dtype).empty())
      fail(ErrorKind::kUnsupported, "tensor '", named.name, "' is ", to_string(tensor.dtype),
           ", for which safetensors has no word; convert it with --dtype or leave it out with --exclude");
    flat.bytes += tensor.bytes();
    flat.tensors.push_back({named.name, tensor});
  }
  if (plain > 0)
    job.result.left_out.push_back(str(plain,
                                      plain == 1 ? " value that is no tensor ('" : " values that are no tensors ('",
                                      first_plain, plain == 1 ? "')" : "', ...)"));
  if (!job.content.optimizer.is_none()) job.result.left_out.push_back("the optimizer's state");
  for (const auto& [key, item] : job.content.beside.items) job.result.left_out.push_back(*key.get_if<std::string>());
  return flat;
}

// Greedily in the model's order; a tensor larger than the limit has a file of its own.
std::vector<Shard> shards_of(std::vector<Named> tensors, uint64_t limit) {
  std::vector<Shard> shards;
  uint64_t filled = 0;
  for (Named& named : tensors) {
    const uint64_t bytes = named.tensor.bytes();
    if (shards.empty() || (filled > 0 && filled + bytes > limit)) {
      shards.emplace_back();
      filled = 0;
    }
    filled += bytes;
    shards.back().push_back(std::move(named));
  }
  if (shards.empty()) shards.emplace_back();
  for (Shard& shard : shards) {
    // As the writer orders them, so that the source is streamed.
    std::stable_sort(shard.begin(), shard.end(), [](const Named& a, const Named& b) {
      return a.tensor.dtype != b.tensor.dtype ? a.tensor.dtype > b.tensor.dtype : a.name < b.name;
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

void write_index(Storage& storage, const std::string& folder, const std::vector<Shard>& shards, uint64_t bytes) {
  std::map<std::string, std::string> sorted;
  int64_t parameters = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    for (const Named& named : shards[i]) {
      sorted[named.name] = shard_name(i, shards.size());
      parameters += volume(named.tensor.entry->shape);
    }
  }
  Dict map;
  for (const auto& [name, file] : sorted) map.items.emplace_back(name, file);
  Value metadata, index;
  metadata.set("total_parameters", parameters);
  metadata.set("total_size", static_cast<int64_t>(bytes));
  index.set("metadata", metadata);
  index.set("weight_map", std::move(map));
  write_text_atomic(storage, join(folder, "model.safetensors.index.json"), to_json(index, 2) + "\n");
}

void write_shard(Job& job, const std::string& path, const Shard& shard,
                 const std::vector<std::pair<std::string, std::string>>& metadata) {
  Feed& feed = job.feed;
  std::vector<StreamTensor> streamed;
  for (const Named& named : shard) streamed.push_back(named.tensor);
  TensorStream stream(job.content.index.files, std::move(streamed), feed.memory, job.storage, &feed.ledger,
                      check_signals);
  std::vector<SafetensorsTensor> out;
  for (size_t i = 0; i < shard.size(); ++i) {
    ByteSource source;
    source.size = shard[i].tensor.bytes();
    source.fill = [&, i](uint64_t offset, std::span<std::byte> bytes) {
      stream.read(i, offset, bytes);
      feed.done += bytes.size();
      if (feed.progress) feed.progress({"write", feed.done, feed.total, "bytes"});
    };
    out.push_back({shard[i].name, shard[i].tensor.dtype, shard[i].tensor.entry->shape, std::move(source)});
  }
  write_safetensors(job.storage, path, std::move(out), metadata);
  check_signals();
}

void write_shards(Job& job, const std::string& folder, const std::vector<Shard>& shards,
                  const std::vector<std::pair<std::string, std::string>>& ties, uint64_t bytes) {
  for (size_t i = 0; i < shards.size(); ++i) {
    std::vector<std::pair<std::string, std::string>> metadata{{"format", "pt"}};
    for (const auto& tie : ties) {
      const bool here =
          std::any_of(shards[i].begin(), shards[i].end(), [&](const Named& n) { return n.name == tie.second; });
      if (here) metadata.push_back(tie);
    }
    write_shard(job, join(folder, shard_name(i, shards.size())), shards[i], metadata);
  }
  if (shards.size() > 1) write_index(job.storage, folder, shards, bytes);
}

// transformers loads in the type that the config names, so it has to be the weights' own.
Value config_for(const Content& content, const std::vector<Shard>& shards) {
  Value config = content.config;
  std::optional<Dtype> common;
  bool mixed = false;
  for (const Shard& shard : shards) {
    for (const Named& named : shard) {
      if (!is_castable(named.tensor.dtype)) continue;
      mixed = mixed || (common && *common != named.tensor.dtype);
      common = named.tensor.dtype;
    }
  }
  if (common && !mixed) {
    const bool old_word = config.find("torch_dtype") != nullptr;
    if (old_word) config.set("torch_dtype", std::string(to_string(*common)));
    if (!old_word || config.find("dtype")) config.set("dtype", std::string(to_string(*common)));
  }
  const Value* named = config.find("architectures");
  if ((!named || named->is_none()) && content.family)
    config.set("architectures", List{Value(content.family->architecture)});
  return config;
}

bool replaceable(Storage& storage, const std::string& to) {
  if (!storage.stat(to).is_directory) return false;
  if (storage.stat(join(to, kManifestName)).exists || holds_checkpoints(storage, to))
    fail(ErrorKind::kInvalidArgument, to, ": holds checkpoints; choose another folder");
  return storage.stat(join(to, kExportMarker)).exists;
}

}  // namespace

void write_safetensors_target(Job& job) {
  Flat flat = flat_of(job);
  job.result.tensors = flat.tensors.size();
  const std::vector<Shard> shards =
      shards_of(std::move(flat.tensors), job.request.max_shard_size.value_or(~uint64_t{0}));
  StagedOutput out(job.storage, job.request.to, job.request.overwrite);
  job.announce(flat.bytes, shards.size());
  if (!job.request.max_shard_size) {
    std::vector<std::pair<std::string, std::string>> metadata{{"format", "pt"}};
    metadata.insert(metadata.end(), flat.ties.begin(), flat.ties.end());
    write_shard(job, out.temporary(), shards[0], metadata);
  } else {
    out.make_folder();
    write_shards(job, out.temporary(), shards, flat.ties, flat.bytes);
  }
  job.finish();
  job.publish(out);
}

void write_hf_target(Job& job) {
  const Content& content = job.content;
  if (content.config.is_none())
    fail(ErrorKind::kUnsupported, job.request.from,
         ": says nothing of the model's configuration, and a Hugging Face folder needs a config.json; name one with "
         "--config FILE");
  Flat flat = flat_of(job);
  // What the family ties, transformers ties by itself.
  if (content.family) flat.ties.clear();
  job.result.tensors = flat.tensors.size();
  const std::vector<Shard> shards = shards_of(std::move(flat.tensors), job.request.max_shard_size.value_or(kShardSize));
  const bool overwrite = replaceable(job.storage, job.request.to) || job.request.overwrite;
  if (job.storage.stat(job.request.to).exists && !job.storage.stat(job.request.to).is_directory)
    fail(ErrorKind::kInvalidArgument, job.request.to, ": is a file; a Hugging Face model is a folder");
  StagedOutput out(job.storage, job.request.to, overwrite);
  job.announce(flat.bytes, shards.size());
  out.make_folder();
  write_shards(job, out.temporary(), shards, flat.ties, flat.bytes);
  if (!content.companions.empty())
    job.result.tokenizer = copy_companions(job.storage, content.companions, out.temporary());
  write_text_atomic(job.storage, join(out.temporary(), "config.json"), to_json(config_for(content, shards), 2) + "\n");
  Value marker;
  marker.set("checkpoint", base_name(job.request.from));
  if (content.manifest) {
    marker.set("save_id", content.manifest->save_id);
    marker.set("step", content.manifest->step);
  }
  write_text_atomic(job.storage, join(out.temporary(), kExportMarker), to_json(marker, 2) + "\n");
  job.finish();
  job.publish(out);
}

}  // namespace shardsmith::cli
