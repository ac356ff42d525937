#include "cli/zip_check.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <span>

#include "base/checksum.h"
#include "base/error.h"
#include "format/dcp_metadata.h"
#include "format/file_range.h"

namespace shardsmith::cli {
namespace {

constexpr uint64_t kChunk = 4 << 20;

// The CRC of raw deflate data's content, fed in chunks.
class Inflater {
 public:
  Inflater() {
    if (inflateInit2(&stream_, -MAX_WBITS) != Z_OK) throw std::bad_alloc();
  }
  ~Inflater() { inflateEnd(&stream_); }
  Inflater(const Inflater&) = delete;
  // False where the data is damaged or inflates to more than `limit` bytes.
  bool feed(std::span<const std::byte> bytes, uint64_t limit) {
    stream_.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(bytes.data()));
    stream_.avail_in = static_cast<uInt>(bytes.size());
    do {
      stream_.next_out = reinterpret_cast<Bytef*>(out_.data());
      stream_.avail_out = static_cast<uInt>(out_.size());
      const int code = inflate(&stream_, Z_NO_FLUSH);
      const size_t got = out_.size() - stream_.avail_out;
      crc_ = crc32(std::span(out_.data(), got), crc_);
      size_ += got;
      if (size_ > limit) return false;
      if (code == Z_STREAM_END) return stream_.avail_in == 0;
      if (code != Z_OK && code != Z_BUF_ERROR) return false;
    } while (stream_.avail_in > 0 || stream_.avail_out == 0);
    return true;
  }
  uint32_t crc() const { return crc_; }
  uint64_t size() const { return size_; }

 private:
  z_stream stream_{};
  std::array<std::byte, 1 << 16> out_;
  uint32_t crc_ = 0;
  uint64_t size_ = 0;
};

std::string named(const ZipRecord& record) { return "record '" + record.name + "'"; }

std::string compare(ReadFile& file, const ZipRecord& record, uint32_t crc) {
  if (crc == record.crc) return "";
  char text[64];
  std::snprintf(text, sizeof text, "checksum %08x, expected %08x", crc, record.crc);
  return str(file.path(), ": ", named(record), " (bytes ", record.data, "-", record.data + record.stored, "): ", text);
}

// "" where the record is sound.
std::string check_deflated(ReadFile& file, const ZipRecord& record, AlignedBuffer& buffer,
                           const std::function<void(uint64_t)>& done) {
  const std::string where = str(file.path(), ": ", named(record));
  Inflater inflater;
  for (uint64_t at = 0; at < record.stored;) {
    const std::span chunk(buffer.data(), std::min<uint64_t>(buffer.size(), record.stored - at));
    file.read(record.data + at, chunk);
    if (!inflater.feed(chunk, record.size)) return where + ": its compressed data is damaged";
    at += chunk.size();
    done(chunk.size());
  }
  if (inflater.size() != record.size) {
    return str(where, ": inflates to ", inflater.size(), " bytes, ", record.size, " were expected");
  }
  return compare(file, record, inflater.crc());
}

// The checksum of some bytes of a record.
struct Piece {
  uint64_t at = 0, length = 0;
  uint32_t crc = 0;
};

uint32_t joined(std::vector<Piece> pieces) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.at < b.at; });
  uint32_t crc = 0;
  for (const Piece& piece : pieces) crc = crc32_combine(crc, piece.crc, piece.length);
  return crc;
}

