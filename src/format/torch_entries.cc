// The tensors of a TorchObject become entries of an Index.
#include <map>
#include <tuple>
#include <unordered_map>

#include "base/error.h"
#include "format/torch_object.h"

namespace shardsmith {
namespace {

// Gives each tensor in the value its path and its entry, in the order of appearance.
class Entries {
 public:
  Entries(const TorchObject& object, uint32_t file, Index& index) : object_(object), file_(file), index_(index) {
    for (const PtSlice& slice : object.record.slices) {
      if (slice.tensor >= object.pickled.tensors.size() || !slices_.emplace(slice.tensor, &slice).second)
        fail(ErrorKind::kCorrupt, path(), ": record '", kPtRecordName, "': slice '", slice.name, "' of tensor ",
             slice.tensor, ", of which there is none or two");
    }
  }

  void walk(Value& value, const std::string& where) {
    if (TensorRef* tensor = value.get_if<TensorRef>()) {
      add(*tensor, where);
    } else if (List* list = value.get_if<List>()) {
      walk_items(*list, where);
    } else if (Tuple* tuple = value.get_if<Tuple>()) {
      walk_items(tuple->items, where);
    } else if (Set* set = value.get_if<Set>()) {
      walk_items(set->items, where);
    } else if (Opaque* special = value.get_if<Opaque>()) {
      if (is_special_tensor(special->class_name) && special->state.size() == 1)
        walk_special(special->state[0], where);
      else
        walk_items(special->state, where);
    } else if (Dict* dict = value.get_if<Dict>()) {
      for (auto& [key, item] : dict->items) {
        walk(key, where);
        if (const std::string* name = key.get_if<std::string>())
          walk(item, path_join(where, *name));
        else if (const int64_t* number = key.get_if<int64_t>())
          walk(item, path_join(where, *number));
        else
          walk(item, path_join(where, to_json(key)));
      }
    }
  }

 private:
  using View = std::tuple<size_t, int64_t, Shape, Strides, Dtype>;

  const std::string& path() const { return index_.files[file_].path; }

  void walk_items(List& items, const std::string& where) {
    for (size_t i = 0; i < items.size(); ++i) walk(items[i], path_join(where, static_cast<int64_t>(i)));
  }

  // The parts of a sparse or quantised tensor: {name}/indices, ...; the integers of a quantised one have its own name.
  void walk_special(Value& parts, const std::string& where) {
    Dict* dict = parts.get_if<Dict>();
    if (!dict) return walk(parts, where);
    for (auto& [key, item] : dict->items) {
      const std::string* name = key.get_if<std::string>();
      walk(item, name && *name == "data" ? where : path_join(where, name ? *name : to_json(key)));
    }
  }

  void add(TensorRef& reference, const std::string& where) {
    const PickledTensor& tensor = object_.pickled.tensors[reference.index];
    const auto found = slices_.find(reference.index);
    TensorEntry entry;
    entry.name = where.empty() ? "tensor" : where;
    entry.dtype = tensor.dtype;
    entry.shape = tensor.size;
    Slice slice;
    slice.file = file_;
    slice.box = whole(tensor.size);
    if (found != slices_.end()) {
      const PtSlice& listed = *found->second;
      bool fits = listed.box.extent.size() == tensor.size.size();
      // A local tensor may be larger than its box (padding), never smaller.
      for (size_t d = 0; fits && d < tensor.size.size(); ++d) fits = listed.box.extent[d] <= tensor.size[d];
      if (!fits)
        fail(ErrorKind::kCorrupt, path(), ": tensor '", listed.name, "' ", to_string(tensor.size),
             " is smaller than its slice ", to_string(listed.box));
      if (seen_.insert_or_assign(reference.index, 0).second) entry.name = listed.name;
      try {
        volume(listed.shape);
      } catch (const Error& e) {
        fail(ErrorKind::kCorrupt, path(), ": tensor '", listed.name, "': ", e.what());
      }
      entry.shape = listed.shape;
      slice.box = listed.box;
    }
    reference.index = index_.tensors.size();
    if (volume(tensor.size) != 0) {
      const auto [view, is_new] =
          views_.emplace(View{tensor.storage, tensor.offset, tensor.size, tensor.strides, tensor.dtype}, entry.name);
      if (!is_new) {
        entry.alias_of = view->second;
        entry.shape = index_.tensors[numbers_[view->second]].shape;
        index_.tensors.push_back(std::move(entry));
        return;
      }
      numbers_[entry.name] = index_.tensors.size();
    }
    const StoredBytes& held = object_.storages[tensor.storage];
    const uint64_t inner = static_cast<uint64_t>(tensor.offset) * static_cast<uint64_t>(size_of(tensor.dtype));
    slice.strides = tensor.strides;
    slice.offset = held.offset + inner;
    if (object_.big_endian && size_of(tensor.dtype) > 1) slice.encoding = Encoding::kByteSwapped;
    if (held.deflated) {
      if (slice.encoding == Encoding::kByteSwapped)
        fail(ErrorKind::kUnsupported, path(), ": tensor '", entry.name, "' is both big-endian and deflated");
      slice.encoding = Encoding::kDeflated;
      slice.offset = held.offset;
      slice.stored = held.stored;
      slice.inner = inner;
    }
    entry.slices.push_back(std::move(slice));
    index_.tensors.push_back(std::move(entry));
  }

  const TorchObject& object_;
  uint32_t file_;
  Index& index_;
  std::unordered_map<size_t, const PtSlice*> slices_;
  std::unordered_map<size_t, int> seen_;
  std::map<View, std::string> views_;  // the first name of each
  std::unordered_map<std::string, size_t> numbers_;
};

}  // namespace

Value add_entries(TorchObject object, const std::string& where, uint32_t file, Index& index) {
  Value value = std::move(object.pickled.value);
  Entries(object, file, index).walk(value, where);
  return untag(std::move(value));
}

}  // namespace shardsmith
