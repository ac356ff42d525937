// torch's `.pt`: a zip of stored records, one of them a pickle that is read as data.
// Bytes: docs/formats/pt.md. Nothing in a file is ever executed.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "base/value.h"
#include "format/source.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

// True if the file begins like a zip, like a torch file from before the zips, or like torch's tar archives of 2016
// (which read_pt refuses, saying so).
bool is_pt(Storage& storage, const std::string& path);

// Reads the directory, the pickle and, in files of ours, the slice list; no tensor data.
// Tensor names are flat paths of the pickled object. In a file with a slice list, shapes are the global ones and
// boxes are set from it, and a listed name stands in for the path. Throws kCorrupt for anything that isn't right,
// naming file and record; kUnsupported for TorchScript, meta tensors and the like; the name of a forbidden global is in
// the text. Files from before torch 1.6 are read too; of sparse and quantised tensors see format/pickle.h. Tensors
// whose storage is deflated get Encoding::kDeflated; `byteorder` big gives kByteSwapped. `digest`, if given, becomes
// that of the extra record ("" where there is none), as PtRecord::digest.
Index read_pt(Storage& storage, const std::string& path, std::string* digest = nullptr);

// The extra record alone, without the pickle: what a commit or a scan needs to know a file by.
struct PtRecord {
  bool present = false;  // false: a file of another tool
  uint64_t file_size = 0;
  std::string digest;  // as Written::digest; recomputed from the bytes that are there
  Value extra;         // PtContent::extra; tuples come back as lists
  std::shared_ptr<const BlockChecksums> checksums;
};
PtRecord read_pt_record(Storage& storage, const std::string& path);

// PtRecord::digest alone, without parsing what the record holds: a digest that is the manifest's is of the record that
// was saved. "" where there is no record.
std::string read_pt_digest(Storage& storage, const std::string& path);

struct PtTensor {
  Dtype dtype = Dtype::kF32;
  size_t storage = 0;  // which of PtContent::storages
  int64_t offset = 0;  // elements
  Shape size;
  Strides strides;
  bool requires_grad = false;
  // For the slice list: the tensor's name (flat path), its true global shape, and the box that this
  // file holds of it. Empty name: not in the list (step counters and the like).
  std::string name;
  Shape global;
  Box box;
};

struct PtContent {
  Value value;  // TensorRef::index counts in `tensors`
  std::vector<PtTensor> tensors;
  std::vector<ByteSource> storages;  // bytes little-endian; several tensors may share one
  // Goes into the extra record as it is: save id, digests of companions, slices held by other files.
  Value extra;
  // False: no extra record at all (a file for other tools).
  bool with_slices = true;
};

struct Written {
  uint64_t size = 0;
  // Digest (CRC-32 in hex, 8 digits) of the extra record's bytes; it in turn covers every block of the file.
  std::string digest;
  std::string tail;  // CRC-32, alike, of what the blocks don't cover: from the extra record to the end
};

// Writes a file that loads with torch.load(weights_only=True, mmap=True): stored records, those of 64 KiB and more at
// multiples of 4096, no `.format_version`. Synced when it returns. What weights_only refuses is written as tagged plain
// dicts ({"__shardsmith__": kind, ...}), which read_pt turns back.
Written write_pt(Storage& storage, const std::string& path, const PtContent& content);

}  // namespace shardsmith
