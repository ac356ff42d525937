// Plain values: what a checkpoint holds beside its tensors (step, counters, schedules,
// user content), and what a pickle or a JSON text turns into. A Value owns everything
// below it and refers to tensors by number only. Not thread-safe while it is changed.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace shardsmith {

class Value;
using List = std::vector<Value>;

struct None {
  bool operator==(const None&) const = default;
};
struct Tuple {
  List items;
};
struct Set {
  List items;
};
struct Bytes {
  std::string data;
};
// Ordered as written; keys may be strings, integers, ... as in Python.
struct Dict {
  std::vector<std::pair<Value, Value>> items;
};
// A tensor, by its place in the list that came with the value (Index::tensors, PtContent::tensors).
struct TensorRef {
  size_t index = 0;
};
// An inert stand-in for an object of a class that we know by name only; never executed.
// `state` is what the file said about it (arguments, attributes).
struct Opaque {
  std::string class_name;
  std::vector<Value> state;
};
// An integer beyond 64 bits, as decimal digits with sign.
struct BigInt {
  std::string digits;
};
struct Complex {
  double real = 0, imag = 0;
};
// torch.float32 and the like, by torch's own word ("float32").
struct DtypeName {
  std::string name;
};

class Value {
 public:
  using Variant = std::variant<None, bool, int64_t, double, std::string, Bytes, List, Tuple, Set, Dict, TensorRef,
                               Opaque, BigInt, Complex, DtypeName>;
  Value() = default;
  template <typename T>
  requires(!std::is_same_v<std::decay_t<T>, Value> && std::is_constructible_v<Variant, T>) Value(T&& v)
      : v_(std::forward<T>(v)) {}  // NOLINT: implicit on purpose, values read like literals
  Value(int v) : v_(static_cast<int64_t>(v)) {}
  Value(const char* v) : v_(std::string(v)) {}

  const Variant& variant() const { return v_; }
  Variant& variant() { return v_; }
  template <typename T>
  const T* get_if() const {
    return std::get_if<T>(&v_);
  }
  template <typename T>
  T* get_if() {
    return std::get_if<T>(&v_);
  }
  bool is_none() const { return std::holds_alternative<None>(v_); }

  // The entry of a Dict under a string key; nullptr if this is no Dict or has no such key.
  const Value* find(std::string_view key) const;
  // Adds or replaces; makes this a Dict if it is None.
  void set(std::string key, Value value);

 private:
  Variant v_;
};

bool operator==(const Value& a, const Value& b);

// Calls `visit` for every TensorRef in a value, in the order in which they stand, those in keys of dicts included; with
// its flat path, counted from `path`, where that is asked for (a key has its dict's). `visit` may change the reference.
void for_each_tensor(Value& value, const std::function<void(TensorRef&)>& visit);
void for_each_tensor(Value& value, const std::string& path,
                     const std::function<void(TensorRef&, const std::string& path)>& visit);

// JSON text -> Value (objects become Dicts with string keys). `where` names the source in errors.
// Throws kCorrupt with the place of the mistake. Depth is limited to 256.
Value parse_json(std::string_view text, std::string_view where);

// Compact JSON (indent < 0) or indented. Tuples and Sets become arrays; NaN and infinities,
// bytes and other things JSON lacks become {"__kind__": ..., ...} objects; keys become strings.
std::string to_json(const Value& value, int indent = -1);

// Turns the {"__kind__": ...} objects of to_json back into what they stood for.
Value restore_kinds(Value value);

// Paths. A tensor inside nested dicts has a path; its flat spelling joins the elements with '/',
// after '~' -> "~0" and '/' -> "~1" in each; an integer key or list position n is spelled "#n"
// (a string that begins with '#' gets its '#' spelled "~2"). So {"a": {"b"}} is "a/b" and {"a/b"}
// is "a~1b", while {"a.b"} stays "a.b".
std::string path_join(std::string_view parent, std::string_view element);  // element: a string key
std::string path_join(std::string_view parent, int64_t element);

}  // namespace shardsmith
