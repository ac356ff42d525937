// Index: what a checkpoint holds. Every format that we read ends in one and adds nothing else.
//
//     any source --> Index --> Plan --> moved bytes --> any target
//
// A plain value. Building it reads headers only, never tensor data.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/value.h"
#include "layout/box.h"
#include "layout/dtype.h"

namespace shardsmith {

enum class Encoding : uint8_t { kRaw, kByteSwapped, kDeflated };

// Where some elements of a tensor lie. Element i (in the tensor's own coordinates, inside `box`)
// is at byte  offset + size_of(dtype) * sum_d (i[d] - box.offset[d]) * strides[d]  of files[file].
// For kDeflated, `offset` and `stored` delimit the deflated record, and `inner` is the offset in it.
struct Slice {
  Box box;
  uint32_t file = 0;
  uint64_t offset = 0;
  Strides strides;
  Encoding encoding = Encoding::kRaw;
  uint64_t stored = 0;
  uint64_t inner = 0;
};

struct TensorEntry {
  std::string name;  // flat spelling, see base/value.h
  Dtype dtype = Dtype::kF32;
  Shape shape;  // the true global shape
  std::vector<Slice> slices;
  // The name under which these elements are stored, if this is a second name of them (a tie).
  std::string alias_of;
};

// CRC-32 of consecutive blocks of a file, counted from its start; the last may be shorter.
struct BlockChecksums {
  uint64_t block_size = 1 << 20;
  uint64_t covered = 0;  // bytes from the file's start that the blocks cover
  std::vector<uint32_t> crc;
};

struct FileEntry {
  std::string path;
  uint64_t size = 0;
  std::shared_ptr<const BlockChecksums> checksums;  // null where the format has none
};

struct Index {
  std::string format;  // "pt", "safetensors", "hf", "partial", ...
  std::vector<FileEntry> files;
  std::vector<TensorEntry> tensors;
  Value values;  // everything else; TensorRef::index counts in `tensors`

  // Linear-time build, then constant-time look-up. Null where there is none.
  const TensorEntry* find(std::string_view name) const;
  // Adds `other`'s files and tensors; slices of a name that both have are joined (dtype and shape
  // must agree: kCorrupt otherwise). `other.values` is dropped. Returns where each of other's tensors is now.
  std::vector<size_t> merge(Index other);
  // Must be called after `tensors` was changed from outside.
  void reindex();

 private:
  // The place of a name in the table, or a free one. The table holds numbers + 1 and is at most half full.
  size_t slot_of(std::string_view name) const;
  void reserve_slots(size_t count);

  std::vector<uint32_t> slots_;
  size_t indexed_ = 0;  // tensors that are in the table
};

// The entry that has `tensor`'s elements: ties are followed. Null where there is none; throws kCorrupt for a tie to
// itself.
const TensorEntry* stored_entry(const Index& index, const TensorEntry& tensor);

// Throws kCorrupt, naming tensor and file, unless every slice lies inside its tensor's shape and
// its file, with checked arithmetic, and the slices of each tensor cover every element exactly once
// (aliases are exempt). `require_cover` false: bounds only.
void validate(const Index& index, bool require_cover = true);

}  // namespace shardsmith
