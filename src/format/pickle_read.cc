// The pickle machine. Objects live in an arena and refer to each other by number, so that shared and cyclic
// references cost nothing while reading; at the end the root is copied out into a Value, within limits.
#include <bit>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <unordered_set>

#include "base/error.h"
#include "format/bytes.h"
#include "format/pickle.h"
#include "format/pickle_names.h"

namespace shardsmith {
namespace {

using Id = uint32_t;

enum class Kind : uint8_t { kScalar, kList, kTuple, kDict, kSet, kGlobal, kStorage, kTensor, kOpaque };

struct Node {
  Kind kind = Kind::kScalar;
  std::vector<Id> items;                                // a dict's keys and values in turn
  Value scalar;                                         // kScalar; kGlobal, kOpaque: the full name
  PickleGlobal global{PickleName::kClass, Dtype::kU8};  // kGlobal
  size_t index = 0;                                     // of a storage or a tensor
  Dtype dtype = Dtype::kU8;                             // of a storage
};

enum Opcode : unsigned char {
  kMark = '(',
  kStop = '.',
  kPop = '0',
  kPopMark = '1',
  kDup = '2',
  kBinFloat = 'G',
  kBinInt = 'J',
  kBinInt1 = 'K',
  kBinInt2 = 'M',
  kNone = 'N',
  kBinPersid = 'Q',
  kReduce = 'R',
  kBinString = 'T',
  kShortBinString = 'U',
  kBinUnicode = 'X',
  kAppend = 'a',
  kBuild = 'b',
  kGlobalName = 'c',
  kDict = 'd',
  kEmptyDict = '}',
  kAppends = 'e',
  kBinGet = 'h',
  kInst = 'i',
  kLongBinGet = 'j',
  kList = 'l',
  kEmptyList = ']',
  kBinPut = 'q',
  kLongBinPut = 'r',
  kSetItem = 's',
  kTuple = 't',
  kEmptyTuple = ')',
  kSetItems = 'u',
  kBinBytes = 'B',
  kShortBinBytes = 'C',
  kProto = 0x80,
  kNewObj = 0x81,
  kTuple1 = 0x85,
  kTuple2 = 0x86,
  kTuple3 = 0x87,
  kNewTrue = 0x88,
  kNewFalse = 0x89,
  kLong1 = 0x8a,
  kLong4 = 0x8b,
  kShortBinUnicode = 0x8c,
  kBinUnicode8 = 0x8d,
  kBinBytes8 = 0x8e,
  kEmptySet = 0x8f,
  kAddItems = 0x90,
  kFrozenSet = 0x91,
  kNewObjEx = 0x92,
  kStackGlobal = 0x93,
  kMemoize = 0x94,
  kFrame = 0x95,
  kByteArray8 = 0x96,
};

// Little-endian two's complement to decimal digits.
std::string decimal(std::string_view bytes) {
  std::vector<uint32_t> words;  // little-endian, the magnitude
  const bool negative = static_cast<signed char>(bytes.back()) < 0;
  for (size_t i = 0; i < bytes.size(); i += 4) {
    uint32_t word = negative ? 0xffffffffu : 0;
    for (size_t k = 0; k < 4 && i + k < bytes.size(); ++k) {
      word &= ~(0xffu << (8 * k));
      word |= static_cast<uint32_t>(static_cast<unsigned char>(bytes[i + k])) << (8 * k);
    }
    words.push_back(word);
  }
  if (negative) {
    bool carry = true;
    for (uint32_t& word : words) {
      word = ~word + carry;
      carry = carry && word == 0;
    }
  }
  std::string digits;
  while (!words.empty()) {
    uint64_t rest = 0;
    for (size_t i = words.size(); i-- > 0;) {
      rest = (rest << 32) | words[i];
      words[i] = static_cast<uint32_t>(rest / 10);
      rest %= 10;
    }
    digits += static_cast<char>('0' + rest);
    while (!words.empty() && words.back() == 0) words.pop_back();
  }
  if (negative) digits += '-';
  return {digits.rbegin(), digits.rend()};
}

class Machine {
 public:
  Machine(std::string_view bytes, std::string_view where, const PickleLimits& limits)
      : bytes_(bytes), where_(where), limits_(limits) {
    none_ = make_scalar(Value());
    true_ = make_scalar(Value(true));
    false_ = make_scalar(Value(false));
    empty_tuple_ = make(Kind::kTuple);
  }

