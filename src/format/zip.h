// The zip container of torch's files: read with suspicion, written by arithmetic.
// Read: stored and deflated records, zip64. Not read: encryption, several disks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "storage/storage.h"

namespace shardsmith {

struct ZipRecord {
  std::string name;
  uint64_t header = 0;  // where its local header begins
  uint64_t data = 0;    // where its bytes begin
  uint64_t stored = 0;  // bytes in the file
  uint64_t size = 0;    // bytes once inflated
  uint32_t crc = 0;     // 0: the writer took none
  bool deflated = false;
};

// All records, in the central directory's order. Throws kCorrupt that names file and record: names that stand twice,
// records that overlap or leave the file, sizes that no deflated record of that length can have.
std::vector<ZipRecord> read_zip(ReadFile& file);

// The central directory alone, for those who want one record of many: where a record's bytes begin only its local
// header says, and each of those is a read somewhere else in the file. `data` of the records is 0; names are told
// apart.
struct ZipDirectory {
  std::vector<ZipRecord> records;
  uint64_t begin = 0;  // of the directory: all records lie before it
};
ZipDirectory read_zip_directory(ReadFile& file);
// Reads the local header of one of them and fills in `data`. Throws as read_zip does, but says nothing of other
// records.
void locate_record(ReadFile& file, const ZipDirectory& directory, ZipRecord& record);

// A whole record, inflated, its CRC checked (unless it is 0). kCorrupt if it is larger than `limit`.
std::string read_record(ReadFile& file, const ZipRecord& record, uint64_t limit);

// Writing. Bytes of one record, in the order in which they lie in the file:
//   local header (30) + name + extra fields | data | data descriptor
// The sizes are known, so each function is arithmetic; only the CRCs come later, into descriptor and directory.
struct ZipLayout {
  // Adds a record of `size` bytes whose data lie at a multiple of `alignment`; returns where they begin.
  uint64_t add(std::string name, uint64_t size, uint64_t alignment);
  const std::vector<ZipRecord>& records() const { return records_; }
  std::string local_header(size_t i) const;  // from records()[i].header up to its data
  std::string descriptor(size_t i, uint32_t crc) const;
  // Central directory and the tail; begins at end().
  std::string directory(const std::vector<uint32_t>& crcs) const;
  uint64_t end() const { return end_; }

 private:
  std::vector<ZipRecord> records_;
  uint64_t end_ = 0;
};

}  // namespace shardsmith
