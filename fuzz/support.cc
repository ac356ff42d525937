#include "support.h"

#include <zlib.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/checksum.h"
#include "format/pt_record.h"
#include "format/zip.h"
#include "layout/plan.h"
#include "storage/transfer.h"

namespace shardsmith::fuzz {
namespace {

constexpr std::string_view kPart = "@@@@";
constexpr size_t kMaxTensors = 64;
constexpr int64_t kMaxBytes = 1 << 20;

class BytesFile final : public ReadFile {
 public:
  BytesFile(std::string path, const std::string& bytes) : path_(std::move(path)), bytes_(bytes) {}
  uint64_t size() const override { return bytes_.size(); }
  const std::string& path() const override { return path_; }
  void read(uint64_t offset, std::span<std::byte> out) override {
    if (offset > bytes_.size() || out.size() > bytes_.size() - offset)
      fail(ErrorKind::kCorrupt, path_, ": truncated: ", out.size(), " bytes expected at ", offset);
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }

 private:
  std::string path_;
  const std::string& bytes_;
};

// Our extra record with the checksums of the bytes that really lie before it.
std::string with_checksums_of(const std::string& record, const std::string& before) {
  Value root;
  if (!errors_only([&] { root = parse_json(record, "record"); })) return record;
  const Value* size = root.find("block_size");
  const int64_t* block = size ? size->get_if<int64_t>() : nullptr;
  if (!block || *block < 4096) return record;
  std::string digits;
  for (size_t at = 0; at < before.size(); at += static_cast<size_t>(*block)) {
    const std::string_view bytes = std::string_view(before).substr(at, static_cast<size_t>(*block));
    uint32_t crc = crc32(std::as_bytes(std::span(bytes)));
    std::string hex(8, '0');
    for (size_t i = 8; i-- > 0; crc >>= 4) hex[i] = "0123456789abcdef"[crc & 15];
    digits += hex;
  }
  root.set("covered", static_cast<int64_t>(before.size()));
  root.set("crc", digits);
  return to_json(root);
}

// What torch.save would have put around these records.
std::string archive(const std::vector<std::pair<std::string, std::string>>& records) {
  ZipLayout layout;
  std::string bytes;
  for (const auto& [name, content] : records) {
    std::string record = content;
    if (name == kPtRecordName) record = with_checksums_of(record, bytes);
    layout.add("archive/" + name, record.size(), 64);
    const size_t i = layout.records().size() - 1;
    bytes += layout.local_header(i) + record + layout.descriptor(i, 0);
  }
  return bytes + layout.directory(std::vector<uint32_t>(records.size(), 0));
}

// The bytes of one element, little-endian, straight from the Index's definition; nothing where they are damaged.
class Reference {
 public:
  Reference(const Index& index, const Files& files) : index_(index), files_(files) {}

  // Null where none holds it, or several.
  const Slice* only_slice_with(const TensorEntry& tensor, const Shape& at) const {
    const Slice* found = nullptr;
    for (const Slice& slice : tensor.slices) {
      bool in = true;
      for (size_t d = 0; d < at.size(); ++d)
        in = in && at[d] >= slice.box.offset[d] && at[d] - slice.box.offset[d] < slice.box.extent[d];
      if (in && found) return nullptr;
      if (in) found = &slice;
    }
    return found;
  }

  std::string element(const TensorEntry& tensor, const Slice& slice, const Shape& at) {
    const auto size = static_cast<size_t>(size_of(tensor.dtype));
    uint64_t place = slice.encoding == Encoding::kDeflated ? slice.inner : slice.offset;
    for (size_t d = 0; d < at.size(); ++d)
      place += size * static_cast<uint64_t>((at[d] - slice.box.offset[d]) * slice.strides[d]);
    const std::string& from = slice.encoding == Encoding::kDeflated ? inflated(slice, place + size)
                                                                    : files_.bytes(index_.files[slice.file].path);
    require(place + size <= from.size(), "an element lies outside of its file, though the index is valid");
    std::string bytes = from.substr(place, size);
    if (slice.encoding == Encoding::kByteSwapped) {
      const bool complex = tensor.dtype == Dtype::kC32 || tensor.dtype == Dtype::kC64 || tensor.dtype == Dtype::kC128;
      const auto half = bytes.begin() + static_cast<std::ptrdiff_t>(complex ? size / 2 : size);
      std::reverse(bytes.begin(), half);
      std::reverse(half, bytes.end());
    }
    return bytes;
  }

