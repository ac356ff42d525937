// torch.save before 1.6, and of today with _use_new_zipfile_serialization=False. The bytes, one after the other:
//   five pickles: the magic number; the protocol's number, 1001; a dict about the writing machine; the object; the
//   storages' keys, sorted
//   for each key: i64 count of elements, then the elements
// Everything is little-endian, whatever the dict says: torch converts when it writes on a big-endian machine.
#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "format/bytes.h"
#include "format/torch_object.h"

namespace shardsmith {
namespace {

constexpr uint64_t kFirstWindow = 1 << 20;

// The pickles of the file's first bytes, one by one.
class Pickles {
 public:
  Pickles(std::string_view bytes, std::string_view where) : bytes_(bytes), where_(where) {}
  Pickled next() {
    size_t used = 0;
    Pickled pickled = read_pickle(bytes_.substr(at_), where_, {}, PickleNames::kTorch, &used);
    at_ += used;
    return pickled;
  }
  size_t position() const { return at_; }

 private:
  std::string_view bytes_, where_;
  size_t at_ = 0;
};

void read_head(Pickles& pickles, const std::string& path) {
  pickles.next();  // the magic number, by which the file was recognised
  const Value version = pickles.next().value;
  const int64_t* number = version.get_if<int64_t>();
  if (!number || *number != 1001)
    fail(ErrorKind::kUnsupported, path, ": torch's old format in version ", number ? str(*number) : "of no number",
         ", known is 1001");
  pickles.next();  // about the machine
}

TorchObject parse(std::string_view bytes, ReadFile& file, uint64_t base) {
  const std::string& path = file.path();
  Pickles pickles(bytes, path);
  read_head(pickles, path);
  TorchObject object;
  object.pickled = pickles.next();
  const Value keys = pickles.next().value;
  const List* list = keys.get_if<List>();
  if (!list) fail(ErrorKind::kCorrupt, path, ": its list of storages is none");

  std::unordered_map<std::string_view, size_t> numbers;
  for (size_t i = 0; i < object.pickled.storages.size(); ++i) numbers.emplace(object.pickled.storages[i].key, i);
  object.storages.resize(object.pickled.storages.size());
  std::vector<bool> seen(object.storages.size(), false);
  uint64_t at = pickles.position();
  for (const Value& item : *list) {
    const std::string* key = item.get_if<std::string>();
    const auto found = key ? numbers.find(*key) : numbers.end();
    if (found == numbers.end() || seen[found->second])
      fail(ErrorKind::kCorrupt, path, ": its list of storages names ", key ? "'" + *key + "'" : "something",
           ", which no tensor lies in, or twice");
    seen[found->second] = true;
    const PickledStorage& held = object.pickled.storages[found->second];
    if (file.size() - at < 8) fail(ErrorKind::kCorrupt, path, ": truncated before storage '", held.key, "'");
    std::string number(8, '\0');
    file.read(at, std::as_writable_bytes(std::span(number)));
    at += 8;
    const auto count = get_le<uint64_t>(number, 0);
    uint64_t size = 0;
    if (__builtin_mul_overflow(count, static_cast<uint64_t>(held.element), &size) || size != held.bytes)
      fail(ErrorKind::kCorrupt, path, ": storage '", held.key, "' holds ", count, " elements of ", held.element,
           " bytes instead of ", held.bytes, " bytes");
    if (size > file.size() - at)
      fail(ErrorKind::kCorrupt, path, ": truncated: storage '", held.key, "' has ", size, " bytes, of which ",
           file.size() - at, " are there");
    object.storages[found->second] = {base + at, size, false};
    at += size;
  }
  const auto missing = std::find(seen.begin(), seen.end(), false);
  if (missing != seen.end())
    fail(ErrorKind::kCorrupt, path, ": storage '",
         object.pickled.storages[static_cast<size_t>(missing - seen.begin())].key,
         "' is missing, though a tensor lies in it");
  return object;
}

}  // namespace

TorchObject read_legacy_object(ReadFile& file, uint64_t base) {
  // Nothing says how long the pickles are, so they are read in ever larger windows until they end.
  for (uint64_t window = std::min(file.size(), kFirstWindow);; window = std::min(file.size(), 8 * window)) {
    std::string bytes(static_cast<size_t>(window), '\0');
    file.read(0, std::as_writable_bytes(std::span(bytes)));
    try {
      return parse(bytes, file, base);
    } catch (const PickleTruncated&) {
      if (window == file.size() || window > kMaxPickle) throw;
    }
  }
}

}  // namespace shardsmith
