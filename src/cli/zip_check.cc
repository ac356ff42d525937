#include "cli/zip_check.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>
#include <span>

#include "base/checksum.h"
#include "base/error.h"
#include "format/zip.h"

namespace shardsmith::cli {
namespace {

constexpr uint64_t kChunk = 4 << 20;
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
std::string check_record(ReadFile& file, const ZipRecord& record, AlignedBuffer& buffer,
                         const std::function<void(uint64_t)>& advance) {
  const std::string where = str(file.path(), ": record '", record.name, "'");
  Inflater inflater;
  uint32_t crc = 0;
  for (uint64_t at = 0; at < record.stored;) {
    const std::span chunk(buffer.data(), std::min<uint64_t>(buffer.size(), record.stored - at));
    file.read(record.data + at, chunk);
    if (!record.deflated) {
      crc = crc32(chunk, crc);
    } else if (!inflater.feed(chunk, record.size)) {
      return where + ": its compressed data is damaged";
    }
    at += chunk.size();
    advance(chunk.size());
  }
  if (record.deflated) {
    crc = inflater.crc();
    if (inflater.size() != record.size) {
      return str(where, ": inflates to ", inflater.size(), " bytes, ", record.size, " were expected");
    }
  }
  if (crc == record.crc || record.crc == 0) return "";
  char text[64];
  std::snprintf(text, sizeof text, "checksum %08x, expected %08x", crc, record.crc);
  return str(where, " (bytes ", record.data, "-", record.data + record.stored, "): ", text);
}

}  // namespace

bool looks_like_zip(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  std::array<std::byte, 4> magic;
  if (file->size() < magic.size()) return false;
  file->read(0, magic);
  return std::memcmp(magic.data(), "PK\3\4", magic.size()) == 0;
}

std::vector<std::string> check_zip(Storage& storage, const std::string& path, const Progress& progress) {
  const auto file = storage.open_read(path);
  const auto records = read_zip(*file);
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
