// Values -> protocol 2, in the words that torch's weights_only unpickler accepts.
#include <bit>
#include <optional>
#include <set>
#include <unordered_map>

#include "base/error.h"
#include "base/utf8.h"
#include "format/bytes.h"
#include "format/pickle.h"
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

// Shortest little-endian two's complement; nothing for text that is no integer or needs more than 255 bytes.
std::optional<std::string> long_bytes(const std::string& digits) {
  const bool negative = !digits.empty() && digits[0] == '-';
  const size_t begin = negative || (!digits.empty() && digits[0] == '+') ? 1 : 0;
  if (begin == digits.size() || digits.size() > 620) return {};
  std::string magnitude;
  for (size_t i = begin; i < digits.size(); ++i) {
    if (digits[i] < '0' || digits[i] > '9') return {};
    unsigned carry = static_cast<unsigned>(digits[i] - '0');
    for (char& c : magnitude) {
      carry += static_cast<unsigned char>(c) * 10u;
      c = static_cast<char>(carry);
      carry >>= 8;
    }
    if (carry) magnitude += static_cast<char>(carry);
  }
  magnitude += '\0';  // room for the sign
  if (negative) {
    unsigned carry = 1;
    for (char& c : magnitude) {
      carry += static_cast<unsigned char>(~c);
      c = static_cast<char>(carry);
      carry >>= 8;
    }
  }
  const auto sign = [](char c) { return static_cast<signed char>(c) < 0; };
  while (magnitude.size() > 1 && (magnitude.back() == 0 || magnitude.back() == '\xff') &&
         sign(magnitude.back()) == sign(magnitude[magnitude.size() - 2]))
    magnitude.pop_back();
  if (magnitude.size() > 255) return {};
  return magnitude;
}

class Writer {
 public:
  Writer(std::span<const PickledTensor> tensors, std::span<const PickledStorage> storages, std::string_view where)
      : tensors_(tensors), storages_(storages), where_(where), untyped_(storages.size(), false) {
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
  void put(int64_t v, size_t) {
    if (v >= 0 && v < 256) {
      out_ += 'K';
      put_le(out_, static_cast<uint8_t>(v));
    } else if (v >= 0 && v < 65536) {
      out_ += 'M';
      put_le(out_, static_cast<uint16_t>(v));
    } else if (v >= INT32_MIN && v <= INT32_MAX) {
      out_ += 'J';
      put_le(out_, static_cast<uint32_t>(v));
    } else {
      put_long(*long_bytes(std::to_string(v)));
    }
  }
  void put(double v, size_t) {
    const uint64_t bits = std::bit_cast<uint64_t>(v);
    out_ += 'G';
    for (int shift = 56; shift >= 0; shift -= 8) out_ += static_cast<char>(bits >> shift);
  }
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
    if (const auto known = tensor_memo_.find(v.index); known != tensor_memo_.end()) return put_get(known->second);
    put_tensor(tensors_[v.index]);
    order_.push_back(v.index);
    tensor_memo_[v.index] = put_memo();
  }
  void put(const Opaque& v, size_t depth) {
    put_tagged("object", {{"class", Value(v.class_name)}, {"state", Value(List(v.state))}}, depth);
  }
  void put(const BigInt& v, size_t depth) {
    if (const auto bytes = long_bytes(v.digits))
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

  void put_long(const std::string& bytes) {
    out_ += '\x8a';
    put_le(out_, static_cast<uint8_t>(bytes.size()));
    out_ += bytes;
  }
  void put_text(const std::string& text) {
    if (const auto known = text_memo_.find(text); known != text_memo_.end()) return put_get(known->second);
    if (!is_utf8(text)) fail(ErrorKind::kInvalidArgument, where_, ": a text that is not UTF-8; store it as bytes");
    if (text.size() > UINT32_MAX) fail(ErrorKind::kUnsupported, where_, ": a text of ", text.size(), " bytes");
    out_ += 'X';
    put_le(out_, static_cast<uint32_t>(text.size()));
    out_ += text;
    if (text.size() <= 256) text_memo_[text] = put_memo();
  }
  void put_global(std::string_view module, std::string_view name) {
    std::string line = str('c', module, '\n', name, '\n');
    if (const auto known = global_memo_.find(line); known != global_memo_.end()) return put_get(known->second);
    out_ += line;
    global_memo_[std::move(line)] = put_memo();
  }
  void put_get(uint32_t slot) {
    out_ += slot < 256 ? 'h' : 'j';
    put_slot(slot);
  }
  uint32_t put_memo() {
    out_ += memo_ < 256 ? 'q' : 'r';
    put_slot(memo_);
    return memo_++;
  }
  void put_slot(uint32_t slot) {
    if (slot < 256)
      put_le(out_, static_cast<uint8_t>(slot));
    else
      put_le(out_, slot);
  }

  void put_integers(const std::vector<int64_t>& values) {
    Tuple tuple;
    for (int64_t v : values) tuple.items.emplace_back(v);
    put(tuple, 0);
  }
  void put_tensor(const PickledTensor& tensor) {
    const PickledStorage& storage = storages_[tensor.storage];
    const bool untyped = untyped_[tensor.storage];
    put_global("torch._utils", untyped ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
    out_ += "((";
    put_text("storage");
    if (untyped)
      put_global("torch.storage", "UntypedStorage");
    else
      put_global("torch", storage_class(tensor.dtype));
    put_text(storage.key);
    put_text("cpu");
    put(static_cast<int64_t>(storage.bytes / static_cast<uint64_t>(untyped ? 1 : size_of(tensor.dtype))), 0);
    out_ += "tQ";
    put(tensor.offset, 0);
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
  std::string_view where_;
  std::vector<bool> untyped_;
  std::string out_;
  uint32_t memo_ = 0;
  std::unordered_map<std::string, uint32_t> text_memo_, global_memo_;
  std::unordered_map<size_t, uint32_t> tensor_memo_;
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
