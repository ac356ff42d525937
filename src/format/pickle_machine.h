// The pickle machine: what pickle_read.cc (operations) and pickle_calls.cc (calls, tensors) share.
//
// Objects live in an arena and refer to each other by number, so that shared and cyclic references cost nothing while
// reading; at the end the root is copied out into a Value, within limits. References to objects, and to the items of
// one that is no list, dict or set, hold as long as the machine does. Memory comes from a pool that ends with the
// machine: a checkpoint of many small tensors is read in half the time without an allocation for each tuple and text.
#pragma once

#include <cstdint>
#include <deque>
#include <initializer_list>
#include <memory_resource>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/error.h"
#include "format/bytes.h"
#include "format/pickle.h"
#include "format/pickle_names.h"

namespace shardsmith::pickle {

using Id = uint32_t;

enum class Kind : uint8_t {
  kScalar,
  kList,
  kTuple,
  kDict,
  kSet,
  kGlobal,
  kStorage,
  kTensor,
  kBlank,  // a tensor of torch's first years, before its state is set
  kOpaque,
};

// A Value that most nodes do without. The machine owns it.
class Scalar {
 public:
  Scalar() = default;
  explicit Scalar(const Value* value) : value_(value) {}
  template <typename T>
  const T* get_if() const {
    return value_ ? value_->get_if<T>() : nullptr;
  }
  bool is_none() const { return value_ && value_->is_none(); }
  Value copy() const { return value_ ? *value_ : Value(); }

 private:
  const Value* value_ = nullptr;
};

// Small, as the metadata of a large distributed checkpoint have tens of millions.
struct Node {
  explicit Node(std::pmr::memory_resource* pool) : items(pool) {}
  Kind kind = Kind::kScalar;
  PickleGlobal global{PickleName::kClass, Dtype::kU8};  // kGlobal, kStorage; kOpaque: kObject if it takes a state
  uint32_t index = 0;                                   // kTensor: in the result; kStorage: of what it shows
  std::pmr::vector<Id> items;                           // a dict's keys and values in turn
  Scalar scalar;                                        // kScalar; kGlobal, kOpaque: the full name
};

// An object's items, or what was popped.
using Ids = std::span<const Id>;

// The bytes of a storage that a persistent object shows: all, or in old files a part.
struct StorageView {
  size_t storage = 0;  // in the result
  Dtype dtype = Dtype::kU8;
  uint64_t begin = 0, end = 0;
};

class Machine {
 public:
  Machine(std::string_view bytes, std::string_view where, const PickleLimits& limits, PickleNames names)
      : bytes_(bytes), where_(where), limits_(limits), names_(names) {
    none_ = make_scalar(Value());
    true_ = make_scalar(Value(true));
    false_ = make_scalar(Value(false));
    empty_tuple_ = make(Kind::kTuple);
  }

  Pickled run();
  Id parse();  // the root; for those who look at the nodes themselves (format/pickle_view.h)
  const Node& node(Id id) const { return nodes_[id]; }
  bool has_tensors() const { return !result_.tensors.empty(); }
  size_t used() const { return at_; }

 private:
  template <typename... Args>
  [[noreturn]] void bad(const Args&... why) const {
    fail(ErrorKind::kCorrupt, where_, ": ", why..., " (byte ", at_, " of the pickle)");
  }
  [[noreturn]] void forbidden(std::string_view module, std::string_view name) const {
    bad("forbidden: it asks for '", printable(module), ".", printable(name),
        "', which is not among the names that a checkpoint may hold; nothing was executed");
  }
  [[noreturn]] void truncated() const {
    throw PickleTruncated(ErrorKind::kCorrupt,
                          str(where_, ": truncated: its pickle goes on after the end (byte ", at_, " of the pickle)"));
  }
  static std::string printable(std::string_view text) {
    std::string out;
    for (char c : text.substr(0, 200)) out += c >= 0x20 && c < 0x7f ? c : '?';
    return out;
  }

  std::string_view take(uint64_t n) {
    if (n > bytes_.size() - at_) truncated();
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
    if (end == std::string_view::npos) truncated();
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
    nodes_.emplace_back(&pool_).kind = kind;
    return static_cast<Id>(nodes_.size() - 1);
  }
  Id make(Kind kind, Ids items) {
    const Id id = make(kind);
    nodes_[id].items.assign(items.begin(), items.end());
    return id;
  }
  Scalar scalar(Value value) { return Scalar(&values_.emplace_back(std::move(value))); }
  Id make_scalar(Value value) {
    const Id id = make(Kind::kScalar);
    nodes_[id].scalar = scalar(std::move(value));
    return id;
  }
  Id make_tuple(Ids items) { return items.empty() ? empty_tuple_ : make(Kind::kTuple, items); }

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
  // What these give holds until the next of them.
  Ids pop_mark() {
    if (marks_.empty()) bad("an end without a mark");
    const size_t begin = marks_.back();
    marks_.pop_back();
    return pop_from(begin);
  }
  Ids pop_some(size_t count) {
    if (stack_.size() < floor() + count) bad("its stack is empty where an object is needed");
    return pop_from(stack_.size() - count);
  }
  Ids pop_from(size_t begin) {
    popped_.assign(stack_.begin() + static_cast<ptrdiff_t>(begin), stack_.end());
    stack_.resize(begin);
    return popped_;
  }
  void push_text(std::string_view text) { push(make_scalar(Value(std::string(text)))); }
  void push_bytes(std::string_view data) { push(make_scalar(Value(Bytes{std::string(data)}))); }

