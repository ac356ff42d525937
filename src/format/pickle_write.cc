// Values -> protocol 2, in the words that torch's weights_only unpickler accepts.
#include <optional>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "format/pickle.h"
#include "format/pickle_emit.h"
#include "format/pickle_names.h"

namespace shardsmith {
namespace {

constexpr const char* kTag = "__shardsmith__";
constexpr size_t kMaxDepth = 150;  // a tag may add two levels to what read_pickle takes

// Can it be a key of a Python dict once it is written?
bool hashable(const Value& value) {
  if (value.get_if<List>() || value.get_if<Dict>() || value.get_if<Set>() || value.get_if<Opaque>()) return false;
  if (const Tuple* tuple = value.get_if<Tuple>()) {
    for (const Value& item : tuple->items)
      if (!hashable(item)) return false;
  }
  return true;
}

bool all_hashable(const List& items) {
  for (const Value& item : items)
    if (!hashable(item)) return false;
  return true;
}

class Writer : private PickleEmitter {
 public:
  Writer(std::span<const PickledTensor> tensors, std::span<const PickledStorage> storages, std::string_view where)
      : PickleEmitter(where),
        tensors_(tensors),
        storages_(storages),
        untyped_(storages.size(), false),
        tensor_memo_(tensors.size(), kNotYet) {
    std::vector<std::optional<Dtype>> seen(storages.size());
    for (const PickledTensor& tensor : tensors) {
      if (tensor.storage >= storages.size())
        fail(ErrorKind::kInvalidArgument, where, ": a tensor of storage ", tensor.storage, " of ", storages.size());
      std::optional<Dtype>& first = seen[tensor.storage];
      // Several types over one storage, or a type without a storage class: torch's untyped storage.
      if ((first && *first != tensor.dtype) || storage_class(tensor.dtype).empty() ||
          storages[tensor.storage].bytes % static_cast<uint64_t>(size_of(tensor.dtype)) != 0)
        untyped_[tensor.storage] = true;
      first = tensor.dtype;
    }
  }

  std::string run(const Value& value) {
    out_ = "\x80\x02";
    put_value(value, 0);
    out_ += '.';
    return std::move(out_);
  }
  const std::vector<size_t>& order() const { return order_; }

 private:
  void put_value(const Value& value, size_t depth) {
    if (depth > kMaxDepth)
      fail(ErrorKind::kInvalidArgument, where_, ": values nested deeper than ", kMaxDepth, " levels");
    std::visit([&](const auto& v) { put(v, depth); }, value.variant());
  }

  void put(const None&, size_t) { out_ += 'N'; }
  void put(bool v, size_t) { out_ += v ? '\x88' : '\x89'; }
  void put(int64_t v, size_t) { put_integer(v); }
  void put(double v, size_t) { put_float(v); }
  void put(const std::string& v, size_t) { put_text(v); }
  void put(const Bytes& v, size_t) {
    std::string text;
    for (unsigned char c : v.data) {
      if (c < 0x80) {
        text += static_cast<char>(c);
      } else {
        text += static_cast<char>(0xc0 | c >> 6);
        text += static_cast<char>(0x80 | (c & 0x3f));
      }
    }
    put_global("_codecs", "encode");
    put_text(text);
    put_text("latin1");
    out_ += "\x86R";
  }
  void put(const List& v, size_t depth) {
    out_ += ']';
    if (v.empty()) return;
    out_ += '(';
    for (const Value& item : v) put_value(item, depth + 1);
    out_ += 'e';
  }
  void put(const Tuple& v, size_t depth) {
    const size_t n = v.items.size();
    if (n == 0) out_ += ')';
    if (n > 3) out_ += '(';
    for (const Value& item : v.items) put_value(item, depth + 1);
    if (n > 3)
      out_ += 't';
    else if (n > 0)
      out_ += static_cast<char>('\x84' + n);
  }
  void put(const Set& v, size_t depth) {
    if (!all_hashable(v.items)) return put_tagged("set", {{"items", Value(v.items)}}, depth);
    put_global("__builtin__", "set");
    put(v.items, depth);
    out_ += "\x85R";
  }
  void put(const Dict& v, size_t depth) {
    bool plain = true;
    for (const auto& [key, item] : v.items) {
      const std::string* name = key.get_if<std::string>();
      plain = plain && hashable(key) && !(name && *name == kTag);
    }
    if (plain) return put_dict(v, depth);
    List pairs;
    for (const auto& [key, item] : v.items) pairs.push_back(Value(List{key, item}));
    put_tagged("dict", {{"items", Value(std::move(pairs))}}, depth);
  }
  void put(const TensorRef& v, size_t) {
    if (v.index >= tensors_.size())
      fail(ErrorKind::kInvalidArgument, where_, ": a value refers to tensor ", v.index, " of ", tensors_.size());
    if (tensor_memo_[v.index] != kNotYet) return put_get(tensor_memo_[v.index]);
    put_tensor(tensors_[v.index]);
    order_.push_back(v.index);
    tensor_memo_[v.index] = put_memo();
  }
  void put(const Opaque& v, size_t depth) {
    if (put_torchs_own(v, depth)) return;
    put_tagged("object", {{"class", Value(v.class_name)}, {"state", Value(List(v.state))}}, depth);
  }
  void put(const BigInt& v, size_t depth) {
    if (const auto bytes = pickle_long(v.digits))
      put_long(*bytes);
    else
      put_tagged("int", {{"digits", Value(v.digits)}}, depth);
  }
  void put(const Complex& v, size_t depth) {
    put_global("__builtin__", "complex");
    put(v.real, depth);
    put(v.imag, depth);
    out_ += "\x86R";
  }
  void put(const DtypeName& v, size_t depth) {
    const auto known = pickle_global("torch", v.name);
    if (known && known->name == PickleName::kDtype)
      put_global("torch", v.name);
    else
      put_tagged("dtype", {{"name", Value(v.name)}}, depth);
  }

