#include "format/dcp_metadata.h"

#include <unordered_map>

#include "base/error.h"
#include "format/pickle.h"

namespace shardsmith {
namespace {

class Parser {
 public:
  explicit Parser(std::string_view where) : where_(where) {}

  std::vector<DcpEntry> parse(const Value& root) {
    const Value& metadata = state_of(root, "Metadata");
    read_storage(metadata);
    read_paths(metadata);
    const Value* states = metadata.find("state_dict_metadata");
    const Dict* dict = states ? states->get_if<Dict>() : nullptr;
    if (!dict) bad("it has no 'state_dict_metadata'");
    std::vector<DcpEntry> entries;
    entries.reserve(dict->items.size());
    for (const auto& [key, description] : dict->items) {
      const std::string* name = key.get_if<std::string>();
      if (!name) bad("an item whose name is no text");
      entries.push_back(entry(*name, description));
    }
    return entries;
  }

 private:
  template <typename... Args>
  [[noreturn]] void bad(const Args&... why) const {
    fail(ErrorKind::kCorrupt, where_, ": ", why...);
  }

  static std::string_view class_of(const Value& value) {
    const Opaque* object = value.get_if<Opaque>();
    if (!object) return {};
    const std::string_view name = object->class_name;
    return name.substr(name.rfind('.') + 1);
  }

  // The attributes of an object of class `name`, whichever module it lives in: the last thing that the pickle said of
  // it.
  const Value& state_of(const Value& value, std::string_view name) const {
    if (class_of(value) != name) bad("something else where a '", name, "' is expected");
    static const Value nothing;
    const Opaque& object = *value.get_if<Opaque>();
    return object.state.empty() ? nothing : object.state.back();
  }

  Shape shape(const Value* value, const std::string& name, const char* what) const {
    const Tuple* tuple = value ? value->get_if<Tuple>() : nullptr;
    const List* list = value ? value->get_if<List>() : nullptr;
    if (!tuple && !list) bad("'", name, "': its ", what, " are missing");
    const List& items = tuple ? tuple->items : *list;
    if (items.size() > 64) bad("'", name, "' has ", items.size(), " dimensions");
    Shape out;
    for (const Value& item : items) {
      const int64_t* n = item.get_if<int64_t>();
      if (!n || *n < 0) bad("'", name, "': its ", what, " hold something else than sizes");
      out.push_back(*n);
    }
    return out;
  }

  static std::string index_key(const std::string& fqn, const Shape* offset) {
    return offset ? fqn + '\0' + to_string(*offset) : fqn;
  }

  // Two generations: {MetadataIndex: _StorageInfo}; an index without 'offset' is that of a whole item.
  void read_storage(const Value& metadata) {
    const Value* storage = metadata.find("storage_data");
    const Dict* dict = storage ? storage->get_if<Dict>() : nullptr;
    if (!dict) bad("it has no 'storage_data'");
    for (const auto& [index, info] : dict->items) {
      const Value& at = state_of(index, "MetadataIndex");
      const Value* fqn = at.find("fqn");
      const std::string* name = fqn ? fqn->get_if<std::string>() : nullptr;
      if (!name) bad("a 'MetadataIndex' without a name");
      const Value* offset = at.find("offset");
      std::string key = *name;
      if (offset && !offset->is_none()) {
        const Shape place = shape(offset, *name, "offsets");
        key = index_key(*name, &place);
      }
      if (!items_.emplace(std::move(key), item(*name, state_of(info, "_StorageInfo"))).second)
        bad("'", *name, "' is stored twice at one place");
    }
  }

  DcpItem item(const std::string& name, const Value& info) const {
    const auto number = [&](const char* field) {
      const Value* value = info.find(field);
      const int64_t* n = value ? value->get_if<int64_t>() : nullptr;
      if (!n || *n < 0) bad("'", name, "': its '", field, "' is missing or no size");
      return static_cast<uint64_t>(*n);
    };
    DcpItem item;
    const Value* path = info.find("relative_path");
    const std::string* file = path ? path->get_if<std::string>() : nullptr;
    if (!file || file->empty()) bad("'", name, "': its 'relative_path' is missing or no file's name");
    item.file = *file;
    item.offset = number("offset");
    item.length = number("length");
    uint64_t end = 0;
    if (__builtin_add_overflow(item.offset, item.length, &end)) bad("'", name, "': its place is beyond 64 bits");
    if (const Value* transforms = info.find("transform_descriptors")) {
      const Tuple* tuple = transforms->get_if<Tuple>();
      const List* list = tuple ? &tuple->items : transforms->get_if<List>();
      if (list && !list->empty()) {
        const std::string* word = list->front().get_if<std::string>();
        fail(ErrorKind::kUnsupported, where_, ": '", name, "' went through the transform '",
             word ? *word : to_json(list->front()), "' when it was written, which can't be undone here");
      }
      if (!list && !transforms->is_none()) bad("'", name, "': its 'transform_descriptors' are no list");
    }
    return item;
  }

