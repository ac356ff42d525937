#include "format/zip.h"

#include <zlib.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <unordered_set>

#include "base/checksum.h"
#include "base/error.h"
#include "format/bytes.h"

namespace shardsmith {
namespace {

constexpr uint32_t kLocal = 0x04034b50, kCentral = 0x02014b50, kEnd = 0x06054b50, kEnd64 = 0x06064b50;
constexpr uint32_t kLocator64 = 0x07064b50, kDescriptor = 0x08074b50;
constexpr uint32_t kLarge = 0xffffffff;
constexpr uint64_t kMaxDirectory = 1ull << 30;
// Deflate can't do better than 1032 to 1: what declares more is a bomb.
constexpr uint64_t kMaxRatio = 1032;

std::string read_at(ReadFile& file, uint64_t offset, uint64_t length) {
  std::string bytes(length, '\0');
  file.read(offset, std::as_writable_bytes(std::span(bytes)));
  return bytes;
}

struct Tail {
  uint64_t entries = 0, size = 0, offset = 0;
  uint64_t limit = 0;  // where the tail begins: the directory must end before
};

[[noreturn]] void no_zip(const ReadFile& file, std::string_view why) {
  fail(ErrorKind::kCorrupt, file.path(), ": not a complete zip archive: ", why, " (", file.size(),
       " bytes; was it cut off?)");
}

Tail find_tail(ReadFile& file) {
  const uint64_t size = file.size();
  if (size < 22) no_zip(file, "too short");
  // A comment may follow the end record, but hardly ever does: look close to the end first.
  std::string bytes;
  uint64_t window = 0;
  size_t at = 0;
  bool found = false;
  for (const uint64_t most : {uint64_t{1024}, uint64_t{22 + 65535}}) {
    if (found || window == size) break;
    window = std::min(size, most);
    bytes = read_at(file, size - window, window);
    for (at = bytes.size() - 22;; --at) {
      found = get_le<uint32_t>(bytes, at) == kEnd && at + 22 + get_le<uint16_t>(bytes, at + 20) == bytes.size();
      if (found || at == 0) break;
    }
  }
  if (!found) no_zip(file, "it has no end record");
  Tail tail;
  tail.limit = size - window + at;
  tail.entries = get_le<uint16_t>(bytes, at + 10);
  tail.size = get_le<uint32_t>(bytes, at + 12);
  tail.offset = get_le<uint32_t>(bytes, at + 16);
  if (get_le<uint16_t>(bytes, at + 4) != 0 && get_le<uint16_t>(bytes, at + 4) != 0xffff)
    fail(ErrorKind::kUnsupported, file.path(), ": a zip archive over several disks");
  if (tail.limit >= 20) {
    const std::string locator = read_at(file, tail.limit - 20, 20);
    if (get_le<uint32_t>(locator, 0) == kLocator64) {
      const uint64_t where = get_le<uint64_t>(locator, 8);
      if (where > tail.limit - 20 || tail.limit - 20 - where < 56) no_zip(file, "its zip64 end record is misplaced");
      const std::string end = read_at(file, where, 56);
      if (get_le<uint32_t>(end, 0) != kEnd64) no_zip(file, "its zip64 end record is missing");
      tail.entries = get_le<uint64_t>(end, 32);
      tail.size = get_le<uint64_t>(end, 40);
      tail.offset = get_le<uint64_t>(end, 48);
      tail.limit = where;
    }
  }
  if (tail.offset > tail.limit || tail.size > tail.limit - tail.offset || tail.size > kMaxDirectory ||
      tail.entries > tail.size / 46)
    no_zip(file, "its directory doesn't fit into it");
  return tail;
}

// Replaces the 32-bit fields that say "see zip64".
void read_zip64(ReadFile& file, ZipRecord& record, std::string_view extra) {
  size_t at = 0;
  while (extra.size() - at >= 4) {
    const uint16_t tag = get_le<uint16_t>(extra, at);
    const uint16_t length = get_le<uint16_t>(extra, at + 2);
    at += 4;
    if (length > extra.size() - at) break;
    if (tag == 0x0001) {
      std::string_view field = extra.substr(at, length);
      for (uint64_t* value : {&record.size, &record.stored, &record.header}) {
        if (*value != kLarge) continue;
        if (field.size() < 8) fail(ErrorKind::kCorrupt, file.path(), ": record '", record.name, "': short zip64 field");
        *value = get_le<uint64_t>(field, 0);
        field.remove_prefix(8);
      }
      return;
    }
    at += length;
  }
}

}  // namespace

void locate_record(ReadFile& file, const ZipDirectory& directory, ZipRecord& record) {
  const uint64_t limit = directory.begin;
  const auto bad = [&](const auto&... why) {
    fail(ErrorKind::kCorrupt, file.path(), ": record '", record.name, "': ", why...);
  };
  if (record.header > limit || limit - record.header < 30) bad("its header lies outside of the file");
  // With the name that should follow, in one read.
  const std::string local =
      read_at(file, record.header, std::min<uint64_t>(30 + record.name.size(), limit - record.header));
  if (get_le<uint32_t>(local, 0) != kLocal) bad("no local header at ", record.header);
  const uint64_t names = uint64_t{get_le<uint16_t>(local, 26)} + get_le<uint16_t>(local, 28);
  record.data = record.header + 30 + names;
  if (record.data > limit || record.stored > limit - record.data)
    bad("its ", record.stored, " bytes at ", record.data, " leave the file");
  if (get_le<uint16_t>(local, 26) != record.name.size() || std::string_view(local).substr(30) != record.name)
    bad("its local header has another name");
  if (!record.deflated && record.stored != record.size)
    bad("stored in ", record.stored, " bytes, but declared as ", record.size);
  if (record.deflated && record.size / kMaxRatio > record.stored)
    bad("declares ", record.size, " bytes, more than ", record.stored, " deflated bytes can hold");
}

ZipDirectory read_zip_directory(ReadFile& file) {
  const Tail tail = find_tail(file);
  const std::string directory = read_at(file, tail.offset, tail.size);
  ZipDirectory result;
  result.begin = tail.offset;
  std::unordered_set<std::string> names;
  size_t at = 0;
  for (uint64_t i = 0; i < tail.entries; ++i) {
    if (directory.size() - at < 46 || get_le<uint32_t>(directory, at) != kCentral)
      no_zip(file, str("entry ", i, " of its directory is damaged"));
    const size_t name_length = get_le<uint16_t>(directory, at + 28);
    const size_t extra_length = get_le<uint16_t>(directory, at + 30);
    const size_t comment_length = get_le<uint16_t>(directory, at + 32);
    if (directory.size() - at - 46 < name_length + extra_length + comment_length)
      no_zip(file, str("entry ", i, " of its directory is cut off"));
    ZipRecord record;
    record.name = directory.substr(at + 46, name_length);
    record.crc = get_le<uint32_t>(directory, at + 16);
    record.stored = get_le<uint32_t>(directory, at + 20);
    record.size = get_le<uint32_t>(directory, at + 24);
    record.header = get_le<uint32_t>(directory, at + 42);
    const uint16_t flags = get_le<uint16_t>(directory, at + 8), method = get_le<uint16_t>(directory, at + 10);
    if (flags & 1) fail(ErrorKind::kUnsupported, file.path(), ": record '", record.name, "' is encrypted");
    if (method != 0 && method != 8)
      fail(ErrorKind::kUnsupported, file.path(), ": record '", record.name, "' is packed by method ", method);
    record.deflated = method == 8;
    read_zip64(file, record, std::string_view(directory).substr(at + 46 + name_length, extra_length));
    if (!names.insert(record.name).second)
      fail(ErrorKind::kCorrupt, file.path(), ": record '", record.name, "' stands twice");
    result.records.push_back(std::move(record));
    at += 46 + name_length + extra_length + comment_length;
  }
  return result;
}

std::vector<ZipRecord> read_zip(ReadFile& file) {
  ZipDirectory directory = read_zip_directory(file);
  std::vector<ZipRecord>& records = directory.records;
  for (ZipRecord& record : records) locate_record(file, directory, record);
  std::vector<const ZipRecord*> ordered;
  for (const ZipRecord& record : records) ordered.push_back(&record);
  std::sort(ordered.begin(), ordered.end(),
            [](const ZipRecord* a, const ZipRecord* b) { return a->header < b->header; });
  for (size_t i = 1; i < ordered.size(); ++i) {
    const ZipRecord& before = *ordered[i - 1];
    if (before.data + before.stored > ordered[i]->header)
      fail(ErrorKind::kCorrupt, file.path(), ": records '", before.name, "' and '", ordered[i]->name, "' overlap");
  }
  return std::move(directory.records);
}

std::string read_record(ReadFile& file, const ZipRecord& record, uint64_t limit) {
  if (record.size > limit)
    fail(ErrorKind::kCorrupt, file.path(), ": record '", record.name, "' has ", record.size, " bytes, more than the ",
         limit, " that are accepted");
  std::string bytes = read_at(file, record.data, record.stored);
  if (record.deflated) {
    std::string inflated(record.size, '\0');
    z_stream stream{};
    if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) throw std::bad_alloc();
    const std::unique_ptr<z_stream, decltype(&inflateEnd)> guard(&stream, inflateEnd);
    if (std::max(record.stored, record.size) > std::numeric_limits<uInt>::max())
      fail(ErrorKind::kUnsupported, file.path(), ": record '", record.name, "' is deflated and larger than 4 GiB");
    stream.next_in = reinterpret_cast<Bytef*>(bytes.data());
    stream.avail_in = static_cast<uInt>(bytes.size());
    stream.next_out = reinterpret_cast<Bytef*>(inflated.data());
    stream.avail_out = static_cast<uInt>(inflated.size());
    if (inflate(&stream, Z_FINISH) != Z_STREAM_END || stream.avail_out != 0)
      fail(ErrorKind::kCorrupt, file.path(), ": record '", record.name, "': its deflated bytes are damaged");
    bytes = std::move(inflated);
  }
  if (record.crc != 0 && crc32(std::as_bytes(std::span(bytes))) != record.crc)
    fail(ErrorKind::kCorrupt, file.path(), ": damaged: record '", record.name, "' doesn't match its checksum");
  return bytes;
}