  Pickled run() {
    while (true) {
      const auto op = static_cast<unsigned char>(take(1)[0]);
      if (op == kStop) break;
      step(op);
    }
    const Id root = pop();
    result_.value = value_of(root, 0);
    return std::move(result_);
  }

 private:
  template <typename... Args>
  [[noreturn]] void bad(const Args&... why) const {
    fail(ErrorKind::kCorrupt, where_, ": ", why..., " (byte ", at_, " of the pickle)");
  }
  [[noreturn]] void forbidden(std::string_view module, std::string_view name) const {
    bad("forbidden: it asks for '", printable(module), ".", printable(name),
        "', which is not among the names that a checkpoint may hold; nothing was executed");
  }
  static std::string printable(std::string_view text) {
    std::string out;
    for (char c : text.substr(0, 200)) out += c >= 0x20 && c < 0x7f ? c : '?';
    return out;
  }

  std::string_view take(uint64_t n) {
    if (n > bytes_.size() - at_) bad("truncated: ", n, " more bytes expected");
    const std::string_view out = bytes_.substr(at_, n);
    at_ += n;
    return out;
  }
  template <typename T>
  T number() {
    return get_le<T>(take(sizeof(T)), 0);
  }
  std::string_view line() {
    const size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) bad("truncated: a name without an end");
    const std::string_view out = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return out;
  }

  // Work that a short pickle could ask for again and again: copying what it has made once.
  void charge(uint64_t items) {
    charged_ += items;
    if (charged_ > 4 * limits_.objects) bad("copies more than ", 4 * limits_.objects, " objects");
  }

  Id make(Kind kind) {
    if (nodes_.size() >= limits_.objects) bad("more than ", limits_.objects, " objects");
    nodes_.emplace_back();
    nodes_.back().kind = kind;
    return static_cast<Id>(nodes_.size() - 1);
  }
  Id make_scalar(Value value) {
    const Id id = make(Kind::kScalar);
    nodes_[id].scalar = std::move(value);
    return id;
  }
  Id make_tuple(std::vector<Id> items) {
    if (items.empty()) return empty_tuple_;
    const Id id = make(Kind::kTuple);
    nodes_[id].items = std::move(items);
    return id;
  }

  void push(Id id) { stack_.push_back(id); }
  size_t floor() const { return marks_.empty() ? 0 : marks_.back(); }
  Id pop() {
    if (stack_.size() <= floor()) bad("its stack is empty where an object is needed");
    const Id id = stack_.back();
    stack_.pop_back();
    return id;
  }
  Node& top() {
    if (stack_.size() <= floor()) bad("its stack is empty where an object is needed");
    return nodes_[stack_.back()];
  }
  std::vector<Id> pop_mark() {
    if (marks_.empty()) bad("an end without a mark");
    std::vector<Id> items(stack_.begin() + marks_.back(), stack_.end());
    stack_.resize(marks_.back());
    marks_.pop_back();
    return items;
  }
  void push_text(std::string_view text) { push(make_scalar(Value(std::string(text)))); }
  void push_bytes(std::string_view data) { push(make_scalar(Value(Bytes{std::string(data)}))); }

  void put(uint32_t slot) { memo_[slot] = (top(), stack_.back()); }
  void get(uint32_t slot) {
    const auto found = memo_.find(slot);
    if (found == memo_.end()) bad("refers to object ", slot, ", which it has not made");
    push(found->second);
  }

  void push_long(std::string_view data) {
    if (data.size() > 4096) bad("an integer of ", data.size(), " bytes");
    if (data.empty()) {
      push(make_scalar(Value(int64_t{0})));
    } else if (data.size() <= 8) {
      uint64_t value = static_cast<signed char>(data.back()) < 0 ? ~uint64_t{0} : 0;
      for (size_t i = data.size(); i-- > 0;) value = (value << 8) | static_cast<unsigned char>(data[i]);
      push(make_scalar(Value(static_cast<int64_t>(value))));
    } else {
      push(make_scalar(Value(BigInt{decimal(data)})));
    }
  }

