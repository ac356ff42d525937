#include "format/pt_record.h"

#include <exception>

#include "base/checksum.h"
#include "base/error.h"
#include "base/json_items.h"

namespace shardsmith {
namespace {

constexpr int64_t kVersion = 1;
constexpr int64_t kBlock = 1 << 20;

std::string hex(uint32_t value) {
  static const char* digits = "0123456789abcdef";
  std::string out(8, '0');
  for (size_t i = 8; i-- > 0; value >>= 4) out[i] = digits[value & 15];
  return out;
}

void append_list(std::string& text, const Shape& shape) {
  text += '[';
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ',';
    text += std::to_string(shape[i]);
  }
  text += ']';
}

class Parser {
 public:
  explicit Parser(std::string_view where) : where_(where) {}

  template <typename T>
  const T& field(const Value& value, std::string_view name) const {
    const Value* found = value.find(name);
    const T* typed = found ? found->get_if<T>() : nullptr;
    if (!typed) bad("'", name, "' is missing or of another kind");
    return *typed;
  }
  Shape shape(const Value& value, std::string_view name) const {
    Shape out;
    for (const Value& item : field<List>(value, name)) {
      const int64_t* n = item.get_if<int64_t>();
      if (!n || *n < 0) bad("'", name, "' holds something else than sizes");
      out.push_back(*n);
    }
    return out;
  }
  template <typename... Args>
  [[noreturn]] void bad(const Args&... why) const {
    fail(ErrorKind::kCorrupt, where_, ": record '", kPtRecordName, "': ", why...);
  }

 private:
  std::string_view where_;
};

PtSlice parse_slice(const Parser& parser, const Value& entry) {
  PtSlice slice;
  const int64_t tensor = parser.field<int64_t>(entry, "tensor");
  if (tensor < 0) parser.bad("slice of tensor ", tensor);
  slice.tensor = static_cast<size_t>(tensor);
  slice.name = parser.field<std::string>(entry, "name");
  slice.shape = parser.shape(entry, "shape");
  slice.box.offset = parser.shape(entry, "offset");
  slice.box.extent = parser.shape(entry, "extent");
  if (slice.box.offset.size() != slice.shape.size() || slice.box.extent.size() != slice.shape.size() ||
      !inside(slice.box, slice.shape))
    parser.bad("the slice of '", slice.name, "' doesn't lie inside of its tensor");
  return slice;
}

BlockChecksums parse_checksums(const Parser& parser, const Value& root, const ZipRecord& record) {
  BlockChecksums sums;
  const int64_t block = parser.field<int64_t>(root, "block_size");
  const int64_t covered = parser.field<int64_t>(root, "covered");
  const std::string& text = parser.field<std::string>(root, "crc");
  if (block < 4096 || block > (64 << 20)) parser.bad("a block size of ", block);
  if (covered < 0 || static_cast<uint64_t>(covered) != record.header)
    parser.bad("covers ", covered, " bytes, but begins at ", record.header);
  sums.block_size = static_cast<uint64_t>(block);
  sums.covered = static_cast<uint64_t>(covered);
  const uint64_t blocks = (sums.covered + sums.block_size - 1) / sums.block_size;
  if (text.size() != 8 * blocks) parser.bad(text.size() / 8, " checksums for ", blocks, " blocks");
  for (size_t i = 0; i < blocks; ++i) {
    uint32_t crc = 0;
    for (char c : std::string_view(text).substr(8 * i, 8)) {
      const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
      if (digit < 0) parser.bad("a checksum that is no number");
      crc = crc << 4 | static_cast<uint32_t>(digit);
    }
    sums.crc.push_back(crc);
  }
  return sums;
}

}  // namespace

// As text at once: as Values, the slices of a file of small tensors took longer than all else in it.
std::string make_pt_record(const std::vector<PtSlice>& slices, const Value& extra, uint64_t covered) {
  std::string text =
      str("{\"version\":", kVersion, ",\"block_size\":", kBlock, ",\"covered\":", covered, ",\"slices\":[");
  for (const PtSlice& slice : slices) {
    if (&slice != &slices.front()) text += ',';
    text += "{\"tensor\":";
    text += std::to_string(slice.tensor);
    text += ",\"name\":";
    text += to_json(Value(slice.name));
    text += ",\"shape\":";
    append_list(text, slice.shape);
    text += ",\"offset\":";
    append_list(text, slice.box.offset);
    text += ",\"extent\":";
    append_list(text, slice.box.extent);
    text += '}';
  }
  const uint64_t blocks = (covered + kBlock - 1) / kBlock;
  text += "],\"extra\":";
  text += to_json(extra);
  text += ",\"crc\":\"";  // last, so that set_crcs knows where it is
  text.append(8 * blocks, '0');
  text += "\"}";
  return text;
}

void set_crcs(std::string& record, const std::vector<uint32_t>& crcs) {
  size_t at = record.size() - 2 - 8 * crcs.size();
  for (uint32_t crc : crcs) {
    record.replace(at, 8, hex(crc));
    at += 8;
  }
}

PtRecordContent parse_pt_record(std::string_view bytes, const ZipRecord& record, std::string_view where) {
  const Parser parser(where);
  PtRecordContent content;
  std::exception_ptr wrong;  // counts only where the version is known to have such slices
  const Value root =
      parse_json_items(bytes, str(where, ": record '", kPtRecordName, "'"), "slices", [&](const Value& entry) {
        if (wrong) return;
        try {
          content.slices.push_back(parse_slice(parser, entry));
        } catch (const Error&) {
          wrong = std::current_exception();
        }
      });
  const int64_t version = parser.field<int64_t>(root, "version");
  if (version > kVersion)
    fail(ErrorKind::kUnsupported, where, ": written by a newer Shardsmith (record version ", version, ", known is ",
         kVersion, "); update Shardsmith");
  if (version < 1) parser.bad("version ", version);
  content.digest = digest_of(bytes);
  content.checksums = std::make_shared<BlockChecksums>(parse_checksums(parser, root, record));
  parser.field<List>(root, "slices");
  if (wrong) std::rethrow_exception(wrong);
  if (const Value* extra = root.find("extra")) content.extra = restore_kinds(*extra);
  return content;
}

std::string digest_of(std::string_view record) { return hex(crc32(std::as_bytes(std::span(record)))); }

}  // namespace shardsmith