  void put_dict(const Dict& dict, size_t depth) {
    out_ += '}';
    if (dict.items.empty()) return;
    out_ += '(';
    for (const auto& [key, item] : dict.items) {
      put_value(key, depth + 1);
      put_value(item, depth + 1);
    }
    out_ += 'u';
  }
  void put_tagged(const char* kind, std::vector<std::pair<const char*, Value>> fields, size_t depth) {
    Dict dict;
    dict.items.emplace_back(Value(kTag), Value(kind));
    for (auto& [name, value] : fields) dict.items.emplace_back(Value(name), std::move(value));
    put_dict(dict, depth);
  }

  // What torch can build again; false for what becomes a tag.
  bool put_torchs_own(const Opaque& v, size_t depth) {
    if (v.class_name == "torch.quantized") return put_quantized(v, depth);
    if (is_special_tensor(v.class_name)) return put_sparse(v, depth);
    if (v.class_name == "torch.device" || v.class_name == "torch.layout") {
      const bool device = v.class_name == "torch.device";
      if (v.state.empty() || v.state.size() > (device ? 2 : 1) || !v.state[0].get_if<std::string>()) return false;
      if (v.state.size() == 2 && !v.state[1].get_if<int64_t>()) return false;
      put_global(device ? "torch" : "torch.serialization", device ? "device" : "_get_layout");
      put(Tuple{v.state}, depth);
      out_ += 'R';
      return true;
    }
    const size_t dot = v.class_name.rfind('.');
    if (!v.state.empty() || dot == std::string::npos) return false;
    const auto known = pickle_global(v.class_name.substr(0, dot), v.class_name.substr(dot + 1));
    if (!known || (known->name != PickleName::kClass && known->name != PickleName::kQScheme)) return false;
    put_global(v.class_name.substr(0, dot), v.class_name.substr(dot + 1));
    return true;
  }

  bool put_sparse(const Opaque& v, size_t depth) {
    const bool rows = v.class_name == "torch.sparse_csr" || v.class_name == "torch.sparse_bsr";
    const bool coo = v.class_name == "torch.sparse_coo";
    if (v.state.size() != 1) return false;
    std::vector<const Value*> parts;
    const std::vector<const char*> names =
        coo    ? std::vector<const char*>{"indices", "values", "size", "is_coalesced"}
        : rows ? std::vector<const char*>{"crow_indices", "col_indices", "values", "size"}
               : std::vector<const char*>{"ccol_indices", "row_indices", "values", "size"};
    for (const char* name : names) parts.push_back(v.state[0].find(name));
    for (const Value* part : parts)
      if (!part) return false;
    for (size_t i = 0; i < (coo ? 2 : 3); ++i)
      if (!parts[i]->get_if<TensorRef>()) return false;
    if (!parts[coo ? 2 : 3]->get_if<Tuple>()) return false;
    put_global("torch._utils", "_rebuild_sparse_tensor");
    put_global("torch.serialization", "_get_layout");
    put_text(v.class_name);
    out_ += "\x85R(";
    for (const Value* part : parts)
      if (!(coo && part == parts[3] && part->is_none())) put_value(*part, depth + 2);
    out_ += "t\x86R";
    return true;
  }