  Id small_integer(uint8_t value) {
    if (small_integers_.empty()) small_integers_.assign(256, kUnset);
    if (small_integers_[value] == kUnset) small_integers_[value] = make_scalar(Value(int64_t{value}));
    return small_integers_[value];
  }

  // Slots are given out one after the other, but nothing says that they must be.
  void put(uint32_t slot) {
    top();
    if (slot >= memo_.size() + 1024) {
      memoized_ += far_memo_.insert_or_assign(slot, stack_.back()).second;
      return;
    }
    if (slot >= memo_.size()) memo_.resize(slot + 1, kUnset);
    memoized_ += memo_[slot] == kUnset;
    memo_[slot] = stack_.back();
  }
  void get(uint32_t slot) {
    if (slot < memo_.size() && memo_[slot] != kUnset) return push(memo_[slot]);
    const auto found = far_memo_.find(slot);
    if (found == far_memo_.end()) bad("refers to object ", slot, ", which it has not made");
    push(found->second);
  }

  void push_long(std::string_view data);
  void push_global(std::string_view module, std::string_view name);

  void append(Ids items) {
    if (takes_anything()) return add_part(Kind::kList, items);
    Node& list = top();
    if (list.kind != Kind::kList) bad("appends to something that is no list");
    list.items.insert(list.items.end(), items.begin(), items.end());
  }
  void set_items(Ids items) {
    if (items.size() % 2) bad("a key without a value");
    if (takes_anything()) return add_part(Kind::kDict, items);
    Node& dict = top();
    if (dict.kind != Kind::kDict) bad("sets an item of something that is no dict");
    dict.items.insert(dict.items.end(), items.begin(), items.end());
  }
  // Where every name is allowed, an unknown object may be a kind of list or dict.
  bool takes_anything() { return names_ == PickleNames::kAny && top().kind == Kind::kOpaque; }
  void add_part(Kind kind, Ids items) {
    const Id part = make(kind, items);
    top().items.push_back(part);
  }

  void step(unsigned char op);
  bool step_of_any(unsigned char op);
  void persistent();
  void build();

  // Calls, in pickle_calls.cc.
  void reduce();
  void call(const Node& function, Ids args);
  void object(std::string name, Ids parts);
  void make_dict(Ids args);
  void make_set_or_size(PickleName name, Ids args);
  void make_bytes(Ids args);

  // Tensors, in pickle_tensors.cc.
  size_t describe_tensor(PickledTensor tensor, const Node& storage);
  void push_tensor(size_t index);
  void rebuild(PickleName name, Ids args);
  void rebuild_from_type(Ids args);
  void rebuild_sparse(Ids args);
  void rebuild_quantized(Ids args);
  void push_special(const char* name, const std::vector<std::pair<const char*, Id>>& fields);
  bool set_tensor(Id tensor, Id state);

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

  List values_of(Ids ids, size_t depth) {
    List out;
    out.reserve(ids.size());
    for (Id id : ids) out.push_back(value_of(id, depth));
    return out;
  }
  Value value_of(Id id, size_t depth);

  std::string_view bytes_, where_;
  const PickleLimits& limits_;
  PickleNames names_;
  size_t at_ = 0;
  static constexpr Id kUnset = UINT32_MAX;
  std::pmr::monotonic_buffer_resource pool_;
  std::pmr::deque<Value> values_{&pool_};
  std::pmr::deque<Node> nodes_{&pool_};
  std::vector<Id> stack_, popped_;
  std::vector<size_t> marks_;
  std::vector<Id> memo_, small_integers_;
  std::unordered_map<uint32_t, Id> far_memo_;
  uint32_t memoized_ = 0;
  std::vector<StorageView> views_;
  std::pmr::unordered_map<std::string_view, size_t> storages_{&pool_};  // by key, which is a scalar's
  Id none_, true_, false_, empty_tuple_;
  uint64_t copied_ = 0, charged_ = 0;
  Pickled result_;
};

}  // namespace shardsmith::pickle
