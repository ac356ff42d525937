// What torch.save wrote, whichever container it is in: a zip archive, or the row of pickles from before torch 1.6; a
// whole file, or a range of one.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "format/pickle.h"
#include "format/pt_record.h"
#include "format/zip.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

// Where a pickled storage lies. Offsets count from the start of the file on disk.
struct StoredBytes {
  uint64_t offset = 0;
  uint64_t stored = 0;  // bytes in the file
  bool deflated = false;
};

struct TorchObject {
  Pickled pickled;
  std::vector<StoredBytes> storages;  // of Pickled::storages
  bool big_endian = false;
  PtRecordContent record;  // empty in files of other tools
};

// The first bytes of `file`: what it is, or nothing that torch.save wrote.
enum class TorchContainer { kNone, kZip, kLegacy, kTar };
TorchContainer torch_container(ReadFile& file);

// Headers and the pickle; no tensor data. `base` is where `file` begins in the file on disk (see FileRange).
// Throws as read_pt does.
TorchObject read_torch_object(ReadFile& file, uint64_t base = 0);
// The row of pickles.
TorchObject read_legacy_object(ReadFile& file, uint64_t base);

// Gives each tensor of the object its name, a path that begins with `where`, and its entry in `index`, and makes the
// object's TensorRefs count there. `file` is the number of its file in index.files. Returns the value, untagged.
Value add_entries(TorchObject object, const std::string& where, uint32_t file, Index& index);

// A zip that torch wrote: every record's name begins with the first one's folder.
class TorchArchive {
 public:
  explicit TorchArchive(ReadFile& file);  // must outlive this
  TorchArchive(const TorchArchive&) = delete;
  const ZipRecord* find(const std::string& name) const;
  std::string read(const ZipRecord& record, uint64_t limit) const { return read_record(file_, record, limit); }
  // A small record's text without spaces around it; `otherwise` where there is none.
  std::string text(const std::string& name, const std::string& otherwise) const;

 private:
  ReadFile& file_;
  std::vector<ZipRecord> records_;
  std::string prefix_;
  std::unordered_map<std::string_view, const ZipRecord*> by_name_;
};

inline constexpr uint64_t kMaxPickle = 256 << 20, kMaxPtRecord = 256 << 20;

}  // namespace shardsmith