namespace {

bool large_size(const ZipRecord& record) { return record.size >= kLarge; }
bool large_header(const ZipRecord& record) { return record.header >= kLarge; }

// As torch writes them: a data descriptor and UTF-8 names; no descriptor for an empty record.
uint16_t flags_of(const ZipRecord& record) { return record.size == 0 ? 0x0800 : 0x0808; }

uint64_t local_zip64_length(const ZipRecord& record) {
  if (!large_size(record) && !large_header(record)) return 0;
  return 4 + (large_size(record) ? 16 : 0) + (large_header(record) ? 8 : 0);
}

uint64_t descriptor_length(const ZipRecord& record) {
  if (record.size == 0) return 0;
  return local_zip64_length(record) != 0 ? 24 : 16;
}

}  // namespace

uint64_t ZipLayout::add(std::string name, uint64_t size, uint64_t alignment) {
  ZipRecord record;
  record.name = std::move(name);
  record.header = end_;
  record.stored = record.size = size;
  const uint64_t fixed = record.header + 30 + record.name.size() + local_zip64_length(record) + 4;
  record.data = (fixed + alignment - 1) / alignment * alignment;
  end_ = record.data + size + descriptor_length(record);
  records_.push_back(record);
  return record.data;
}

std::string ZipLayout::local_header(size_t i) const {
  const ZipRecord& record = records_[i];
  const uint64_t extra = record.data - record.header - 30 - record.name.size();
  std::string out;
  put_le(out, kLocal);
  put_le<uint16_t>(out, 0);
  put_le<uint16_t>(out, flags_of(record));
  put_le<uint16_t>(out, 0);  // stored
  put_le<uint32_t>(out, 0);  // no time, no date: the same input gives the same bytes
  put_le<uint32_t>(out, 0);
  put_le<uint32_t>(out, large_size(record) ? kLarge : 0);
  put_le<uint32_t>(out, large_size(record) ? kLarge : 0);
  put_le<uint16_t>(out, static_cast<uint16_t>(record.name.size()));
  put_le<uint16_t>(out, static_cast<uint16_t>(extra));
  out += record.name;
  if (const uint64_t length = local_zip64_length(record); length != 0) {
    put_le<uint16_t>(out, 0x0001);
    put_le<uint16_t>(out, static_cast<uint16_t>(length - 4));
    if (large_size(record)) {
      put_le<uint64_t>(out, 0);
      put_le<uint64_t>(out, 0);
    }
    if (large_header(record)) put_le<uint64_t>(out, record.header);
  }
  const uint64_t padding = record.data - record.header - out.size() - 4;
  out += "FB";
  put_le<uint16_t>(out, static_cast<uint16_t>(padding));
  out.append(padding, 'Z');
  return out;
}

