// The tensors of a TorchObject become entries of an Index.
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "format/torch_object.h"

namespace shardsmith {
namespace {

// Gives each tensor in the value its path and its entry, in the order of appearance.
class Entries {
 public:
  Entries(const TorchObject& object, uint32_t file, Index& index)
      : object_(object),
        file_(file),
        index_(index),
        slices_(object.pickled.tensors.size(), nullptr),
        seen_(slices_.size()) {
    index.tensors.reserve(index.tensors.size() + slices_.size());
    views_.reserve(slices_.size());
    for (const PtSlice& slice : object.record.slices) {
      if (slice.tensor >= slices_.size() || slices_[slice.tensor])
        fail(ErrorKind::kCorrupt, path(), ": record '", kPtRecordName, "': slice '", slice.name, "' of tensor ",
             slice.tensor, ", of which there is none or two");
      slices_[slice.tensor] = &slice;
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
  // The same elements of a storage.
  struct Hash {
    size_t operator()(const PickledTensor* t) const {
      return std::hash<size_t>()(t->storage) * 31 + std::hash<int64_t>()(t->offset);
    }
  };
  struct Same {
    bool operator()(const PickledTensor* a, const PickledTensor* b) const {
      return a->storage == b->storage && a->offset == b->offset && a->dtype == b->dtype && a->size == b->size &&
             a->strides == b->strides;
    }
  };

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
    const PtSlice* listed = slices_[reference.index];
    TensorEntry entry;
    entry.name = where.empty() ? "tensor" : where;
    entry.dtype = tensor.dtype;
    Slice slice;
    slice.file = file_;
    if (listed) {
      bool fits = listed->box.extent.size() == tensor.size.size();
      // A local tensor may be larger than its box (padding), never smaller.
      for (size_t d = 0; fits && d < tensor.size.size(); ++d) fits = listed->box.extent[d] <= tensor.size[d];
      if (!fits)
        fail(ErrorKind::kCorrupt, path(), ": tensor '", listed->name, "' ", to_string(tensor.size),
             " is smaller than its slice ", to_string(listed->box));
      if (!seen_[reference.index]) entry.name = listed->name;
      seen_[reference.index] = true;
      try {
        volume(listed->shape);
      } catch (const Error& e) {
        fail(ErrorKind::kCorrupt, path(), ": tensor '", listed->name, "': ", e.what());
      }
    }
    entry.shape = listed ? listed->shape : tensor.size;
    slice.box = listed ? listed->box : whole(tensor.size);
    reference.index = index_.tensors.size();
    if (volume(tensor.size) != 0) {
      const auto [view, is_new] = views_.emplace(&tensor, index_.tensors.size());
      if (!is_new) {
        entry.alias_of = index_.tensors[view->second].name;
        entry.shape = index_.tensors[view->second].shape;
        index_.tensors.push_back(std::move(entry));
        return;
      }
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
  std::vector<const PtSlice*> slices_;  // of each tensor; null where it is in no list
  std::vector<bool> seen_;
  std::unordered_map<const PickledTensor*, size_t, Hash, Same> views_;  // the first entry of each
};

}  // namespace

Value add_entries(TorchObject object, const std::string& where, uint32_t file, Index& index) {
  Value value = std::move(object.pickled.value);
  Entries(object, file, index).walk(value, where);
  return untag(std::move(value));
}

}  // namespace shardsmith