  void push_global(std::string_view module, std::string_view name) {
    const auto global = pickle_global(module, name);
    if (!global) forbidden(module, name);
    if (global->name == PickleName::kDtype) {
      push(make_scalar(Value(DtypeName{std::string(name)})));
      return;
    }
    std::string full = std::string(module) + "." + std::string(name);  // before make(): the views may lie in a node
    const Id id = make(Kind::kGlobal);
    nodes_[id].global = *global;
    nodes_[id].scalar = Value(std::move(full));
    push(id);
  }

  void append(std::vector<Id> items) {
    Node& list = top();
    if (list.kind != Kind::kList) bad("appends to something that is no list");
    list.items.insert(list.items.end(), items.begin(), items.end());
  }
  void set_items(const std::vector<Id>& items) {
    Node& dict = top();
    if (dict.kind != Kind::kDict) bad("sets an item of something that is no dict");
    if (items.size() % 2) bad("a key without a value");
    dict.items.insert(dict.items.end(), items.begin(), items.end());
  }

  void step(unsigned char op);
  void reduce();
  void persistent();
  void add_tensor(PickledTensor tensor, const Node& storage);
  void rebuild(PickleName name, const std::vector<Id>& args);

  const Node& node(Id id) const { return nodes_[id]; }
  const std::string* text(Id id) const { return node(id).scalar.get_if<std::string>(); }
  int64_t integer(Id id, const char* what) const {
    const int64_t* value = node(id).kind == Kind::kScalar ? node(id).scalar.get_if<int64_t>() : nullptr;
    if (!value) bad(what, " is not an integer");
    return *value;
  }
  std::vector<int64_t> integers(Id id, const char* what) const {
    if (node(id).kind != Kind::kTuple && node(id).kind != Kind::kList) bad(what, " is no tuple");
    if (node(id).items.size() > 64) bad(what, " has ", node(id).items.size(), " dimensions");
    std::vector<int64_t> out;
    for (Id item : node(id).items) out.push_back(integer(item, what));
    return out;
  }

  List values_of(const std::vector<Id>& ids, size_t depth) {
    List out;
    out.reserve(ids.size());
    for (Id id : ids) out.push_back(value_of(id, depth));
    return out;
  }
  Value value_of(Id id, size_t depth);