  void read_paths(const Value& metadata) {
    const Value* data = metadata.find("planner_data");
    if (!data || data->is_none()) return;
    const Dict* dict = data->get_if<Dict>();
    if (!dict) bad("its 'planner_data' is no dict");
    for (const auto& [key, path] : dict->items) {
      const std::string* name = key.get_if<std::string>();
      const Tuple* elements = path.get_if<Tuple>();
      if (!name || !elements || elements->items.empty()) bad("its 'planner_data' hold something else than paths");
      for (const Value& element : elements->items) {
        const int64_t* position = element.get_if<int64_t>();
        if (!element.get_if<std::string>() && !(position && *position >= 0))
          bad("'", *name, "': an element of its path is neither a name nor a position");
      }
      paths_.emplace(*name, &elements->items);
    }
  }

  DcpEntry entry(const std::string& name, const Value& description) const {
    DcpEntry entry;
    entry.key = name;
    if (const auto path = paths_.find(name); path != paths_.end()) entry.path = *path->second;
    const std::string_view kind = class_of(description);
    if (kind == "BytesStorageMetadata") {
      entry.item = find(name, nullptr, true);
    } else if (kind == "TensorStorageMetadata") {
      read_tensor(entry, state_of(description, kind));
    } else {
      bad("'", name, "' is described by something that is no storage metadata");
    }
    return entry;
  }

  const DcpItem& find(const std::string& name, const Shape* offset, bool required) const {
    static const DcpItem nothing;
    auto found = items_.find(index_key(name, offset));
    if (found != items_.end()) return found->second;
    if (required)
      bad("'", name, "' ", offset ? "at " + to_string(*offset) + " " : "",
          "is in no data file, as 'storage_data' has it");
    return nothing;
  }

  void read_tensor(DcpEntry& entry, const Value& state) const {
    entry.is_tensor = true;
    entry.shape = shape(state.find("size"), entry.key, "sizes");
    read_properties(entry, state.find("properties"));
    const Value* chunks = state.find("chunks");
    const List* list = chunks ? chunks->get_if<List>() : nullptr;
    if (!list) bad("'", entry.key, "': its 'chunks' are missing");
    for (const Value& value : *list) {
      const Value& fields = state_of(value, "ChunkStorageMetadata");
      DcpChunk chunk;
      chunk.box.offset = shape(fields.find("offsets"), entry.key, "offsets");
      chunk.box.extent = shape(fields.find("sizes"), entry.key, "sizes");
      if (!inside(chunk.box, entry.shape))
        bad("tensor '", entry.key, "' ", to_string(entry.shape), ": a chunk does not lie inside it");
      const bool empty = volume(chunk.box.extent) == 0;
      // The very first writers left the offset of a whole tensor out.
      if (list->size() == 1) chunk.item = find(entry.key, nullptr, false);
      if (chunk.item.file.empty()) chunk.item = find(entry.key, &chunk.box.offset, !empty);
      entry.chunks.push_back(std::move(chunk));
    }
  }

  // A tuple (dtype, layout, requires_grad, memory format, pin_memory), or before that a dict of them.
  void read_properties(DcpEntry& entry, const Value* value) const {
    if (!value) bad("'", entry.key, "': its 'properties' are missing");
    const Value& state = state_of(*value, "TensorProperties");
    const Tuple* tuple = state.get_if<Tuple>();
    const Value* dtype = tuple && !tuple->items.empty() ? &tuple->items[0] : state.find("dtype");
    const Value* grad = tuple && tuple->items.size() > 2 ? &tuple->items[2] : state.find("requires_grad");
    const DtypeName* name = dtype ? dtype->get_if<DtypeName>() : nullptr;
    if (!name) bad("'", entry.key, "': its dtype is missing");
    const auto known = dtype_from_torch(name->name);
    if (!known)
      fail(ErrorKind::kUnsupported, where_, ": tensor '", entry.key, "' has the dtype ", name->name,
           ", which can't be held");
    entry.dtype = *known;
    entry.requires_grad = grad && grad->get_if<bool>() && *grad->get_if<bool>();
  }

  std::string_view where_;
  std::unordered_map<std::string, DcpItem> items_;
  std::unordered_map<std::string, const List*> paths_;
};

}  // namespace

std::vector<DcpEntry> parse_dcp_metadata(std::string_view pickle, std::string_view where) {
  PickleLimits limits;
  limits.objects = 64 << 20;  // a thousand ranks' chunks
  const Pickled pickled = read_pickle(pickle, where, limits, PickleNames::kDcp);
  if (!pickled.tensors.empty()) fail(ErrorKind::kCorrupt, where, ": tensors in a place where only their shapes belong");
  return Parser(where).parse(pickled.value);
}

}  // namespace shardsmith