 private:
  const std::string& inflated(const Slice& slice, uint64_t least) {
    std::string& out = inflated_[{slice.file, slice.offset}];
    if (out.size() >= least) return out;
    const std::string& file = files_.bytes(index_.files[slice.file].path);
    out.resize(least);
    z_stream stream{};
    require(inflateInit2(&stream, -MAX_WBITS) == Z_OK, "zlib");
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(file.data() + slice.offset));
    stream.avail_in = static_cast<uInt>(slice.stored);
    stream.next_out = reinterpret_cast<Bytef*>(out.data());
    stream.avail_out = static_cast<uInt>(out.size());
    inflate(&stream, Z_FINISH);
    inflateEnd(&stream);
    return out;
  }

  const Index& index_;
  const Files& files_;
  std::map<std::pair<uint32_t, uint64_t>, std::string> inflated_;
};

const TensorEntry* holder(const Index& index, const TensorEntry& tensor) {
  const TensorEntry* held = &tensor;
  for (size_t hops = 0; held && !held->alias_of.empty(); ++hops) {
    if (hops > index.tensors.size()) return nullptr;  // a second name of itself: make_plan says so
    held = index.find(held->alias_of);
  }
  return held;
}

}  // namespace

std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}

void broken(std::string_view what) {
  std::fprintf(stderr, "broken: %.*s\n", static_cast<int>(what.size()), what.data());
  std::abort();
}

std::unique_ptr<ReadFile> Files::open_read(const std::string& path, Access) {
  const auto found = files_.find(path);
  if (found == files_.end()) fail(ErrorKind::kNotFound, path, ": opening failed: No such file or directory (ENOENT)");
  return std::make_unique<BytesFile>(path, found->second);
}

Stat Files::stat(const std::string& path) {
  if (links_.contains(path)) return {.exists = true, .is_directory = false, .is_link = true, .size = 0};
  if (const auto found = files_.find(path); found != files_.end())
    return {.exists = true, .is_directory = false, .is_link = false, .size = found->second.size()};
  const std::string inside = path + "/";
  const auto next = files_.lower_bound(inside);
  const bool folder = next != files_.end() && next->first.starts_with(inside);
  return {.exists = folder, .is_directory = folder, .is_link = false, .size = 0};
}

std::string Files::read_link(const std::string& path) {
  const auto found = links_.find(path);
  return found == links_.end() ? "" : found->second;
}