  std::string_view bytes_, where_;
  const PickleLimits& limits_;
  size_t at_ = 0;
  std::vector<Node> nodes_;
  std::vector<Id> stack_;
  std::vector<size_t> marks_;
  std::unordered_map<uint32_t, Id> memo_;
  std::unordered_map<std::string, size_t> storages_;
  Id none_, true_, false_, empty_tuple_;
  uint64_t copied_ = 0, charged_ = 0;
  Pickled result_;
};

void Machine::step(unsigned char op) {
  switch (op) {
    case kProto:
      if (const int version = number<uint8_t>(); version < 2 || version > 5) bad("pickle protocol ", version);
      return;
    case kFrame:
      if (number<uint64_t>() > bytes_.size() - at_) bad("truncated: a frame is longer than the rest");
      return;
    case kMark:
      marks_.push_back(stack_.size());
      return;
    case kPop:
      if (stack_.size() > floor())
        stack_.pop_back();
      else
        pop_mark();
      return;
    case kPopMark:
      pop_mark();
      return;
    case kDup:
      top();
      push(stack_.back());
      return;
    case kNone:
      return push(none_);
    case kNewTrue:
      return push(true_);
    case kNewFalse:
      return push(false_);
    case kBinInt:
      return push(make_scalar(Value(int64_t{static_cast<int32_t>(number<uint32_t>())})));
    case kBinInt1:
      return push(make_scalar(Value(int64_t{number<uint8_t>()})));
    case kBinInt2:
      return push(make_scalar(Value(int64_t{number<uint16_t>()})));
    case kLong1:
      return push_long(take(number<uint8_t>()));
    case kLong4:
      return push_long(take(number<uint32_t>()));
    case kBinFloat: {
      uint64_t bits = 0;
      for (char c : take(8)) bits = (bits << 8) | static_cast<unsigned char>(c);
      return push(make_scalar(Value(std::bit_cast<double>(bits))));
    }
    case kShortBinString:
    case kShortBinUnicode:
      return push_text(take(number<uint8_t>()));
    case kBinString:
    case kBinUnicode:
      return push_text(take(number<uint32_t>()));
    case kBinUnicode8:
      return push_text(take(number<uint64_t>()));
    case kShortBinBytes:
      return push_bytes(take(number<uint8_t>()));
    case kBinBytes:
      return push_bytes(take(number<uint32_t>()));
    case kBinBytes8:
    case kByteArray8:
      return push_bytes(take(number<uint64_t>()));
    case kEmptyList:
      return push(make(Kind::kList));
    case kEmptyDict:
      return push(make(Kind::kDict));
    case kEmptySet:
      return push(make(Kind::kSet));
    case kEmptyTuple:
      return push(empty_tuple_);
    case kTuple:
      return push(make_tuple(pop_mark()));
    case kTuple1:
    case kTuple2:
    case kTuple3: {
      std::vector<Id> items(op - kTuple1 + 1);
      for (size_t i = items.size(); i-- > 0;) items[i] = pop();
      return push(make_tuple(std::move(items)));
    }
    case kList:
    case kDict:
    case kFrozenSet: {
      std::vector<Id> items = pop_mark();
      if (op == kDict && items.size() % 2) bad("a key without a value");
      const Id id = make(op == kList ? Kind::kList : op == kDict ? Kind::kDict : Kind::kSet);
      nodes_[id].items = std::move(items);
      return push(id);
    }
    case kAppend: {
      const Id item = pop();
      return append({item});
    }
    case kAppends:
      return append(pop_mark());
    case kSetItem: {
      const Id value = pop(), key = pop();
      return set_items({key, value});
    }
    case kSetItems:
      return set_items(pop_mark());
    case kAddItems: {
      const std::vector<Id> items = pop_mark();
      Node& set = top();
      if (set.kind != Kind::kSet) bad("adds to something that is no set");
      set.items.insert(set.items.end(), items.begin(), items.end());
      return;
    }
    case kBinPut:
      return put(number<uint8_t>());
    case kLongBinPut:
      return put(number<uint32_t>());
    case kMemoize:
      return put(static_cast<uint32_t>(memo_.size()));
    case kBinGet:
      return get(number<uint8_t>());
    case kLongBinGet:
      return get(number<uint32_t>());
    case kGlobalName: {
      const std::string_view module = line(), name = line();
      return push_global(module, name);
    }
    case kStackGlobal: {
      const Id name = pop(), module = pop();
      if (!text(name) || !text(module)) bad("a global whose name is no text");
      return push_global(*text(module), *text(name));
    }
    case kInst: {
      const std::string_view module = line(), name = line();
      forbidden(module, name);
    }
    case kReduce:
    case kNewObj:
      return reduce();
    case kBuild: {
      // Attributes of a dict or tensor (a state dict's `_metadata`): nothing that is held here.
      pop();
      const Kind kind = top().kind;
      if (kind != Kind::kDict && kind != Kind::kTensor) bad("sets the state of something that has none");
      return;
    }
    case kBinPersid:
      return persistent();
    default:
      bad("unknown or forbidden operation 0x", std::hex, static_cast<int>(op), std::dec);
  }
}

void Machine::persistent() {
  const Node id = node(pop());
  if (id.kind != Kind::kTuple || id.items.size() < 5 || !text(id.items[0]) || *text(id.items[0]) != "storage")
    bad("a persistent object that is no storage");
  if (id.items.size() > 5)
    fail(ErrorKind::kUnsupported, where_, ": written by torch before 1.6; load it in torch and save it again");
  const Node& cls = node(id.items[1]);
  if (cls.kind != Kind::kGlobal || (cls.global.name != PickleName::kStorage && cls.global.name != PickleName::kUntyped))
    bad("a storage of a class that is none");
  const std::string* key = text(id.items[2]);
  if (!key || !text(id.items[3])) bad("a storage whose key or location is no text");
  const Dtype dtype = cls.global.dtype;
  const bool untyped = cls.global.name == PickleName::kUntyped;
  const int64_t elements = integer(id.items[4], "a storage's size");
  uint64_t size = 0;
  if (elements < 0 || __builtin_mul_overflow(static_cast<uint64_t>(elements),
                                             static_cast<uint64_t>(untyped ? 1 : size_of(dtype)), &size))
    bad("storage '", printable(*key), "' of ", elements, " elements");
  const auto [found, is_new] = storages_.emplace(*key, result_.storages.size());
  if (is_new)
    result_.storages.push_back({*key, size});
  else if (result_.storages[found->second].bytes != size)
    bad("storage '", printable(*key), "' is declared with ", result_.storages[found->second].bytes, " and with ", size,
        " bytes");
  const Id storage = make(Kind::kStorage);
  nodes_[storage].index = found->second;
  nodes_[storage].dtype = untyped ? Dtype::kU8 : dtype;
  nodes_[storage].global = {untyped ? PickleName::kUntyped : PickleName::kStorage, dtype};
  push(storage);
}

void Machine::add_tensor(PickledTensor tensor, const Node& storage) {
  if (storage.kind != Kind::kStorage) bad("a tensor whose storage is none");
  tensor.storage = storage.index;
  if (tensor.size.size() != tensor.strides.size())
    bad("a tensor with ", tensor.size.size(), " sizes and ", tensor.strides.size(), " strides");
  if (tensor.offset < 0) bad("a tensor with a negative offset");
  int64_t last = tensor.offset, elements = 1;
  bool overflow = false, empty = false;
  for (size_t d = 0; d < tensor.size.size(); ++d) {
    if (tensor.size[d] < 0 || tensor.strides[d] < 0) bad("a tensor with a negative size or stride");
    if (tensor.size[d] == 0) empty = true;
    int64_t step = 0;
    overflow |= __builtin_mul_overflow(std::max<int64_t>(tensor.size[d] - 1, 0), tensor.strides[d], &step);
    overflow |= __builtin_add_overflow(last, step, &last);
    overflow |= __builtin_mul_overflow(elements, std::max<int64_t>(tensor.size[d], 1), &elements);
  }
  uint64_t end = 0, bytes = 0;
  const auto element = static_cast<uint64_t>(size_of(tensor.dtype));
  overflow |= __builtin_mul_overflow(static_cast<uint64_t>(elements), 2 * element, &bytes);
  overflow |= __builtin_add_overflow(last, int64_t{1}, &last);
  overflow |= __builtin_mul_overflow(static_cast<uint64_t>(last), element, &end);
  const PickledStorage& held = result_.storages[tensor.storage];
  if (overflow || (!empty && end > held.bytes))
    bad("a tensor of shape ", to_string(tensor.size), " and strides ", to_string(tensor.strides), " at element ",
        tensor.offset, " leaves its storage '", printable(held.key), "' of ", held.bytes, " bytes");
  if (empty) tensor.offset = 0;
  const Id id = make(Kind::kTensor);
  nodes_[id].index = result_.tensors.size();
  result_.tensors.push_back(std::move(tensor));
  push(id);
}

void Machine::rebuild(PickleName name, const std::vector<Id>& args) {
  const size_t needed = name == PickleName::kTensorV1 ? 4 : name == PickleName::kTensorV2 ? 6 : 7;
  if (args.size() < needed) bad("a tensor with ", args.size(), " arguments instead of ", needed);
  const Node storage = node(args[0]);
  PickledTensor tensor;
  tensor.dtype = storage.dtype;
  tensor.offset = integer(args[1], "a tensor's offset");
  tensor.size = integers(args[2], "a tensor's size");
  tensor.strides = integers(args[3], "a tensor's stride");
  if (name != PickleName::kTensorV1) {
    const bool* grad = node(args[4]).scalar.get_if<bool>();
    tensor.requires_grad = grad && *grad;
  }
  if (name == PickleName::kTensorV3) {
    const DtypeName* dtype = node(args[6]).scalar.get_if<DtypeName>();
    if (!dtype) bad("a tensor whose dtype is none");
    const auto known = dtype_from_torch(dtype->name);
    if (!known) fail(ErrorKind::kUnsupported, where_, ": a tensor of dtype ", dtype->name, " can't be held");
    tensor.dtype = *known;
  } else if (storage.global.name == PickleName::kUntyped) {
    bad("a tensor over an untyped storage without a dtype");
  }
  if (args.size() > needed) {  // {"conj": True}, {"neg": True}: a lazily changed view
    const Node& metadata = node(args[needed]);
    for (size_t i = 1; metadata.kind == Kind::kDict && i < metadata.items.size(); i += 2) {
      const bool* flag = node(metadata.items[i]).scalar.get_if<bool>();
      if (flag && *flag)
        fail(ErrorKind::kUnsupported, where_,
             ": a lazily conjugated or negated tensor; save .resolve_conj().resolve_neg()");
    }
  }
  add_tensor(std::move(tensor), storage);
}

void Machine::reduce() {
  const Id args_id = pop();
  const Node function = node(pop());
  if (function.kind != Kind::kGlobal) bad("forbidden: it calls something that is no known function");
  if (node(args_id).kind != Kind::kTuple) bad("a call whose arguments are no tuple");
  charge(node(args_id).items.size());
  const std::vector<Id> args = node(args_id).items;
  const auto arguments = [&](size_t low, size_t high) {
    if (args.size() < low || args.size() > high)
      bad("'", *function.scalar.get_if<std::string>(), "' with ", args.size(), " arguments");
  };
  switch (function.global.name) {
    case PickleName::kDict: {
      arguments(0, 1);
      const Id dict = make(Kind::kDict);
      if (args.size() == 1) {
        const Node& from = node(args[0]);
        charge(from.items.size());
        if (from.kind == Kind::kDict) {
          nodes_[dict].items = std::vector<Id>(from.items);
        } else if (from.kind == Kind::kList) {
          std::vector<Id> items;
          for (Id pair : from.items) {
            if ((node(pair).kind != Kind::kTuple && node(pair).kind != Kind::kList) || node(pair).items.size() != 2)
              bad("a dict made of something else than pairs");
            items.insert(items.end(), node(pair).items.begin(), node(pair).items.end());
          }
          nodes_[dict].items = std::move(items);
        } else {
          bad("a dict made of something else than pairs");
        }
      }
      return push(dict);
    }
    case PickleName::kSize:
    case PickleName::kSet: {
      arguments(0, 1);
      std::vector<Id> items;
      if (args.size() == 1) {
        const Node& from = node(args[0]);
        charge(from.items.size());
        if (from.kind != Kind::kTuple && from.kind != Kind::kList && from.kind != Kind::kSet)
          bad("a set or size of no list");
        items = from.items;
      }
      if (function.global.name == PickleName::kSize) return push(make_tuple(std::move(items)));
      const Id set = make(Kind::kSet);
      nodes_[set].items = std::move(items);
      return push(set);
    }
    case PickleName::kEncode:
    case PickleName::kBytearray: {
      arguments(0, 2);
      if (args.empty()) return push_bytes({});
      if (const Bytes* bytes = node(args[0]).scalar.get_if<Bytes>()) {
        charge(bytes->data.size() / 16);
        const std::string copy = bytes->data;
        return push_bytes(copy);
      }
      const std::string* coding = args.size() == 2 ? text(args[1]) : nullptr;
      if (!text(args[0]) || !coding || (*coding != "latin1" && *coding != "latin-1"))
        bad("bytes that are not written as latin1 text");
      charge(text(args[0])->size() / 16);
      const std::string source = *text(args[0]);
      std::string out;
      for (size_t i = 0; i < source.size(); ++i) {
        const auto c = static_cast<unsigned char>(source[i]);
        if (c < 0x80) {
          out += source[i];
        } else if ((c == 0xc2 || c == 0xc3) && i + 1 < source.size() && (source[i + 1] & 0xc0) == 0x80) {
          out += static_cast<char>((c & 3) << 6 | (source[i + 1] & 0x3f));
          ++i;
        } else {
          bad("bytes that are not written as latin1 text");
        }
      }
      return push_bytes(out);
    }
    case PickleName::kComplex: {
      arguments(2, 2);
      const double* real = node(args[0]).scalar.get_if<double>();
      const double* imag = node(args[1]).scalar.get_if<double>();
      if (!real || !imag) bad("a complex number whose parts are none");
      return push(make_scalar(Value(Complex{*real, *imag})));
    }
    case PickleName::kDevice: {
      arguments(1, 2);
      const Id device = make(Kind::kOpaque);
      nodes_[device].scalar = Value("torch.device");
      nodes_[device].items = args;
      return push(device);
    }
    case PickleName::kLayout: {
      arguments(1, 1);
      const Id layout = make(Kind::kOpaque);
      nodes_[layout].scalar = Value("torch.layout");
      nodes_[layout].items = args;
      return push(layout);
    }
    case PickleName::kTensorV1:
    case PickleName::kTensorV2:
    case PickleName::kTensorV3:
      return rebuild(function.global.name, args);
    case PickleName::kParameter: {
      arguments(3, 4);
      if (node(args[0]).kind != Kind::kTensor) bad("a parameter that is no tensor");
      const bool* grad = node(args[1]).scalar.get_if<bool>();
      result_.tensors[node(args[0]).index].requires_grad = grad && *grad;
      return push(args[0]);
    }
    case PickleName::kFromType: {
      arguments(4, 4);
      const Node& inner = node(args[0]);
      const Node& type = node(args[1]);
      if (inner.kind != Kind::kGlobal || type.kind != Kind::kGlobal || type.global.name != PickleName::kClass)
        bad("a tensor of a class that is not known");
      if (inner.global.name != PickleName::kTensorV2 && inner.global.name != PickleName::kTensorV3)
        fail(ErrorKind::kUnsupported, where_, ": a tensor made by '", *inner.scalar.get_if<std::string>(), "'");
      if (node(args[2]).kind != Kind::kTuple) bad("a call whose arguments are no tuple");
      charge(node(args[2]).items.size());
      const std::vector<Id> inner_args = node(args[2]).items;
      return rebuild(inner.global.name, inner_args);
    }
    case PickleName::kNotHeld:
      fail(ErrorKind::kUnsupported, where_, ": holds a sparse, quantised, meta or foreign tensor ('",
           *function.scalar.get_if<std::string>(), "'), which can't be held; save plain tensors");
    case PickleName::kStorage:
    case PickleName::kUntyped:
    case PickleName::kDtype:
    case PickleName::kClass:
      bad("forbidden: it calls '", *function.scalar.get_if<std::string>(), "'");
  }
}

Value Machine::value_of(Id id, size_t depth) {
  if (depth > limits_.depth) bad("nested deeper than ", limits_.depth, " levels, or inside of itself");
  if (++copied_ > limits_.objects) bad("references that multiply to more than ", limits_.objects, " objects");
  const Node& n = nodes_[id];
  switch (n.kind) {
    case Kind::kScalar:
      if (const std::string* s = n.scalar.get_if<std::string>()) copied_ += s->size() / 64;
      if (const Bytes* b = n.scalar.get_if<Bytes>()) copied_ += b->data.size() / 64;
      return n.scalar;
    case Kind::kList:
      return Value(values_of(n.items, depth + 1));
    case Kind::kTuple:
      return Value(Tuple{values_of(n.items, depth + 1)});
    case Kind::kSet:
      return Value(Set{values_of(n.items, depth + 1)});
    case Kind::kDict: {
      Dict dict;
      std::unordered_set<std::string> texts;
      dict.items.reserve(n.items.size() / 2);
      for (size_t i = 0; i + 1 < n.items.size(); i += 2) {
        Value key = value_of(n.items[i], depth + 1);
        if (const std::string* name = key.get_if<std::string>(); name && !texts.insert(*name).second)
          bad("the key '", printable(*name), "' stands twice in one dict");
        dict.items.emplace_back(std::move(key), value_of(n.items[i + 1], depth + 1));
      }
      return Value(std::move(dict));
    }
    case Kind::kTensor:
      return Value(TensorRef{n.index});
    case Kind::kStorage: {  // on its own: as torch shows it, one dimension of elements
      PickledTensor tensor;
      tensor.storage = n.index;
      tensor.dtype = n.dtype;
      tensor.size = {static_cast<int64_t>(result_.storages[n.index].bytes) / size_of(n.dtype)};
      tensor.strides = {1};
      result_.tensors.push_back(std::move(tensor));
      return Value(TensorRef{result_.tensors.size() - 1});
    }
    case Kind::kGlobal:
      return Value(Opaque{*n.scalar.get_if<std::string>(), {}});
    case Kind::kOpaque:
      return Value(Opaque{*n.scalar.get_if<std::string>(), values_of(n.items, depth + 1)});
  }
  return {};
}

}  // namespace

Pickled read_pickle(std::string_view bytes, std::string_view where, const PickleLimits& limits) {
  return Machine(bytes, where, limits).run();
}

}  // namespace shardsmith
