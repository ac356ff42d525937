#include <algorithm>

#include "base/error.h"
#include "format/bytes.h"
#include "format/torch_object.h"

namespace shardsmith {
namespace {

constexpr uint64_t kMaxDeflatedPickle = 64 << 20;

std::string first_bytes(ReadFile& file, uint64_t count) {
  std::string bytes(std::min(file.size(), count), '\0');
  file.read(0, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

// A pickle of the number 0x1950a86a20f9469cfc6c, in any protocol that torch.save was ever asked for.
bool is_legacy(std::string_view head) {
  if (head.size() < 2 || head[0] != '\x80' || head[1] < 2 || head[1] > 5) return false;
  head.remove_prefix(2);
  if (head.size() >= 9 && head[0] == '\x95') head.remove_prefix(9);  // a frame
  return head.starts_with(std::string_view("\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", 12));
}

// The first member of the archives that torch wrote in its first year.
bool is_tar(std::string_view head) {
  if (head.size() < 262 || head.substr(257, 5) != "ustar") return false;
  const std::string_view name = head.substr(0, head.find('\0'));
  return name == "sys_info" || name == "pickle" || name == "tensors" || name == "storages";
}

void check_version(const TorchArchive& archive, const std::string& path) {
  const std::string version = archive.text(".data/version", archive.text("version", "3"));
  const bool known = version == "10" || (version.size() == 1 && version[0] >= '1' && version[0] <= '9');
  if (!known)
    fail(ErrorKind::kUnsupported, path, ": torch's file version '", version.substr(0, 20), "', known are 1 to 10");
}

bool is_big_endian(const TorchArchive& archive, const std::string& path) {
  const std::string order = archive.text("byteorder", "little");
  if (order != "little" && order != "big") fail(ErrorKind::kCorrupt, path, ": byte order '", order, "'");
  return order == "big";
}

}  // namespace

TorchArchive::TorchArchive(ReadFile& file) : file_(file) {
  const std::string head = first_bytes(file, 8);
  if (head.starts_with("PYTORCH1"))
    fail(ErrorKind::kUnsupported, file.path(), ": a preview format of torch that torch itself doesn't read any more");
  if (!head.starts_with("PK\x03\x04"))
    fail(ErrorKind::kCorrupt, file.path(), ": not a torch file: it doesn't begin like a zip archive");
  records_ = read_zip(file);
  if (records_.empty()) fail(ErrorKind::kCorrupt, file.path(), ": an empty zip archive");
  const size_t slash = records_[0].name.find('/');
  if (slash == std::string::npos)
    fail(ErrorKind::kCorrupt, file.path(), ": not a torch file: its records lie in no folder");
  prefix_ = records_[0].name.substr(0, slash + 1);
  for (const ZipRecord& record : records_) by_name_.emplace(record.name, &record);
}

const ZipRecord* TorchArchive::find(const std::string& name) const {
  const auto found = by_name_.find(prefix_ + name);
  return found == by_name_.end() ? nullptr : found->second;
}

std::string TorchArchive::text(const std::string& name, const std::string& otherwise) const {
  const ZipRecord* record = find(name);
  if (!record) return otherwise;
  const std::string all = read(*record, 64);
  const size_t begin = all.find_first_not_of(" \r\n"), end = all.find_last_not_of(" \r\n");
  return begin == std::string::npos ? "" : all.substr(begin, end - begin + 1);
}

TorchContainer torch_container(ReadFile& file) {
  const std::string head = first_bytes(file, 262);
  if (head.starts_with("PK\x03\x04")) return TorchContainer::kZip;
  if (is_legacy(head)) return TorchContainer::kLegacy;
  return is_tar(head) ? TorchContainer::kTar : TorchContainer::kNone;
}

TorchObject read_torch_object(ReadFile& file, uint64_t base) {
  const std::string& path = file.path();
  const TorchContainer container = torch_container(file);
  if (container == TorchContainer::kLegacy) return read_legacy_object(file, base);
  if (container == TorchContainer::kTar)
    fail(ErrorKind::kUnsupported, path,
         ": a tar archive, torch's format of 2016, whose reading would execute what is in it; if you trust it, load it "
         "in torch with weights_only=False and save it again");
  const TorchArchive archive(file);
  if (archive.find("constants.pkl"))
    fail(ErrorKind::kUnsupported, path,
         ": a TorchScript program, not a checkpoint; save the model's state_dict instead");
  const ZipRecord* pickle = archive.find("data.pkl");
  if (!pickle) fail(ErrorKind::kCorrupt, path, ": a zip archive, but not one of torch's: it has no record 'data.pkl'");
  check_version(archive, path);

  TorchObject object;
  object.big_endian = is_big_endian(archive, path);
  if (const ZipRecord* record = archive.find(kPtRecordName))
    object.record = parse_pt_record(archive.read(*record, kMaxPtRecord), *record, path);
  object.pickled = read_pickle(archive.read(*pickle, pickle->deflated ? kMaxDeflatedPickle : kMaxPickle), path);
  for (const PickledStorage& held : object.pickled.storages) {
    const ZipRecord* record = archive.find("data/" + held.key);
    if (!record)
      fail(ErrorKind::kCorrupt, path, ": record 'data/", held.key, "' is missing, though a tensor lies in it");
    if (record->size != held.bytes)
      fail(ErrorKind::kCorrupt, path, ": record 'data/", held.key, "' has ", record->size, " bytes instead of ",
           held.bytes);
    object.storages.push_back({base + record->data, record->stored, record->deflated});
  }
  return object;
}

}  // namespace shardsmith
