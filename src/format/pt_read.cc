#include <optional>

#include "base/error.h"
#include "format/pt.h"
#include "format/pt_record.h"
#include "format/torch_object.h"

namespace shardsmith {
namespace {

// Without the local headers of all the others, which lie all over a large file.
std::optional<ZipRecord> find_extra_record(ReadFile& file) {
  ZipDirectory directory = read_zip_directory(file);
  if (directory.records.empty()) fail(ErrorKind::kCorrupt, file.path(), ": an empty zip archive");
  const std::string& first = directory.records.front().name;
  const size_t slash = first.find('/');
  if (slash == std::string::npos)
    fail(ErrorKind::kCorrupt, file.path(), ": not a torch file: its records lie in no folder");
  const std::string name = first.substr(0, slash + 1) + kPtRecordName;
  for (ZipRecord& record : directory.records) {
    if (record.name != name) continue;
    locate_record(file, directory, record);
    return std::move(record);
  }
  return std::nullopt;
}

// The extra record's place and bytes; nothing in files that have none.
std::optional<std::pair<ZipRecord, std::string>> extra_record_of(ReadFile& file) {
  const TorchContainer container = torch_container(file);
  if (container == TorchContainer::kLegacy) return std::nullopt;
  if (container != TorchContainer::kZip) const TorchArchive says_what_it_is(file);
  std::optional<ZipRecord> record = find_extra_record(file);
  if (!record) return std::nullopt;
  std::string bytes = read_record(file, *record, kMaxPtRecord);
  return std::pair(std::move(*record), std::move(bytes));
}

}  // namespace

bool is_pt(Storage& storage, const std::string& path) {
  if (storage.stat(path).is_directory) return false;
  return torch_container(*storage.open_read(path)) != TorchContainer::kNone;
}

Index read_pt(Storage& storage, const std::string& path, std::string* digest) {
  const auto file = storage.open_read(path);
  TorchObject object = read_torch_object(*file);
  if (digest) *digest = object.record.digest;
  Index index;
  index.format = "pt";
  index.files.push_back({path, file->size(), object.record.checksums});
  index.values = add_entries(std::move(object), "", 0, index);
  index.reindex();
  return index;
}

PtRecord read_pt_record(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  PtRecord result;
  result.file_size = file->size();
  const auto found = extra_record_of(*file);
  if (!found) return result;
  PtRecordContent content = parse_pt_record(found->second, found->first, path);
  result.present = true;
  result.digest = std::move(content.digest);
  result.extra = std::move(content.extra);
  result.checksums = std::move(content.checksums);
  return result;
}

std::string read_pt_digest(Storage& storage, const std::string& path) {
  const auto found = extra_record_of(*storage.open_read(path));
  return found ? digest_of(found->second) : "";
}

}  // namespace shardsmith
