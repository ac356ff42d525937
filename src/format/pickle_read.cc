// The operations of a pickle.
#include <bit>

#include "format/pickle_machine.h"

namespace shardsmith::pickle {
namespace {

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
  kObj = 'o',
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
  std::string digits;  // the last one first
  while (!words.empty()) {
    uint64_t rest = 0;  // nine digits at a time
    for (size_t i = words.size(); i-- > 0;) {
      rest = (rest << 32) | words[i];
      words[i] = static_cast<uint32_t>(rest / 1'000'000'000);
      rest %= 1'000'000'000;
    }
    for (int k = 0; k < 9; ++k, rest /= 10) digits += static_cast<char>('0' + rest % 10);
    while (!words.empty() && words.back() == 0) words.pop_back();
  }
  while (digits.size() > 1 && digits.back() == '0') digits.pop_back();
  if (negative) digits += '-';
  return {digits.rbegin(), digits.rend()};
}

}  // namespace

Id Machine::parse() {
  while (true) {
    const auto op = static_cast<unsigned char>(take(1)[0]);
    if (op == kStop) break;
    step(op);
  }
  return pop();
}

void Machine::push_long(std::string_view data) {
  if (data.size() > 1024) bad("an integer of ", data.size(), " bytes");
  // Bytes that only repeat the sign say nothing.
  while (data.size() > 1 && (data.back() == '\0' || data.back() == '\xff') &&
         (static_cast<signed char>(data.back()) < 0) == (static_cast<signed char>(data[data.size() - 2]) < 0))
    data.remove_suffix(1);
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

void Machine::push_global(std::string_view module, std::string_view name) {
  const auto global = pickle_global(module, name, names_);
  if (!global) forbidden(module, name);
  if (global->name == PickleName::kForeignTensor && names_ != PickleNames::kAny)
    fail(ErrorKind::kUnsupported, where_, ": holds a '", printable(module), ".", printable(name),
         "', which is spread over ranks or made of other tensors; save plain tensors (x.full_tensor()), or use "
         "torch.distributed.checkpoint");
  if (global->name == PickleName::kDtype) {
    push(make_scalar(Value(DtypeName{std::string(name)})));
    return;
  }
  charge((module.size() + name.size()) / 16);
  std::string full = std::string(module) + "." + std::string(name);  // before make(): the views may lie in a node
  const Id id = make(Kind::kGlobal);
  nodes_[id].global = *global;
  nodes_[id].scalar = scalar(Value(std::move(full)));
  push(id);
}

void Machine::step(unsigned char op) {
  switch (op) {
    case kProto:
      if (const int version = number<uint8_t>(); version < 2 || version > 5) bad("pickle protocol ", version);
      return;
    case kFrame:
      if (number<uint64_t>() > bytes_.size() - at_) truncated();
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
      return push(small_integer(number<uint8_t>()));
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
    case kTuple3:
      return push(make_tuple(pop_some(op - kTuple1 + 1)));
    case kList:
    case kDict:
    case kFrozenSet: {
      const Ids items = pop_mark();
      if (op == kDict && items.size() % 2) bad("a key without a value");
      return push(make(op == kList ? Kind::kList : op == kDict ? Kind::kDict : Kind::kSet, items));
    }
    case kAppend: {
      const Id item = pop();
      return append({&item, 1});
    }
    case kAppends:
      return append(pop_mark());
    case kSetItem:
      return set_items(pop_some(2));
    case kSetItems:
      return set_items(pop_mark());
    case kAddItems: {
      const Ids items = pop_mark();
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
      return put(memoized_);
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
      if (names_ != PickleNames::kAny) forbidden(module, name);
      return object(std::string(module) + "." + std::string(name), pop_mark());
    }
    case kReduce:
    case kNewObj:
      return reduce();
    case kBuild:
      return build();
    case kBinPersid:
      return persistent();
    default:
      if (names_ == PickleNames::kAny && step_of_any(op)) return;
      bad("unknown or forbidden operation 0x", std::hex, static_cast<int>(op), std::dec);
  }
}

// Operations that build objects of classes, which no checkpoint needs: only where nothing but names is asked for.
bool Machine::step_of_any(unsigned char op) {
  if (op == kNewObjEx) {
    const Id keywords = pop(), args = pop();
    const Node& cls = node(pop());
    if (cls.kind != Kind::kGlobal || node(args).kind != Kind::kTuple) bad("an object of no class");
    std::vector<Id> parts(node(args).items.begin(), node(args).items.end());
    charge(parts.size());
    parts.push_back(keywords);
    object(*cls.scalar.get_if<std::string>(), parts);
    return true;
  }
  if (op == kObj) {
    const Ids parts = pop_mark();
    if (parts.empty() || node(parts[0]).kind != Kind::kGlobal) bad("an object of no class");
    object(*node(parts[0]).scalar.get_if<std::string>(), parts.subspan(1));
    return true;
  }
  return false;
}

// Sets the state of what is on top of the stack. Attributes of a dict or tensor (a state dict's `_metadata`) are not
// held.
void Machine::build() {
  const Id state = pop();
  top();
  const Id id = stack_.back();
  switch (nodes_[id].kind) {
    case Kind::kDict:
      return;
    case Kind::kTensor:
    case Kind::kBlank:
      if (!set_tensor(id, state) && nodes_[id].kind == Kind::kBlank) bad("a tensor whose state is none");
      return;
    case Kind::kOpaque:
      if (nodes_[id].global.name == PickleName::kObject) nodes_[id].items.push_back(state);
      return;
    default:
      if (names_ != PickleNames::kAny) bad("sets the state of something that has none");
  }
}

}  // namespace shardsmith::pickle