std::string ZipLayout::descriptor(size_t i, uint32_t crc) const {
  const ZipRecord& record = records_[i];
  std::string out;
  if (record.size == 0) return out;
  put_le(out, kDescriptor);
  put_le(out, crc);
  for (int k = 0; k < 2; ++k) {
    if (local_zip64_length(record) != 0)
      put_le<uint64_t>(out, record.size);
    else
      put_le<uint32_t>(out, static_cast<uint32_t>(record.size));
  }
  return out;
}

std::string ZipLayout::directory(const std::vector<uint32_t>& crcs) const {
  std::string out;
  for (size_t i = 0; i < records_.size(); ++i) {
    const ZipRecord& record = records_[i];
    std::string zip64;
    if (large_size(record)) {
      put_le<uint64_t>(zip64, record.size);
      put_le<uint64_t>(zip64, record.size);
    }
    if (large_header(record)) put_le<uint64_t>(zip64, record.header);
    const uint32_t size32 = large_size(record) ? kLarge : static_cast<uint32_t>(record.size);
    put_le(out, kCentral);
    put_le<uint16_t>(out, 0);
    put_le<uint16_t>(out, 0);
    put_le<uint16_t>(out, flags_of(record));
    put_le<uint16_t>(out, 0);
    put_le<uint32_t>(out, 0);
    put_le<uint32_t>(out, crcs[i]);
    put_le<uint32_t>(out, size32);
    put_le<uint32_t>(out, size32);
    put_le<uint16_t>(out, static_cast<uint16_t>(record.name.size()));
    put_le<uint16_t>(out, static_cast<uint16_t>(zip64.empty() ? 0 : zip64.size() + 4));
    out.append(10, '\0');  // comment, disk, attributes
    put_le<uint32_t>(out, large_header(record) ? kLarge : static_cast<uint32_t>(record.header));
    out += record.name;
    if (!zip64.empty()) {
      put_le<uint16_t>(out, 0x0001);
      put_le<uint16_t>(out, static_cast<uint16_t>(zip64.size()));
      out += zip64;
    }
  }
  const uint64_t size = out.size(), count = records_.size(), end64 = end_ + size;
  put_le(out, kEnd64);
  put_le<uint64_t>(out, 44);
  put_le<uint16_t>(out, 0x031e);
  put_le<uint16_t>(out, 0x2d);
  put_le<uint32_t>(out, 0);
  put_le<uint32_t>(out, 0);
  put_le<uint64_t>(out, count);
  put_le<uint64_t>(out, count);
  put_le<uint64_t>(out, size);
  put_le<uint64_t>(out, end_);
  put_le(out, kLocator64);
  put_le<uint32_t>(out, 0);
  put_le<uint64_t>(out, end64);
  put_le<uint32_t>(out, 1);
  put_le(out, kEnd);
  put_le<uint32_t>(out, 0);
  const uint16_t count16 = static_cast<uint16_t>(std::min<uint64_t>(count, 0xffff));
  put_le(out, count16);
  put_le(out, count16);
  put_le<uint32_t>(out, static_cast<uint32_t>(std::min<uint64_t>(size, kLarge)));
  put_le<uint32_t>(out, static_cast<uint32_t>(std::min<uint64_t>(end_, kLarge)));
  put_le<uint16_t>(out, 0);
  return out;
}

}  // namespace shardsmith