std::vector<std::string> Files::list(const std::string& directory) {
  std::vector<std::string> names;
  const std::string inside = directory + "/";
  for (const auto* entries : {&files_, &links_}) {
    for (const auto& [path, bytes] : *entries) {
      if (!path.starts_with(inside)) continue;
      names.push_back(path.substr(inside.size(), path.find('/', inside.size()) - inside.size()));
    }
  }
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

void unpack(std::string_view input, const std::string& folder, Files& files) {
  std::map<std::string, std::vector<std::pair<std::string, std::string>>> archives;
  for (size_t at = input.find(kPart); at != std::string_view::npos;) {
    at += kPart.size();
    const size_t next = input.find(kPart, at);
    const std::string_view part = input.substr(at, next == std::string_view::npos ? next : next - at);
    at = next;
    const size_t line = part.find('\n');
    if (line == std::string_view::npos || line == 0 || line > 200) continue;
    const std::string name(part.substr(0, line));
    std::string bytes(part.substr(line + 1));
    if (const size_t mark = name.find('!'); mark != std::string::npos) {
      archives[name.substr(0, mark)].emplace_back(name.substr(mark + 1), std::move(bytes));
    } else if (name.starts_with("link:")) {
      files.add_link(folder + "/" + name.substr(5), std::move(bytes));
    } else {
      forget_checksums(bytes);
      files.add(folder + "/" + name, std::move(bytes));
    }
  }
  for (const auto& [name, records] : archives) files.add(folder + "/" + name, archive(records));
}

void forget_checksums(std::string& bytes) {
  constexpr std::string_view kCentral("PK\x01\x02", 4);
  for (size_t at = bytes.find(kCentral); at != std::string::npos; at = bytes.find(kCentral, at + 4))
    for (size_t i = at + 16; i < at + 20 && i < bytes.size(); ++i) bytes[i] = '\0';
}

void read_everything(const Index& index, Files& files) {
  try {
    validate(index, false);
  } catch (const Error& e) {
    broken(str("an index out of bounds: ", e.what()));
  }
  if (!errors_only([&] { validate(index); })) return;  // not each element once: verbs refuse that
  shardsmith::Target wants;
  std::vector<std::string> out;
  bool may_be_damaged = false;
  int64_t total = 0;
  for (const FileEntry& file : index.files) may_be_damaged |= file.checksums != nullptr;
  for (const TensorEntry& tensor : index.tensors) {
    const TensorEntry* held = holder(index, tensor);
    if (!held || held->shape != tensor.shape || held->dtype != tensor.dtype) return;  // make_plan says so
    if (volume(tensor.shape) > kMaxBytes) return;
    total += volume(tensor.shape) * size_of(tensor.dtype);
    if (total > kMaxBytes || out.size() == kMaxTensors) return;
    for (const Slice& slice : held->slices) may_be_damaged |= slice.encoding == Encoding::kDeflated;
    wants.wants.push_back({tensor.name, tensor.dtype, tensor.shape, whole(tensor.shape),
                           static_cast<uint32_t>(out.size()), 0, contiguous_strides(tensor.shape)});
    out.emplace_back(static_cast<size_t>(volume(tensor.shape) * size_of(tensor.dtype)), '\xa5');
  }
  const Plan plan = make_plan(index, wants, {.max_read = 4096, .max_gap = 256});
  require(plan.report.missing.empty(), "a tensor of a valid index is missing in the plan");
  std::vector<Destination> destinations;
  for (std::string& bytes : out) destinations.push_back({std::as_writable_bytes(std::span(bytes))});
  const bool done = errors_only([&] { execute(plan, index, destinations, files, {.budget = 64 << 10, .threads = 1}); });
  if (!done) return require(may_be_damaged, "a plan over a valid index can't be executed");

  compare_wants(index, wants, files, out);
}

void compare_wants(const Index& index, const shardsmith::Target& target, const Files& files,
                   const std::vector<std::string>& out) {
  Reference reference(index, files);
  std::vector<std::string> expected;
  for (const std::string& bytes : out) expected.emplace_back(bytes.size(), '\xa5');
  for (const Want& want : target.wants) {
    const TensorEntry* tensor = index.find(want.name);
    if (tensor) tensor = holder(index, *tensor);
    if (!tensor || !inside(want.box, tensor->shape)) continue;
    const auto size = static_cast<size_t>(size_of(want.dtype));
    Shape at = want.box.offset;
    for (int64_t left = volume(want.box.extent); left > 0; --left) {
      size_t place = want.offset;
      for (size_t d = 0; d < at.size(); ++d)
        place += size * static_cast<size_t>((at[d] - want.box.offset[d]) * want.strides[d]);
      const Slice* slice = reference.only_slice_with(*tensor, at);
      const bool known = slice && tensor->dtype == want.dtype;
      expected[want.buffer].replace(
          place, size, known ? reference.element(*tensor, *slice, at) : out[want.buffer].substr(place, size));
      for (size_t d = at.size(); d-- > 0;) {
        if (++at[d] < want.box.offset[d] + want.box.extent[d]) break;
        at[d] = want.box.offset[d];
      }
    }
  }
  require(out == expected, "bytes that are others than the index says, or at places that nobody asked for");
}

}  // namespace shardsmith::fuzz
