// The record `shardsmith` in a .pt file of ours: slice list, extra value, block checksums. JSON; see
// docs/formats/pt.md.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "format/pt.h"
#include "format/zip.h"

namespace shardsmith {

inline constexpr const char* kPtRecordName = "shardsmith";

// One line of the slice list.
struct PtSlice {
  size_t tensor = 0;  // its number in the pickle, in the order of appearance
  std::string name;
  Shape shape;
  Box box;
};

struct PtRecordContent {
  std::vector<PtSlice> slices;
  Value extra;
  std::shared_ptr<const BlockChecksums> checksums;
  std::string digest;  // of the record's bytes
};

// The bytes with every checksum 0; set_crcs fills them in, so that the length is known beforehand.
std::string make_pt_record(const std::vector<PtSlice>& slices, const Value& extra, uint64_t covered);
void set_crcs(std::string& record, const std::vector<uint32_t>& crcs);

// Throws kCorrupt, and kUnsupported for a newer version. `record` is its place in the zip: all before it is covered.
PtRecordContent parse_pt_record(std::string_view bytes, const ZipRecord& record, std::string_view where);

std::string digest_of(std::string_view record);

}  // namespace shardsmith