// Stored records, one after another by their places: the file is read over all of them in one go.
std::vector<std::string> check_stored(ReadFile& file, const std::vector<ZipRecord>& records, ParallelReader& reader,
                                      const std::function<void(uint64_t)>& done) {
  if (records.empty()) return {};
  std::mutex mutex;  // guards the pieces, and `done`
  std::vector<std::vector<Piece>> pieces(records.size());
  const uint64_t begin = records.front().data, end = records.back().data + records.back().stored;
  reader.read(file, begin, end, [&](uint64_t at, std::span<const std::byte> bytes) {
    const uint64_t stop = at + bytes.size();
    std::vector<std::pair<size_t, Piece>> here;
    const auto first = std::partition_point(records.begin(), records.end(),
                                            [&](const ZipRecord& record) { return record.data + record.stored <= at; });
    uint64_t summed = 0;
    for (auto record = first; record != records.end() && record->data < stop; ++record) {
      const uint64_t from = std::max(at, record->data), to = std::min(stop, record->data + record->stored);
      if (from >= to) continue;
      const auto part = bytes.subspan(static_cast<size_t>(from - at), static_cast<size_t>(to - from));
      here.push_back({static_cast<size_t>(record - records.begin()), {from, to - from, crc32(part)}});
      summed += to - from;
    }
    const std::lock_guard lock(mutex);
    for (auto& [record, piece] : here) pieces[record].push_back(piece);
    done(summed);
  });
  std::vector<std::string> damage;
  for (size_t i = 0; i < records.size(); ++i) {
    auto line = compare(file, records[i], joined(std::move(pieces[i])));
    if (!line.empty()) damage.push_back(std::move(line));
  }
  return damage;
}

}  // namespace

bool looks_like_zip(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  std::array<std::byte, 4> magic;
  if (file->size() < magic.size()) return false;
  file->read(0, magic);
  return std::memcmp(magic.data(), "PK\3\4", magic.size()) == 0;
}

ZipCheck check_records(ReadFile& file, std::vector<ZipRecord> records, ParallelReader& reader,
                       const std::function<void(uint64_t)>& done) {
  ZipCheck check;
  check.records = records.size();
  // A record without a byte has the checksum 0, as one without a checksum has.
  check.without_checksum = static_cast<size_t>(
      std::erase_if(records, [](const ZipRecord& record) { return record.crc == 0 && record.size != 0; }));
  std::vector<ZipRecord> stored;
  AlignedBuffer buffer(kChunk);
  for (const ZipRecord& record : records) {
    if (!record.deflated) {
      stored.push_back(record);
      continue;
    }
    auto line = check_deflated(file, record, buffer, done);
    if (!line.empty()) check.damage.push_back(std::move(line));
  }
  std::sort(stored.begin(), stored.end(), [](const ZipRecord& a, const ZipRecord& b) { return a.data < b.data; });
  auto lines = check_stored(file, stored, reader, done);
  std::move(lines.begin(), lines.end(), std::back_inserter(check.damage));
  return check;
}

std::map<std::string, std::vector<ZipRecord>> dcp_records(Storage& storage, const std::string& folder) {
  constexpr std::string_view kMetadata = ".metadata";
  constexpr uint64_t kMostMetadata = 1 << 30;
  std::map<std::string, std::map<uint64_t, uint64_t>> items;  // file -> offset -> length
  const auto add = [&](const DcpItem& item) {
    if (!item.file.empty()) items[item.file].emplace(item.offset, item.length);
  };
  for (const std::string& name : storage.list(folder)) {
    if (!name.ends_with(kMetadata) || storage.stat(join(folder, name)).is_directory) continue;
    const std::string path = join(folder, name);
    for (const DcpEntry& entry : parse_dcp_metadata(read_text(storage, path, kMostMetadata), path)) {
      if (!entry.is_tensor) add(entry.item);
      for (const DcpChunk& chunk : entry.chunks) add(chunk.item);
    }
  }
  std::map<std::string, std::vector<ZipRecord>> records;
  for (const auto& [name, places] : items) {
    const auto file = storage.open_read(join(folder, name));
    for (const auto& [offset, length] : places) {
      FileRange range(*file, offset, length, str(file->path(), ": item at ", offset));
      for (ZipRecord record : read_zip(range)) {
        record.name += str(" of the item at ", offset);
        record.data += offset;
        record.header += offset;
        records[name].push_back(std::move(record));
      }
    }
  }
  return records;
}

}  // namespace shardsmith::cli
