#include "base/error.h"
#include "format/pt.h"
#include "format/pt_record.h"
#include "format/torch_object.h"

namespace shardsmith {

bool is_pt(Storage& storage, const std::string& path) {
  if (storage.stat(path).is_directory) return false;
  return torch_container(*storage.open_read(path)) != TorchContainer::kNone;
}

Index read_pt(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  TorchObject object = read_torch_object(*file);
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
  if (torch_container(*file) == TorchContainer::kLegacy) return result;
  const TorchArchive archive(*file);
  const ZipRecord* record = archive.find(kPtRecordName);
  if (!record) return result;
  const std::string bytes = archive.read(*record, kMaxPtRecord);
  PtRecordContent content = parse_pt_record(bytes, *record, path);
  result.present = true;
  result.digest = digest_of(bytes);
  result.extra = std::move(content.extra);
  result.checksums = std::move(content.checksums);
  return result;
}

}  // namespace shardsmith
