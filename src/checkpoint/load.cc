#include "checkpoint/load.h"

#include <algorithm>
#include <unordered_map>

#include "base/checksum.h"
#include "base/error.h"
#include "format/pt.h"

namespace shardsmith {
namespace {

// "model_0_1.pt" -> "model", "optimizer_0_0.pt" -> "optimizer", "rng_3.pt" -> "rng_3", "user_content.pt" ->
// "user_content". The first two are one thing in many files; each of the others stands for itself. Masters
// ("fp16_states_0_0.pt") are part of the optimizer's state.
std::string kind_of(const std::string& file) {
  if (file.starts_with("fp16_states_")) return "optimizer";
  for (const char* shared : {"model", "optimizer"}) {
    if (file.starts_with(std::string(shared) + "_")) return shared;
  }
  return file.ends_with(".pt") ? file.substr(0, file.size() - 3) : file;
}

bool is_shared(const std::string& kind) { return kind == "model" || kind == "optimizer"; }

// Tensors of the slice list carry their full names already; the others get their file's kind before their path.
void add_kind(Index& index, const std::string& kind) {
  const std::string prefix = kind + "/";
  bool is_renamed = false;
  for (TensorEntry& tensor : index.tensors) {
    if (!tensor.name.starts_with(prefix)) tensor.name = prefix + tensor.name, is_renamed = true;
    if (!tensor.alias_of.empty() && !tensor.alias_of.starts_with(prefix)) tensor.alias_of = prefix + tensor.alias_of;
  }
  if (is_renamed) index.reindex();
}

// A single number, such as a step counter, is written by every rank that holds a part of its parameter; one is enough.
void drop_repeated_numbers(const Index& so_far, Index& next) {
  for (TensorEntry& tensor : next.tensors) {
    const TensorEntry* before = so_far.find(tensor.name);
    if (before && before->shape == tensor.shape && !before->slices.empty() && volume(tensor.shape) == 1) {
      tensor.slices.clear();
    }
  }
}

// Puts one file's value where the manifest's reader expects it.
void add_value(Value& values, const std::string& kind, Value value) {
  if (kind == "optimizer") {  // param_groups and the like may differ from file to file
    Value* list = const_cast<Value*>(values.find(kind));
    if (!list) return values.set(kind, List{std::move(value)});
    list->get_if<List>()->push_back(std::move(value));
    return;
  }
  Value* merged = const_cast<Value*>(values.find(kind));
  Dict* theirs = value.get_if<Dict>();
  if (!merged || !merged->get_if<Dict>() || !theirs) return values.set(kind, std::move(value));
  Dict& ours = *merged->get_if<Dict>();
  std::unordered_map<std::string, size_t> places;
  for (size_t i = 0; i < ours.items.size(); ++i) {
    if (const std::string* name = ours.items[i].first.get_if<std::string>()) places.emplace(*name, i);
  }
  for (auto& [key, item] : theirs->items) {
    const std::string* name = key.get_if<std::string>();
    if (!name) continue;
    const auto [place, is_new] = places.emplace(*name, ours.items.size());
    if (is_new)
      ours.items.emplace_back(std::move(key), std::move(item));
    else
      ours.items[place->second].second = std::move(item);
  }
}

void check_stat(Storage& storage, const std::string& path, const ManifestFile& file) {
  const Stat stat = storage.stat(path);
  if (!stat.exists) fail(ErrorKind::kCorrupt, path, " is missing, but the manifest names it");
  if (stat.is_link || stat.is_directory) fail(ErrorKind::kCorrupt, path, " is no plain file");
  if (stat.size != file.size) {
    fail(ErrorKind::kCorrupt, path, " has ", stat.size, " bytes, the manifest says ", file.size);
  }
}

void check_digest(const std::string& path, const std::string& digest, const ManifestFile& file) {
  if (digest == file.digest) return;
  fail(ErrorKind::kCorrupt, path, " has digest '", digest, "', the manifest says '", file.digest,
       "'; it belongs to another save");
}

}  // namespace

void check_file(Storage& storage, const std::string& path, const ManifestFile& file) {
  check_stat(storage, path, file);
  check_digest(path, read_pt_digest(storage, path), file);
}

Index read_partial(Storage& storage, const std::string& folder, const Manifest& manifest) {
  Index whole;
  whole.format = "partial";
  for (const ManifestFile& file : manifest.files) {
    const std::string path = join(folder, file.name), kind = kind_of(file.name);
    check_stat(storage, path, file);
    std::string digest;
    Index next = read_pt(storage, path, &digest);
    check_digest(path, digest, file);
    add_kind(next, kind);
    if (is_shared(kind)) drop_repeated_numbers(whole, next);
    Value value = std::move(next.values);
    const std::vector<size_t> places = whole.merge(std::move(next));
    for_each_tensor(value, [&](TensorRef& reference) { reference.index = places.at(reference.index); });
    add_value(whole.values, kind, std::move(value));
  }
  try {
    validate(whole);
  } catch (const Error& e) {
    throw Error(e.kind(), str(folder, ": ", e.what()));
  }
  return whole;
}

std::string tail_digest(Storage& storage, const std::string& path) {
  const PtRecord record = read_pt_record(storage, path);
  const auto file = storage.open_read(path);
  const uint64_t begin = record.checksums ? record.checksums->covered : 0;
  std::vector<std::byte> buffer(1 << 20);
  uint32_t crc = 0;
  for (uint64_t at = begin; at < file->size();) {
    const std::span<std::byte> bytes(buffer.data(),
                                     static_cast<size_t>(std::min<uint64_t>(buffer.size(), file->size() - at)));
    file->read(at, bytes);
    crc = crc32(bytes, crc);
    at += bytes.size();
  }
  std::string hex(8, '0');
  for (size_t i = 8; i-- > 0; crc >>= 4) hex[i] = "0123456789abcdef"[crc & 15];
  return hex;
}

}  // namespace shardsmith
