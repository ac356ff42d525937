#include "cli/zip_check.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "base/checksum.h"
#include "base/error.h"
#include "cli/output.h"

namespace shardsmith::cli {
namespace {

constexpr uint64_t kChunk = 4 << 20;
constexpr uint32_t kEndSignature = 0x06054b50, kEnd64Signature = 0x06064b50, kLocatorSignature = 0x07064b50;
constexpr uint32_t kCentralSignature = 0x02014b50, kLocalSignature = 0x04034b50;
constexpr uint32_t kIn64 = 0xFFFFFFFF;  // the real number is in the zip64 field

// Little-endian numbers out of bytes whose length the caller has checked.
template <typename T>
T number(std::span<const std::byte> bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

std::vector<std::byte> read_bytes(ReadFile& file, uint64_t offset, uint64_t length) {
  if (offset > file.size() || length > file.size() - offset) {
    fail(ErrorKind::kCorrupt, file.path(), ": truncated: the zip speaks of bytes ", offset, " to ", offset + length,
         ", the file has ", file.size());
  }
  std::vector<std::byte> bytes(length);
  if (length > 0) file.read(offset, bytes);
  return bytes;
}

struct Record {
  std::string name;
  uint16_t method = 0;
  uint32_t crc = 0;
  uint64_t stored = 0, size = 0, header = 0;
};

struct Directory {
  uint64_t offset = 0, length = 0, count = 0;
};

Directory find_directory(ReadFile& file) {
  constexpr uint64_t kEndLength = 22, kLongestComment = 0xFFFF;
  const uint64_t tail_length = std::min(file.size(), kEndLength + kLongestComment);
  const auto tail = read_bytes(file, file.size() - tail_length, tail_length);
  for (uint64_t back = kEndLength; back <= tail_length; ++back) {
    const auto end = std::span(tail).subspan(tail_length - back);
    if (number<uint32_t>(end, 0) != kEndSignature) continue;
    Directory directory{number<uint32_t>(end, 16), number<uint32_t>(end, 12), number<uint16_t>(end, 10)};
    const uint64_t end_at = file.size() - back;
    if (end_at < 20) return directory;
    const auto locator = read_bytes(file, end_at - 20, 20);
    if (number<uint32_t>(locator, 0) != kLocatorSignature) return directory;
    const auto end64 = read_bytes(file, number<uint64_t>(locator, 8), 56);
    if (number<uint32_t>(end64, 0) != kEnd64Signature) break;
    return {number<uint64_t>(end64, 48), number<uint64_t>(end64, 40), number<uint64_t>(end64, 32)};
  }
  fail(ErrorKind::kCorrupt, file.path(), ": no end of a zip found: truncated, or no zip");
}

// The zip64 field holds those of size, stored size and header offset that didn't fit, in this order.
void read_zip64(Record& record, std::span<const std::byte> extra) {
  while (extra.size() >= 4) {
    const auto tag = number<uint16_t>(extra, 0);
    const size_t length = std::min<size_t>(number<uint16_t>(extra, 2), extra.size() - 4);
    auto field = extra.subspan(4, length);
    if (tag == 1) {
      for (uint64_t* value : {&record.size, &record.stored, &record.header}) {
        if (*value != kIn64 || field.size() < 8) continue;
        *value = number<uint64_t>(field, 0);
        field = field.subspan(8);
      }
    }
    extra = extra.subspan(4 + length);
  }
}

std::vector<Record> read_directory(ReadFile& file) {
  const Directory directory = find_directory(file);
  const auto bytes = read_bytes(file, directory.offset, directory.length);
  std::vector<Record> records;
  auto rest = std::span(std::as_const(bytes));
  for (uint64_t i = 0; i < directory.count; ++i) {
    if (rest.size() < 46 || number<uint32_t>(rest, 0) != kCentralSignature) {
      fail(ErrorKind::kCorrupt, file.path(), ": entry ", i, " of the zip's directory is damaged");
    }
    Record record{"",
                  number<uint16_t>(rest, 10),
                  number<uint32_t>(rest, 16),
                  number<uint32_t>(rest, 20),
                  number<uint32_t>(rest, 24),
                  number<uint32_t>(rest, 42)};
    const size_t name = number<uint16_t>(rest, 28), extra = number<uint16_t>(rest, 30),
                 comment = number<uint16_t>(rest, 32);
    if (rest.size() - 46 < name + extra + comment) {
      fail(ErrorKind::kCorrupt, file.path(), ": entry ", i, " of the zip's directory is damaged");
    }
    record.name.assign(reinterpret_cast<const char*>(rest.data()) + 46, name);
    read_zip64(record, rest.subspan(46 + name, extra));
    rest = rest.subspan(46 + name + extra + comment);
    records.push_back(std::move(record));
  }
  return records;
}

// Where a record's bytes begin: the local header's own name and extra field count.
uint64_t data_offset(ReadFile& file, const Record& record) {
  const auto local = read_bytes(file, record.header, 30);
  if (number<uint32_t>(local, 0) != kLocalSignature) {
    fail(ErrorKind::kCorrupt, file.path(), ": record ", record.name, " does not begin where the directory says");
  }
  return record.header + 30 + number<uint16_t>(local, 26) + number<uint16_t>(local, 28);
}

// The CRC of raw deflate data's content, fed in chunks. At most `size` bytes are inflated.
class Inflater {
 public:
  Inflater() {
    if (inflateInit2(&stream_, -MAX_WBITS) != Z_OK) throw std::bad_alloc();
  }
  ~Inflater() { inflateEnd(&stream_); }
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

// "" where the record is sound.
std::string check_record(ReadFile& file, const Record& record, AlignedBuffer& buffer,
                         const std::function<void(uint64_t)>& advance) {
  const std::string where = str(file.path(), ": record ", record.name);
  if (record.method != 0 && record.method != 8) return str(where, ": compressed by unknown method ", record.method);
  if (record.method == 0 && record.stored != record.size) return where + ": two sizes for one stored record";
  const uint64_t begin = data_offset(file, record);
  if (begin > file.size() || record.stored > file.size() - begin) return where + ": runs over the file's end";
  Inflater inflater;
  uint32_t crc = 0;
  for (uint64_t at = 0; at < record.stored;) {
    const std::span chunk(buffer.data(), std::min<uint64_t>(buffer.size(), record.stored - at));
    file.read(begin + at, chunk);
    if (record.method == 0) {
      crc = crc32(chunk, crc);
    } else if (!inflater.feed(chunk, record.size)) {
      return where + ": its compressed data is damaged";
    }
    at += chunk.size();
    advance(chunk.size());
  }
  if (record.method == 8) {
    crc = inflater.crc();
    if (inflater.size() != record.size) {
      return str(where, ": inflates to ", inflater.size(), " bytes, ", record.size, " were expected");
    }
  }
  if (crc == record.crc || record.crc == 0) return "";
  char text[64];
  std::snprintf(text, sizeof text, "checksum %08x, expected %08x", crc, record.crc);
  return str(where, " (bytes ", begin, "-", begin + record.stored, "): ", text);
}

}  // namespace

bool looks_like_zip(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  if (file->size() < 4) return false;
  return number<uint32_t>(read_bytes(*file, 0, 4), 0) == kLocalSignature;
}

std::vector<std::string> check_zip(Storage& storage, const std::string& path, const Progress& progress) {
  const auto file = storage.open_read(path);
  const auto records = read_directory(*file);
  uint64_t total = 0, done = 0;
  for (const auto& record : records) total += record.stored;
  AlignedBuffer buffer(kChunk);
  std::vector<std::string> damage;
  for (const auto& record : records) {
    auto line = check_record(*file, record, buffer, [&](uint64_t bytes) {
      done += bytes;
      if (progress) progress({"verify", done, total, "bytes"});
    });
    if (!line.empty()) damage.push_back(std::move(line));
  }
  return damage;
}

}  // namespace shardsmith::cli
