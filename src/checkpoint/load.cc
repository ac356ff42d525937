#include "checkpoint/load.h"

#include <algorithm>

#include "base/checksum.h"
#include "base/error.h"
#include "format/pt.h"

namespace shardsmith {
namespace {

constexpr uint64_t kAtOnce = 8 << 20;  // bytes read at once by verify

// "model_0_1.pt" -> "model", "optimizer_0_0.pt" -> "optimizer", "rng_3.pt" -> "rng_3", "user_content.pt" ->
// "user_content". The first two are one thing in many files; each of the others stands for itself.
std::string kind_of(const std::string& file) {
  for (const char* shared : {"model", "optimizer"}) {
    if (file.starts_with(std::string(shared) + "_")) return shared;
  }
  return file.ends_with(".pt") ? file.substr(0, file.size() - 3) : file;
}

bool is_shared(const std::string& kind) { return kind == "model" || kind == "optimizer"; }

// Tensors of the slice list carry their full names already; the others get their file's kind before their path.
void add_kind(Index& index, const std::string& kind) {
  const std::string prefix = kind + "/";
  for (TensorEntry& tensor : index.tensors) {
    if (!tensor.name.starts_with(prefix)) tensor.name = prefix + tensor.name;
    if (!tensor.alias_of.empty() && !tensor.alias_of.starts_with(prefix)) tensor.alias_of = prefix + tensor.alias_of;
  }
  index.reindex();
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

// TensorRefs of one file's values, in terms of the whole checkpoint's tensors.
class Renumber {
 public:
  explicit Renumber(const std::vector<size_t>& numbers) : numbers_(numbers) {}
  void operator()(Value& value) const {
    if (TensorRef* ref = value.get_if<TensorRef>()) ref->index = numbers_.at(ref->index);
    if (List* list = value.get_if<List>()) all(*list);
    if (Tuple* tuple = value.get_if<Tuple>()) all(tuple->items);
    if (Set* set = value.get_if<Set>()) all(set->items);
    if (Opaque* opaque = value.get_if<Opaque>()) all(opaque->state);
    if (Dict* dict = value.get_if<Dict>()) {
      for (auto& [key, item] : dict->items) (*this)(item);
    }
  }

 private:
  void all(List& items) const {
    for (Value& item : items) (*this)(item);
  }
  const std::vector<size_t>& numbers_;
};

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
  for (auto& [key, item] : theirs->items) {
    if (const std::string* name = key.get_if<std::string>()) merged->set(*name, std::move(item));
  }
}

void check_file(Storage& storage, const std::string& path, const ManifestFile& file) {
  const Stat stat = storage.stat(path);
  if (!stat.exists) fail(ErrorKind::kCorrupt, path, " is missing, but the manifest names it");
  if (stat.is_link || stat.is_directory) fail(ErrorKind::kCorrupt, path, " is no plain file");
  if (stat.size != file.size) {
    fail(ErrorKind::kCorrupt, path, " has ", stat.size, " bytes, the manifest says ", file.size);
  }
  const std::string digest = read_pt_record(storage, path).digest;
  if (digest != file.digest) {
    fail(ErrorKind::kCorrupt, path, " has digest '", digest, "', the manifest says '", file.digest,
         "'; it belongs to another save");
  }
}

// The tensors with an element in [begin, end) of file 0, a few of them by name.
std::string tensors_in(const Index& index, uint64_t begin, uint64_t end) {
  std::string names;
  int count = 0;
  for (const TensorEntry& tensor : index.tensors) {
    for (const Slice& slice : tensor.slices) {
      uint64_t last = slice.offset;
      for (size_t d = 0; d < slice.strides.size(); ++d) {
        last += static_cast<uint64_t>(std::max<int64_t>(slice.box.extent[d] - 1, 0) * slice.strides[d] *
                                      size_of(tensor.dtype));
      }
      if (slice.offset >= end || last + static_cast<uint64_t>(size_of(tensor.dtype)) <= begin) continue;
      if (++count <= 4) names += (names.empty() ? "'" : ", '") + tensor.name + "'";
      break;
    }
  }
  if (count == 0) return "no tensor";
  return str(count == 1 ? "tensor " : "tensors ", names, count > 4 ? str(" and ", count - 4, " more") : "");
}

// Damaged blocks of one file, neighbours joined.
void verify_blocks(Storage& storage, const std::string& path, const BlockChecksums& sums, const Index* index,
                   std::vector<std::string>& damage, const std::function<void(uint64_t)>& done) {
  const auto file = storage.open_read(path, Access::kDirect);
  const uint64_t per_read = std::max<uint64_t>(kAtOnce / sums.block_size, 1) * sums.block_size;
  AlignedBuffer buffer(static_cast<size_t>(std::min(per_read, std::max<uint64_t>(sums.covered, 1))));
  uint64_t bad_from = 0, bad_to = 0;  // blocks
  const auto report = [&] {
    if (bad_from == bad_to) return;
    const uint64_t begin = bad_from * sums.block_size, end = std::min(bad_to * sums.block_size, sums.covered);
    damage.push_back(str(path, ": bytes ", begin, " to ", end, " (block", bad_to - bad_from > 1 ? "s " : " ", bad_from,
                         bad_to - bad_from > 1 ? str(" to ", bad_to - 1) : "",
                         ") don't match their checksum: ", index ? tensors_in(*index, begin, end) : "tensors unknown"));
    bad_from = bad_to = 0;
  };
  for (uint64_t at = 0; at < sums.covered; at += per_read) {
    const uint64_t length = std::min(per_read, sums.covered - at);
    const std::span<std::byte> bytes(buffer.data(), static_cast<size_t>(length));
    file->read(at, bytes);
    for (uint64_t in = 0; in < length; in += sums.block_size) {
      const uint64_t block = (at + in) / sums.block_size;
      const uint64_t size = std::min(sums.block_size, length - in);
      if (crc32(bytes.subspan(static_cast<size_t>(in), static_cast<size_t>(size))) ==
          sums.crc.at(static_cast<size_t>(block)))
        continue;
      if (bad_to != block) report();
      if (bad_from == bad_to) bad_from = block;
      bad_to = block + 1;
    }
    done(length);
  }
  report();
}

}  // namespace

Index read_partial(Storage& storage, const std::string& folder, const Manifest& manifest) {
  Index whole;
  whole.format = "partial";
  for (const ManifestFile& file : manifest.files) {
    const std::string path = join(folder, file.name), kind = kind_of(file.name);
    check_file(storage, path, file);
    Index next = read_pt(storage, path);
    add_kind(next, kind);
    if (is_shared(kind)) drop_repeated_numbers(whole, next);
    std::vector<std::string> names;
    for (const TensorEntry& tensor : next.tensors) names.push_back(tensor.name);
    Value value = std::move(next.values);
    whole.merge(std::move(next));
    std::vector<size_t> numbers;
    for (const std::string& name : names)
      numbers.push_back(static_cast<size_t>(whole.find(name) - whole.tensors.data()));
    Renumber{numbers}(value);
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

std::vector<std::string> verify_partial(Storage& storage, const std::string& folder, const Manifest& manifest,
                                        const Progress& progress) {
  std::vector<std::string> damage;
  uint64_t total = 0, done = 0;
  for (const ManifestFile& file : manifest.files) total += file.size;
  for (const ManifestFile& file : manifest.files) {
    const std::string path = join(folder, file.name);
    const auto advance = [&](uint64_t bytes) {
      done += bytes;
      if (progress) progress({"verify", done, total, "bytes"});
    };
    try {
      check_file(storage, path, file);
      const PtRecord record = read_pt_record(storage, path);
      std::optional<Index> index;
      try {
        index = read_pt(storage, path);
      } catch (const Error& e) {
        damage.push_back(e.what());
      }
      if (record.checksums) {
        verify_blocks(storage, path, *record.checksums, index ? &*index : nullptr, damage, advance);
        if (tail_digest(storage, path) != file.tail) {
          damage.push_back(str(path, ": bytes ", record.checksums->covered, " to ", file.size,
                               " (slice list, checksums and directory) don't match the manifest"));
        }
        advance(file.size - record.checksums->covered);
      }
    } catch (const Error& e) {
      damage.push_back(e.what());
    }
  }
  if (!damage.empty()) return damage;
  try {  // each file is sound; together they must hold every tensor
    read_partial(storage, folder, manifest);
  } catch (const Error& e) {
    damage.push_back(e.what());
  }
  return damage;
}

}  // namespace shardsmith
