// A .pt file of ours laid out by arithmetic, so that several ranks can write it: where each byte lies is known before
// the first is written, and all checksums follow from those of its data sections.
//
//   data.pkl, byteorder, data/0 ... data/N, version | shardsmith, directory
//   <---------------- covered() -----------------> <------- tail ------->
//
// A data section is what one block (1 MiB, counted from the file's start) holds of one storage. Every other covered
// byte is known to all, but for the descriptors behind the storages, which hold their CRC-32.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "format/pt.h"
#include "format/pt_record.h"
#include "format/pt_write.h"
#include "format/stream_writer.h"

namespace shardsmith {

class PtFile {
 public:
  // Of the storages only the sizes are looked at. `path` is for messages. Throws what write_pt throws. The length of
  // the extra value counts: finish() may be given another one of the same length.
  PtFile(const PtContent& content, std::string path);
  PtFile(const PtFile&) = delete;

  const std::string& path() const { return path_; }
  uint64_t covered() const { return covered_; }
  uint64_t size() const { return size_; }
  size_t storages() const { return storage_sizes_.size(); }
  uint64_t storage_begin(size_t storage) const { return record(storage).data; }
  uint64_t storage_size(size_t storage) const { return storage_sizes_[storage]; }
  // CRC-32 of the pickle, of where all lies and of the record: equal for equal layouts.
  uint32_t fingerprint() const;

  // Data sections are numbered through the file. Those of a storage, from first_section(i) to first_section(i + 1).
  size_t sections() const { return first_section_.back(); }
  size_t first_section(size_t storage) const { return first_section_[storage]; }
  struct Section {
    size_t number = 0, storage = 0;
    uint64_t offset = 0;  // in the storage
    uint64_t length = 0;
  };
  // Those that lie in bytes [begin, end) of the file; both are multiples of the block, or `end` is covered().
  std::vector<Section> sections_in(uint64_t begin, uint64_t end) const;

  // Of a whole storage, from its sections' checksums.
  uint32_t storage_crc(size_t storage, const std::vector<uint32_t>& sections) const;

  struct Tail {
    std::string bytes;                // all from covered() on
    std::string digest, tail_digest;  // as Written::digest and ManifestFile::tail
  };
  // From the checksums of all sections. `extra` takes the place of PtContent::extra.
  Tail finish(const std::vector<uint32_t>& sections, const Value& extra) const;

  // Covered bytes that are no storage's data, in the order in which they lie. A descriptor's bytes are wanted by its
  // storage's number, those of the rest are given.
  struct Piece {
    enum class Kind { kFixed, kData, kDescriptor };
    Kind kind = Kind::kFixed;
    uint64_t begin = 0, end = 0;
    size_t storage = 0;  // of kData and kDescriptor
    std::string_view fixed;
  };
  const std::vector<Piece>& pieces() const { return pieces_; }
  std::string descriptor(size_t storage, uint32_t crc) const;

 private:
  static constexpr size_t kBefore = 2;  // records before the storages
  const ZipRecord& record(size_t storage) const { return zip_->layout().records()[kBefore + storage]; }
  void lay_out();
  uint32_t record_crc(size_t record, const std::vector<uint32_t>& sections) const;

  std::string path_, pickle_;
  std::vector<PtSlice> slices_;
  bool with_record_;
  std::optional<TorchZip> zip_;
  std::vector<uint64_t> storage_sizes_;
  uint64_t covered_ = 0, size_ = 0;
  std::string blank_record_;  // without checksums
  std::vector<size_t> first_section_;
  std::vector<std::string> headers_;  // of the covered records
  std::vector<Piece> pieces_;
};

// Where the bytes of a file's storages come from.
class SectionSource {
 public:
  virtual ~SectionSource() = default;
  // Where a section lies whole in memory, or null.
  virtual const std::byte* memory(const PtFile::Section&) { return nullptr; }
  // Otherwise: its bytes.
  virtual void fill(const PtFile::Section& section, std::span<std::byte> out) = 0;
};

// The storages of a content, as they stand in it.
class ContentSource final : public SectionSource {
 public:
  explicit ContentSource(const PtContent& content) : content_(content) {}
  const std::byte* memory(const PtFile::Section& section) override;
  void fill(const PtFile::Section& section, std::span<std::byte> out) override;

 private:
  const PtContent& content_;
};

// Writes ranges of the covered bytes into a stream. Descriptors of storages whose other sections somebody else writes
// are left out (zeros stand there) until all checksums are known. One thread.
class PtRanges {
 public:
  explicit PtRanges(const PtFile& file);

  // Bytes [begin, end), bounds as in PtFile::sections_in, in ascending order.
  void write(StreamWriter& out, uint64_t begin, uint64_t end, SectionSource& source);
  // By section number; those that were not written here are 0 until set.
  std::vector<uint32_t>& crcs() { return crcs_; }
  // What was left out, now that all of crcs() are known.
  void write_rest(WriteFile& file);

 private:
  bool is_known(size_t storage) const;

  const PtFile& file_;
  std::vector<uint32_t> crcs_;
  std::vector<bool> known_;
  struct Hole {
    size_t storage;
    uint64_t begin, end;  // in the file: of a descriptor's bytes, those in a range of ours
  };
  std::vector<Hole> holes_;
};

}  // namespace shardsmith
