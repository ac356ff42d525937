#include "format/dcp_metadata.h"

#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "format/pickle_view.h"

namespace shardsmith {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view where) : where_(where) {}

  std::vector<DcpEntry> parse(PickleView root) {
    const PickleView metadata = state_of(root, "Metadata");
    read_storage(metadata);
    read_paths(metadata);
    const PickleView states = metadata.find("state_dict_metadata");
    if (!states.is_dict()) bad("it has no 'state_dict_metadata'");
    std::vector<DcpEntry> entries;
    entries.reserve(states.size() / 2);
    std::unordered_set<std::string_view> names;
    for (size_t i = 0; i < states.size(); i += 2) {
      const std::string* name = states[i].get_if<std::string>();
      if (!name) bad("an item whose name is no text");
      if (!names.insert(*name).second) bad("the key '", *name, "' stands twice in one dict");
      entries.push_back(entry(*name, states[i + 1]));
    }
    return entries;
  }

 private:
  template <typename... Args>
  [[noreturn]] void bad(const Args&... why) const {
    fail(ErrorKind::kCorrupt, where_, ": ", why...);
  }

  // The attributes of an object of class `name`, whichever module it lives in.
  PickleView state_of(PickleView object, std::string_view name) const {
    if (object.class_name() != name) bad("something else where a '", name, "' is expected");
    return object.state();
  }

  Shape shape(PickleView list, const std::string& name, const char* what) const {
    if (!list.is_list()) bad("'", name, "': its ", what, " are missing");
    if (list.size() > 64) bad("'", name, "' has ", list.size(), " dimensions");
    Shape out;
    out.reserve(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      const int64_t* n = list[i].get_if<int64_t>();
      if (!n || *n < 0) bad("'", name, "': its ", what, " hold something else than sizes");
      out.push_back(*n);
    }
    return out;
  }

  // A text that differs for every key and offset.
  static std::string index_key(const std::string& fqn, const Shape* offset) {
    std::string key = fqn;
    if (!offset) return key;
    key += '\0';
    for (int64_t n : *offset) key.append(reinterpret_cast<const char*>(&n), sizeof(n));
    return key;
  }

  // {MetadataIndex: _StorageInfo}; an index without 'offset' is that of a whole item.
  void read_storage(PickleView metadata) {
    const PickleView storage = metadata.find("storage_data");
    if (!storage.is_dict()) bad("it has no 'storage_data'");
    items_.reserve(storage.size() / 2);
    for (size_t i = 0; i < storage.size(); i += 2) {
      const PickleView at = state_of(storage[i], "MetadataIndex");
      const std::string* name = at.find("fqn").get_if<std::string>();
      if (!name) bad("a 'MetadataIndex' without a name");
      const PickleView offset = at.find("offset");
      Shape place;
      const bool has_place = offset && !offset.is_none();
      if (has_place) place = shape(offset, *name, "offsets");
      if (!items_.emplace(index_key(*name, has_place ? &place : nullptr), state_of(storage[i + 1], "_StorageInfo"))
               .second)
        bad("'", *name, "' is stored twice at one place");
    }
  }

  DcpItem item(const std::string& name, PickleView info) const {
    const auto number = [&](const char* field) {
      const int64_t* n = info.find(field).get_if<int64_t>();
      if (!n || *n < 0) bad("'", name, "': its '", field, "' is missing or no size");
      return static_cast<uint64_t>(*n);
    };
    DcpItem item;
    const std::string* file = info.find("relative_path").get_if<std::string>();
    if (!file || file->empty()) bad("'", name, "': its 'relative_path' is missing or no file's name");
    item.file = *file;
    item.offset = number("offset");
    item.length = number("length");
    uint64_t end = 0;
    if (__builtin_add_overflow(item.offset, item.length, &end)) bad("'", name, "': its place is beyond 64 bits");
    const PickleView transforms = info.find("transform_descriptors");
    if (transforms.is_list() && transforms.size() > 0) {
      const std::string* word = transforms[0].get_if<std::string>();
      fail(ErrorKind::kUnsupported, where_, ": '", name, "' went through the transform '", word ? *word : "?",
           "' when it was written, which can't be undone here");
    }
    if (transforms && !transforms.is_list() && !transforms.is_none())
      bad("'", name, "': its 'transform_descriptors' are no list");
    return item;
  }

  void read_paths(PickleView metadata) {
    const PickleView paths = metadata.find("planner_data");
    if (!paths || paths.is_none()) return;
    if (!paths.is_dict()) bad("its 'planner_data' is no dict");
    for (size_t i = 0; i < paths.size(); i += 2) {
      const std::string* name = paths[i].get_if<std::string>();
      const PickleView path = paths[i + 1];
      if (!name || !path.is_tuple() || path.size() == 0) bad("its 'planner_data' hold something else than paths");
      List elements;
      for (size_t k = 0; k < path.size(); ++k) {
        const std::string* key = path[k].get_if<std::string>();
        const int64_t* position = path[k].get_if<int64_t>();
        if (!key && !(position && *position >= 0))
          bad("'", *name, "': an element of its path is neither a name nor a position");
        elements.push_back(key ? Value(*key) : Value(*position));
      }
      if (!paths_.emplace(*name, std::move(elements)).second) bad("the key '", *name, "' stands twice in one dict");
    }
  }

  DcpEntry entry(const std::string& name, PickleView description) {
    DcpEntry entry;
    entry.key = name;
    if (const auto path = paths_.find(name); path != paths_.end()) entry.path = std::move(path->second);
    const std::string_view kind = description.class_name();
    if (kind == "BytesStorageMetadata") {
      entry.item = find(name, nullptr, true);
    } else if (kind == "TensorStorageMetadata") {
      read_tensor(entry, state_of(description, kind));
    } else {
      bad("'", name, "' is described by something that is no storage metadata");
    }
    return entry;
  }

  DcpItem find(const std::string& name, const Shape* offset, bool required) const {
    const auto found = items_.find(index_key(name, offset));
    if (found != items_.end()) return item(name, found->second);
    if (required)
      bad("'", name, "' ", offset ? "at " + to_string(*offset) + " " : "",
          "is in no data file, as 'storage_data' has it");
    return {};
  }

  void read_tensor(DcpEntry& entry, PickleView state) const {
    entry.is_tensor = true;
    entry.shape = shape(state.find("size"), entry.key, "sizes");
    try {
      volume(entry.shape);
    } catch (const Error& e) {
      bad("tensor '", entry.key, "': ", e.what());
    }
    read_properties(entry, state.find("properties"));
    const PickleView chunks = state.find("chunks");
    if (!chunks.is_list()) bad("'", entry.key, "': its 'chunks' are missing");
    entry.chunks.reserve(chunks.size());
    for (size_t i = 0; i < chunks.size(); ++i) {
      const PickleView fields = state_of(chunks[i], "ChunkStorageMetadata");
      DcpChunk chunk;
      chunk.box.offset = shape(fields.find("offsets"), entry.key, "offsets");
      chunk.box.extent = shape(fields.find("sizes"), entry.key, "sizes");
      if (!inside(chunk.box, entry.shape))
        bad("tensor '", entry.key, "' ", to_string(entry.shape), ": a chunk does not lie inside it");
      const bool empty = volume(chunk.box.extent) == 0;
      // The very first writers left the offset of a whole tensor out.
      if (chunks.size() == 1) chunk.item = find(entry.key, nullptr, false);
      if (chunk.item.file.empty()) chunk.item = find(entry.key, &chunk.box.offset, !empty);
      entry.chunks.push_back(std::move(chunk));
    }
  }

  // A tuple (dtype, layout, requires_grad, memory format, pin_memory), or before that a dict of them.
  void read_properties(DcpEntry& entry, PickleView properties) const {
    if (!properties) bad("'", entry.key, "': its 'properties' are missing");
    const PickleView state = state_of(properties, "TensorProperties");
    const PickleView dtype = state.is_tuple() && state.size() > 0 ? state[0] : state.find("dtype");
    const PickleView grad = state.is_tuple() && state.size() > 2 ? state[2] : state.find("requires_grad");
    const DtypeName* name = dtype.get_if<DtypeName>();
    if (!name) bad("'", entry.key, "': its dtype is missing");
    const auto known = dtype_from_torch(name->name);
    if (!known)
      fail(ErrorKind::kUnsupported, where_, ": tensor '", entry.key, "' has the dtype ", name->name,
           ", which can't be held");
    entry.dtype = *known;
    const bool* flag = grad.get_if<bool>();
    entry.requires_grad = flag && *flag;
  }

  std::string_view where_;
  std::unordered_map<std::string, PickleView> items_;  // _StorageInfo's attributes
  std::unordered_map<std::string, List> paths_;
};

}  // namespace

std::vector<DcpEntry> parse_dcp_metadata(std::string_view bytes, std::string_view where) {
  PickleLimits limits;
  limits.objects = 64 << 20;  // a thousand ranks' chunks
  pickle::Machine machine(bytes, where, limits, PickleNames::kDcp);
  const pickle::Id root = machine.parse();
  if (machine.has_tensors()) fail(ErrorKind::kCorrupt, where, ": tensors in a place where only their shapes belong");
  return Parser(where).parse({machine, root});
}

}  // namespace shardsmith
