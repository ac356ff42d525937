#include "checkpoint/full_layout.h"

#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "checkpoint/value_message.h"
#include "format/pt_write.h"

namespace shardsmith {
namespace {

Value list_of_sizes(const Shape& shape) { return List(shape.begin(), shape.end()); }

std::string bare_name(const std::string& name, const std::string& prefix) {
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

// One line of an announcement, read with suspicion: it has come over the network.
struct Announced {
  std::string name;
  Dtype dtype = Dtype::kF32;
  Shape shape;
  Box box;
};

Shape sizes_of(const Value& value, const std::string& where) {
  Shape shape;
  const List* list = value.get_if<List>();
  if (!list) fail(ErrorKind::kPeer, where, ": an announcement that can't be read");
  for (const Value& item : *list) {
    const int64_t* n = item.get_if<int64_t>();
    if (!n || *n < 0) fail(ErrorKind::kPeer, where, ": an announcement that can't be read");
    shape.push_back(*n);
  }
  return shape;
}

Announced announced_from(const Value& line, const std::string& where) {
  const List* fields = line.get_if<List>();
  const std::string* name = fields && fields->size() == 5 ? (*fields)[0].get_if<std::string>() : nullptr;
  const std::string* word = name ? (*fields)[1].get_if<std::string>() : nullptr;
  const std::optional<Dtype> dtype = word ? dtype_from_torch(*word) : std::nullopt;
  if (!dtype) fail(ErrorKind::kPeer, where, ": an announcement that can't be read");
  Announced result{*name, *dtype, sizes_of((*fields)[2], where), {}};
  result.box = {sizes_of((*fields)[3], where), sizes_of((*fields)[4], where)};
  return result;
}

// Where the tensor number `index` of a rank went.
using Places = std::vector<size_t>;

class Merger {
 public:
  Merger(int rank, const PtContent* own, std::string what) : rank_(rank), own_(own), what_(std::move(what)) {}

  void add(size_t rank, const Value& announcement) {
    const std::string where = str(what_, ": rank ", rank);
    const Value* lines = announcement.find("tensors");
    const Value* tree = announcement.find("value");
    if (!lines || !lines->get_if<List>() || !tree)
      fail(ErrorKind::kPeer, where, ": an announcement that can't be read");
    Places places;
    const List& list = *lines->get_if<List>();
    for (size_t i = 0; i < list.size(); ++i) places.push_back(add_tensor(rank, i, announced_from(list[i], where)));
    Value value = unpack_value(*tree);
    for_each_tensor(value, [&](TensorRef& reference) { reference.index = places.at(reference.index); });
    merge(value_, std::move(value));
  }

  std::vector<FullTensor> tensors;
  Value take_value() { return std::move(value_); }

 private:
  size_t add_tensor(size_t rank, size_t number, Announced tensor) {
    // What has no name is nobody else's.
    const std::string key = tensor.name.empty() ? str("#", rank, "/", number) : tensor.name;
    const auto [place, is_new] = by_name_.emplace(key, tensors.size());
    if (is_new) tensors.push_back({tensor.name, tensor.dtype, tensor.shape, {}});
    FullTensor& known = tensors[place->second];
    if (known.dtype != tensor.dtype || known.shape != tensor.shape) {
      throw Error(
          ErrorKind::kInvalidArgument,
          str(what_, ": rank ", rank, " holds '", key, "' as ", to_string(tensor.dtype), " ", to_string(tensor.shape),
              ", but rank ", known.parts[0].holders[0], " as ", to_string(known.dtype), " ", to_string(known.shape)),
          static_cast<int>(rank));
    }
    auto part =
        std::find_if(known.parts.begin(), known.parts.end(), [&](const FullPart& p) { return p.box == tensor.box; });
    if (part == known.parts.end()) part = known.parts.insert(part, FullPart{tensor.box, {}, nullptr, {}});
    if (part->holders.empty() || part->holders.back() != static_cast<int>(rank))
      part->holders.push_back(static_cast<int>(rank));
    if (static_cast<int>(rank) == rank_ && own_) {
      const PtTensor& held = own_->tensors.at(number);
      part->data = own_->storages[held.storage].data + held.offset * size_of(held.dtype);
      part->strides = held.strides;
    }
    return place->second;
  }

  static bool all_texts(const List& list) {
    return std::all_of(list.begin(), list.end(), [](const Value& v) { return v.get_if<std::string>() != nullptr; });
  }
  static bool all_dicts(const List& list) {
    return std::all_of(list.begin(), list.end(), [](const Value& v) { return v.get_if<Dict>() != nullptr; });
  }
  static void merge(Value& into, Value from) {
    if (into.is_none()) {
      into = std::move(from);
      return;
    }
    Dict* ours = into.get_if<Dict>();
    Dict* theirs = from.get_if<Dict>();
    if (ours && theirs) {
      std::unordered_map<std::string, size_t> places;
      for (size_t i = 0; i < ours->items.size(); ++i) places.emplace(to_json(ours->items[i].first), i);
      for (auto& [key, value] : theirs->items) {
        const auto [place, is_new] = places.emplace(to_json(key), ours->items.size());
        if (is_new)
          ours->items.emplace_back(key, std::move(value));
        else
          merge(ours->items[place->second].second, std::move(value));
      }
      return;
    }
    List* mine = into.get_if<List>();
    List* others = from.get_if<List>();
    if (!mine || !others) return;
    if (all_texts(*mine) && all_texts(*others)) {
      for (Value& text : *others)
        if (std::find(mine->begin(), mine->end(), text) == mine->end()) mine->push_back(std::move(text));
    } else if (mine->size() == others->size() && all_dicts(*mine) && all_dicts(*others)) {
      for (size_t i = 0; i < mine->size(); ++i) merge((*mine)[i], std::move((*others)[i]));
    }
  }

  int rank_;
  const PtContent* own_;
  std::string what_;
  std::unordered_map<std::string, size_t> by_name_;
  Value value_;
};

// The parts as slices: each has a file of its own, which stands for its holders. Of what this rank holds `own` gives
// the place in memory, as an offset.
Index index_of(const std::vector<FullTensor>& tensors, bool own) {
  Index index;
  index.format = "full";
  for (const FullTensor& tensor : tensors) {
    TensorEntry entry{tensor.name, tensor.dtype, tensor.shape, {}, {}};
    for (const FullPart& part : tensor.parts) {
      Slice slice;
      slice.box = part.box;
      slice.file = static_cast<uint32_t>(index.files.size());
      slice.strides = contiguous_strides(part.box.extent);
      if (own && part.data) {
        slice.offset = reinterpret_cast<uintptr_t>(part.data);
        slice.strides = part.strides;
      }
      const uint64_t bytes = static_cast<uint64_t>(volume(part.box.extent) * size_of(tensor.dtype));
      index.files.push_back({str("rank ", part.holders[0]), bytes, nullptr});
      entry.slices.push_back(std::move(slice));
    }
    index.tensors.push_back(std::move(entry));
  }
  index.reindex();
  return index;
}

void check_cover(const std::vector<FullTensor>& tensors, const std::string& what) {
  try {
    validate(index_of(tensors, false));
  } catch (const Error& e) {
    fail(ErrorKind::kInvalidArgument, what, ": ", e.what(), "; nothing was written");
  }
}

std::vector<FullTensor> translated(const std::vector<FullTensor>& tensors, const FamilyModel& family,
                                   std::vector<std::string>& left_out) {
  std::vector<const FullPart*> parts;  // by file
  for (const FullTensor& tensor : tensors)
    for (const FullPart& part : tensor.parts) parts.push_back(&part);
  std::unordered_map<std::string_view, bool> known;
  for (const FamilyTensor& tensor : family.tensors)
    for (const Piece& piece : tensor.pieces) known.emplace(piece.name, true);
  for (const FullTensor& tensor : tensors)
    if (!known.count(tensor.name)) left_out.push_back(tensor.name);
  const Index index = to_hf(index_of(tensors, true), family);
  std::vector<FullTensor> result;
  for (const TensorEntry& entry : index.tensors) {
    FullTensor tensor{entry.name, entry.dtype, entry.shape, {}};
    for (const Slice& slice : entry.slices) {
      const FullPart& part = *parts[slice.file];
      const auto* data = part.data ? reinterpret_cast<const std::byte*>(slice.offset) : nullptr;
      tensor.parts.push_back({slice.box, part.holders, data, slice.strides});
    }
    result.push_back(std::move(tensor));
  }
  return result;
}

// Hugging Face names, ties under all of them.
Value dict_of(const std::vector<FullTensor>& tensors, const FamilyModel& family) {
  Dict dict;
  std::optional<size_t> tied;
  for (size_t i = 0; i < tensors.size(); ++i) {
    dict.items.emplace_back(tensors[i].name, TensorRef{i});
    if (family.tensors[i].also_last) tied = i;
  }
  for (const std::string& name : family.tied_names)
    if (tied) dict.items.emplace_back(name, TensorRef{*tied});
  return dict;
}

}  // namespace

Value announce_full(const PtContent& content, const std::string& prefix, const std::string& what) {
  List lines;
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    const PtTensor& tensor = content.tensors[i];
    check_pt_tensor(content, i, what);
    if (!content.storages[tensor.storage].data && content.storages[tensor.storage].size > 0)
      fail(ErrorKind::kInvalidArgument, what, ": tensor '", tensor.name, "' is not in memory");
    const bool named = !tensor.name.empty();
    const Box box = named ? tensor.box : whole(tensor.size);
    lines.push_back(List{bare_name(tensor.name, prefix), std::string(to_string(tensor.dtype)),
                         list_of_sizes(named ? tensor.global : tensor.size), list_of_sizes(box.offset),
                         list_of_sizes(box.extent)});
  }
  Value value;
  value.set("tensors", std::move(lines));
  value.set("value", pack_value(content.value));
  return value;
}

FullFile merge_full(const std::vector<Value>& announcements, int rank, const PtContent* own, const FamilyModel* family,
                    const std::string& what) {
  Merger merger(rank, own, what);
  for (size_t r = 0; r < announcements.size(); ++r)
    if (!announcements[r].is_none()) merger.add(r, announcements[r]);
  check_cover(merger.tensors, what);
  FullFile file;
  file.content.value = merger.take_value();
  file.tensors = std::move(merger.tensors);
  if (family) {
    file.tensors = translated(file.tensors, *family, file.left_out);
    file.content.value = dict_of(file.tensors, *family);
  }
  for (size_t i = 0; i < file.tensors.size(); ++i) {
    const FullTensor& tensor = file.tensors[i];
    PtTensor whole_tensor;
    whole_tensor.dtype = tensor.dtype;
    whole_tensor.storage = i;
    whole_tensor.size = tensor.shape;
    whole_tensor.strides = contiguous_strides(tensor.shape);
    file.content.tensors.push_back(std::move(whole_tensor));
    file.content.storages.push_back({static_cast<uint64_t>(volume(tensor.shape) * size_of(tensor.dtype)), nullptr, {}});
  }
  return file;
}

}  // namespace shardsmith
