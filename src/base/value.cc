#include "base/value.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace shardsmith {

const Value* Value::find(std::string_view key) const {
  const Dict* dict = get_if<Dict>();
  if (!dict) return nullptr;
  for (const auto& [k, v] : dict->items) {
    const std::string* name = k.get_if<std::string>();
    if (name && *name == key) return &v;
  }
  return nullptr;
}

void Value::set(std::string key, Value value) {
  if (is_none()) v_ = Dict{};
  Dict& dict = std::get<Dict>(v_);
  for (auto& [k, v] : dict.items) {
    const std::string* name = k.get_if<std::string>();
    if (name && *name == key) {
      v = std::move(value);
      return;
    }
  }
  dict.items.emplace_back(Value(std::move(key)), std::move(value));
}

namespace {

// NaN equals NaN and 0.0 differs from -0.0: the question is whether a checkpoint says the same.
bool same(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

bool equal(const None&, const None&) { return true; }
bool equal(bool a, bool b) { return a == b; }
bool equal(int64_t a, int64_t b) { return a == b; }
bool equal(double a, double b) { return same(a, b); }
bool equal(const std::string& a, const std::string& b) { return a == b; }
bool equal(const Bytes& a, const Bytes& b) { return a.data == b.data; }
bool equal(const List& a, const List& b) { return a == b; }
bool equal(const Tuple& a, const Tuple& b) { return a.items == b.items; }
bool equal(const Set& a, const Set& b) {
  if (a.items.size() != b.items.size()) return false;
  return std::all_of(a.items.begin(), a.items.end(), [&](const Value& item) {
    return std::find(b.items.begin(), b.items.end(), item) != b.items.end();
  });
}
bool equal(const Dict& a, const Dict& b) { return a.items == b.items; }
bool equal(const TensorRef& a, const TensorRef& b) { return a.index == b.index; }
bool equal(const Opaque& a, const Opaque& b) { return a.class_name == b.class_name && a.state == b.state; }
bool equal(const BigInt& a, const BigInt& b) { return a.digits == b.digits; }
bool equal(const Complex& a, const Complex& b) { return same(a.real, b.real) && same(a.imag, b.imag); }
bool equal(const DtypeName& a, const DtypeName& b) { return a.name == b.name; }

std::string escape(std::string_view element) {
  std::string out;
  for (size_t i = 0; i < element.size(); ++i) {
    if (element[i] == '~')
      out += "~0";
    else if (element[i] == '/')
      out += "~1";
    else if (element[i] == '#' && i == 0)
      out += "~2";
    else
      out += element[i];
  }
  return out;
}

std::string joined(std::string_view parent, const std::string& element) {
  return parent.empty() ? element : std::string(parent) + "/" + element;
}

// What stands right below a value: item(value, position) of lists and the like, entry(key, value) of dicts.
template <typename Item, typename Entry>
void visit_children(Value& value, const Item& item, const Entry& entry) {
  const auto all = [&](List& items) {
    for (size_t i = 0; i < items.size(); ++i) item(items[i], static_cast<int64_t>(i));
  };
  if (List* list = value.get_if<List>()) all(*list);
  if (Tuple* tuple = value.get_if<Tuple>()) all(tuple->items);
  if (Set* set = value.get_if<Set>()) all(set->items);
  if (Opaque* opaque = value.get_if<Opaque>()) all(opaque->state);
  if (Dict* dict = value.get_if<Dict>()) {
    for (auto& [key, below] : dict->items) entry(key, below);
  }
}

}  // namespace

bool operator==(const Value& a, const Value& b) {
  if (a.variant().index() != b.variant().index()) return false;
  return std::visit([&](const auto& left) { return equal(left, std::get<std::decay_t<decltype(left)>>(b.variant())); },
                    a.variant());
}

void for_each_tensor(Value& value, const std::function<void(TensorRef&)>& visit) {
  if (TensorRef* reference = value.get_if<TensorRef>()) return visit(*reference);
  visit_children(
      value, [&](Value& item, int64_t) { for_each_tensor(item, visit); },
      [&](Value& key, Value& item) {
        for_each_tensor(key, visit);
        for_each_tensor(item, visit);
      });
}

void for_each_tensor(Value& value, const std::string& path,
                     const std::function<void(TensorRef&, const std::string& path)>& visit) {
  if (TensorRef* reference = value.get_if<TensorRef>()) return visit(*reference, path);
  visit_children(
      value, [&](Value& item, int64_t position) { for_each_tensor(item, path_join(path, position), visit); },
      [&](Value& key, Value& item) {
        for_each_tensor(key, path, visit);
        const std::string* name = key.get_if<std::string>();
        const int64_t* number = key.get_if<int64_t>();
        for_each_tensor(item, number ? path_join(path, *number) : path_join(path, name ? *name : to_json(key)), visit);
      });
}

std::string path_join(std::string_view parent, std::string_view element) { return joined(parent, escape(element)); }
std::string path_join(std::string_view parent, int64_t element) {
  return joined(parent, "#" + std::to_string(element));
}

}  // namespace shardsmith