  bool put_quantized(const Opaque& v, size_t depth) {
    if (v.state.size() != 1) return false;
    const auto get = [&](const char* name) { return v.state[0].find(name); };
    const TensorRef* data = get("data") ? get("data")->get_if<TensorRef>() : nullptr;
    const std::string* scheme = get("qscheme") ? get("qscheme")->get_if<std::string>() : nullptr;
    if (!data || !scheme || !scheme->starts_with("torch.")) return false;
    const bool per_channel = scheme->starts_with("torch.per_channel");
    const std::vector<const Value*> params =
        per_channel ? std::vector<const Value*>{get("scales"), get("zero_points"), get("axis")}
                    : std::vector<const Value*>{get("scale"), get("zero_point")};
    for (const Value* param : params)
      if (!param) return false;
    const auto known = pickle_global("torch", scheme->substr(6));
    if (!known || known->name != PickleName::kQScheme || data->index >= tensors_.size()) return false;
    const PickledTensor& tensor = tensors_[data->index];
    const std::string_view storage = quantized_storage_class(tensor.dtype);
    if (storage.empty())
      fail(ErrorKind::kInvalidArgument, where_, ": a quantised tensor whose data are ", to_string(tensor.dtype));
    if (tensor_memo_[data->index] != kNotYet) {
      put_get(tensor_memo_[data->index]);
      return true;
    }
    put_global("torch._utils", "_rebuild_qtensor");
    out_ += '(';
    put_storage(storages_[tensor.storage], storage, size_of(tensor.dtype));
    put_integer(tensor.offset);
    put_integers(tensor.size);
    put_integers(tensor.strides);
    out_ += '(';
    put_global("torch", scheme->substr(6));
    for (const Value* param : params) put_value(*param, depth + 2);
    out_ += 't';
    put(tensor.requires_grad, 0);
    put_global("collections", "OrderedDict");
    out_ += ")RtR";
    order_.push_back(data->index);
    tensor_memo_[data->index] = put_memo();
    return true;
  }

  void put_storage(const PickledStorage& storage, std::string_view cls, int64_t element) {
    out_ += '(';
    put_text("storage");
    put_global(cls == "UntypedStorage" ? "torch.storage" : "torch", cls);
    put_text(storage.key);
    put_text("cpu");
    put(static_cast<int64_t>(storage.bytes / static_cast<uint64_t>(element)), 0);
    out_ += "tQ";
  }

  void put_tensor(const PickledTensor& tensor) {
    if (!quantized_storage_class(tensor.dtype).empty())
      fail(ErrorKind::kUnsupported, where_, ": a tensor of ", to_string(tensor.dtype),
           " without scale and zero point, which torch can't load; keep it inside of its 'torch.quantized'");
    const PickledStorage& storage = storages_[tensor.storage];
    const bool untyped = untyped_[tensor.storage];
    put_global("torch._utils", untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    out_ += '(';
    put_storage(storage, untyped ? "UntypedStorage" : storage_class(tensor.dtype), untyped ? 1 : size_of(tensor.dtype));
    put_integer(tensor.offset);
    put_integers(tensor.size);
    put_integers(tensor.strides);
    put(tensor.requires_grad, 0);
    put_global("collections", "OrderedDict");
    out_ += ")R";
    if (untyped) put_global("torch", to_string(tensor.dtype));
    out_ += "tR";
  }

  std::span<const PickledTensor> tensors_;
  std::span<const PickledStorage> storages_;
  std::vector<bool> untyped_;
  static constexpr uint32_t kNotYet = UINT32_MAX;
  std::vector<uint32_t> tensor_memo_;  // slots
  std::vector<size_t> order_;
};

template <typename T>
const T* field(const Value& value, std::string_view name) {
  const Value* found = value.find(name);
  return found ? found->get_if<T>() : nullptr;
}

}  // namespace

std::string write_pickle(const Value& value, std::span<const PickledTensor> tensors,
                         std::span<const PickledStorage> storages, std::string_view where, std::vector<size_t>* order) {
  Writer writer(tensors, storages, where);
  std::string bytes = writer.run(value);
  if (order) *order = writer.order();
  return bytes;
}

Value untag(Value value) {
  if (List* list = value.get_if<List>()) {
    for (Value& item : *list) item = untag(std::move(item));
    return value;
  }
  if (Tuple* tuple = value.get_if<Tuple>()) {
    for (Value& item : tuple->items) item = untag(std::move(item));
    return value;
  }
  Dict* dict = value.get_if<Dict>();
  if (!dict) return value;
  for (auto& [key, item] : dict->items) item = untag(std::move(item));
  if (dict->items.empty()) return value;
  const std::string* first = dict->items[0].first.get_if<std::string>();  // the writer puts the tag first
  const std::string* kind = dict->items[0].second.get_if<std::string>();
  if (!first || !kind || *first != kTag) return value;
  if (*kind == "object") {
    const auto* name = field<std::string>(value, "class");
    const auto* state = field<List>(value, "state");
    if (name && state) return Value(Opaque{*name, *state});
  } else if (*kind == "int") {
    if (const auto* digits = field<std::string>(value, "digits")) return Value(BigInt{*digits});
  } else if (*kind == "dtype") {
    if (const auto* name = field<std::string>(value, "name")) return Value(DtypeName{*name});
  } else if (*kind == "set") {
    if (const auto* items = field<List>(value, "items")) return Value(Set{*items});
  } else if (*kind == "dict") {
    if (const auto* items = field<List>(value, "items")) {
      Dict plain;
      for (const Value& pair : *items) {
        const List* both = pair.get_if<List>();
        if (!both || both->size() != 2) return value;
        plain.items.emplace_back((*both)[0], (*both)[1]);
      }
      return Value(std::move(plain));
    }
  }
  return value;
}

}  // namespace shardsmith
