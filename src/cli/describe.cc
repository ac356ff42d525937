#include "cli/describe.h"

#include <algorithm>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/full.h"
#include "cli/output.h"
#include "cli/source.h"
#include "cli/staged_output.h"
#include "format/pt.h"

namespace shardsmith::cli {
namespace {

std::string layers_words(int first, int end) {
  if (first == end) return "no layer";
  return first + 1 == end ? str("layer ", first) : str("layers ", first, "-", end - 1);
}

constexpr int kMostRanks = 16;  // of one slice, in a line

std::string join_words(const std::vector<std::string>& words) {
  std::string result;
  for (const auto& word : words) result += (result.empty() ? "" : ", ") + word;
  return result;
}

}  // namespace

std::string layout_words(const Manifest& manifest) {
  std::vector<std::string> degrees;
  if (manifest.pp > 1) degrees.push_back(str("pp ", manifest.pp));
  if (manifest.tp > 1) degrees.push_back(str("tp ", manifest.tp));
  if (manifest.rdp > 1) degrees.push_back(str("rdp ", manifest.rdp));
  const std::string ranks = manifest.world_size == 1 ? "1 rank" : str(manifest.world_size, " ranks");
  return degrees.empty() ? ranks : ranks + ": " + join_words(degrees);
}

std::string stage_words(const Partition& partition, int stage) {
  std::vector<std::string> words;
  if (stage == 0) words.push_back("embedding");
  words.push_back(layers_words(partition.first[stage], partition.first[stage + 1]));
  if (stage + 1 == partition.stages()) words.push_back("norm and head");
  return join_words(words);
}

std::vector<std::string> stage_ranks(const Mesh& mesh, int stage, int most) {
  std::vector<std::string> result;
  for (int tp = 0; tp < mesh.tp_size(); ++tp) {
    std::vector<std::string> ranks;
    const bool all = mesh.rdp_size() <= most;
    for (int rdp = 0; rdp < (all ? mesh.rdp_size() : most); ++rdp) {
      ranks.push_back(std::to_string(mesh.rank({stage, tp, rdp})));
    }
    result.push_back(join_words(ranks) + (all ? "" : str(", ... (", mesh.rdp_size(), " ranks)")));
  }
  return result;
}

std::string layout_picture(const Manifest& manifest) {
  const Partition& partition = manifest.partition;
  if (partition.stages() < 1 || partition.stages() != manifest.pp) return "";
  const Mesh mesh(manifest.world_size, manifest.pp, manifest.tp, manifest.placement);
  const int layers = std::max(partition.first.back(), 1);
  constexpr int kWidth = 30;
  Table table({});
  for (int stage = 0; stage < partition.stages(); ++stage) {
    const int begin = kWidth * partition.first[stage] / layers;
    const int end = std::max(begin + 1, kWidth * partition.first[stage + 1] / layers);
    std::string bar = "|" + std::string(begin, ' ') + std::string(end - begin, '=');
    bar += std::string(std::max(0, kWidth - end), ' ') + "|";
    std::string ranks;
    const auto slices = stage_ranks(mesh, stage, kMostRanks);
    for (size_t tp = 0; tp < slices.size(); ++tp) {
      ranks += str(tp ? "; " : "", slices.size() > 1 ? str("tp ", tp, ": ") : "", "rank ", slices[tp]);
    }
    table.add({str("stage ", stage), bar, stage_words(partition, stage), ranks});
  }
  return table.text();
}

Value to_value(const std::vector<std::string>& words) {
  List list;
  for (const auto& word : words) list.emplace_back(word);
  return list;
}

Value manifest_value(const Manifest& manifest) {
  Value value;
  value.set("tag", manifest.tag);
  value.set("step", manifest.step);
  value.set("time", manifest.time);
  value.set("format_version", manifest.format_version);
  value.set("save_id", manifest.save_id);
  value.set("world_size", manifest.world_size);
  value.set("pipeline_parallel_degree", manifest.pp);
  value.set("tensor_parallel_degree", manifest.tp);
  value.set("reduced_data_parallel_degree", manifest.rdp);
  value.set("placement", manifest.placement);
  List first;
  for (const int layer : manifest.partition.first) first.emplace_back(layer);
  value.set("partition", first);
  List files;
  for (const auto& file : manifest.files) {
    Value entry;
    entry.set("name", file.name);
    entry.set("bytes", static_cast<int64_t>(file.size));
    files.push_back(entry);
  }
  value.set("files", files);
  return value;
}

Manifest open_manifest(Storage& storage, const std::string& folder) {
  if (!storage.stat(folder).exists) fail(ErrorKind::kNotFound, folder, ": there is nothing");
  if (!storage.stat(join(folder, kManifestName)).exists) {
    fail(ErrorKind::kCorrupt, folder, ": no checkpoint: it has no ", kManifestName,
         " (a save that did not finish has none)");
  }
  return read_manifest(storage, folder);
}

std::string existing_path(Storage& storage, const std::string& path) {
  const std::string given = given_path(path);
  if (storage.stat(given).exists) return given;
  for (const std::string& name : {given, given + "_partial"}) {
    const std::string old = storage.stat(name).exists ? "" : where_old_lies(storage, absolute_path(name));
    if (!old.empty()) fail(ErrorKind::kNotFound, name, ": not there", old);
  }
  std::string near;
  if (storage.stat(given + "_partial").is_directory) {
    near = base_name(given) + "_partial";
  } else if (const std::string above = parent(given); storage.stat(above).is_directory) {
    std::vector<std::string> names;
    for (const auto& name : storage.list(above)) {
      if (!name.starts_with('.')) names.push_back(name);
    }
    near = nearest(base_name(given), names);
  }
  fail(ErrorKind::kNotFound, given, ": not there",
       near.empty() ? std::string() : str("; did you mean ", join(parent(given), near), "?"));
}

void check_folder_of_checkpoints(Storage& storage, const std::string& path) {
  if (!storage.stat(path).is_directory) {
    fail(ErrorKind::kInvalidArgument, path, ": a file, not a folder of checkpoints (shardsmith inspect ", path, ")");
  }
  if (storage.stat(join(path, kManifestName)).exists) {
    fail(ErrorKind::kInvalidArgument, path, ": a checkpoint itself, not a folder of them (shardsmith inspect ", path,
         ")");
  }
}

bool holds_checkpoints(Storage& storage, const std::string& path) {
  if (storage.stat(join(path, kManifestName)).exists) return false;
  if (storage.stat(join(path, kNewestName)).exists) return true;
  for (const auto& name : storage.list(path)) {
    if (storage.stat(join(join(path, name), kManifestName)).exists) return true;
  }
  return false;
}

}  // namespace shardsmith::cli
