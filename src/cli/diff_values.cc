#include "cli/diff_values.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>

#include "base/error.h"
#include "cli/values.h"

namespace shardsmith::cli {
namespace {

std::optional<double> number_in(const Value& value) {
  if (const auto* d = value.get_if<double>()) return *d;
  if (const auto* i = value.get_if<int64_t>()) return static_cast<double>(*i);
  return std::nullopt;
}

std::string key_path(const std::string& where, const Value& key) {
  if (const auto* text = key.get_if<std::string>()) return path_join(where, *text);
  if (const auto* number = key.get_if<int64_t>()) return path_join(where, *number);
  return path_join(where, to_json(key));
}

const char* kind_of(const Value& value) {
  static constexpr const char* kNames[] = {"none", "bool", "integer", "float",  "text",    "bytes",   "list", "tuple",
                                           "set",  "dict", "tensor",  "object", "integer", "complex", "dtype"};
  static_assert(std::size(kNames) == std::variant_size_v<Value::Variant>);
  return kNames[value.variant().index()];
}

const List* items_of(const Value& value) {
  if (const auto* list = value.get_if<List>()) return list;
  if (const auto* tuple = value.get_if<Tuple>()) return &tuple->items;
  return nullptr;
}

class Comparison {
 public:
  Comparison(const Tolerance& tolerance, const std::function<bool(const std::string&)>& wanted)
      : tolerance_(tolerance), wanted_(wanted) {}

  void compare(const Value& a, const Value& b, const std::string& where) {
    const auto *left = a.get_if<Dict>(), *right = b.get_if<Dict>();
    if (left && right) return compare_dicts(*left, *right, where);
    const List *from = items_of(a), *to = items_of(b);
    if (from && to && from->size() == to->size() && a.variant().index() == b.variant().index()) {
      for (size_t i = 0; i < from->size(); ++i)
        compare((*from)[i], (*to)[i], path_join(where, static_cast<int64_t>(i)));
      return;
    }
    leaf(&a, &b, where);
  }

  ValueComparison take() { return std::move(result_); }

 private:
  void compare_dicts(const Dict& a, const Dict& b, const std::string& where) {
    std::map<std::string, const Value*> theirs;
    for (const auto& [key, item] : b.items) theirs.emplace(key_path(where, key), &item);
    for (const auto& [key, item] : a.items) {
      const std::string path = key_path(where, key);
      const auto found = theirs.find(path);
      if (found == theirs.end()) {
        leaf(&item, nullptr, path);
      } else {
        compare(item, *found->second, path);
        theirs.erase(found);
      }
    }
    for (const auto& [path, item] : theirs) leaf(nullptr, item, path);
  }

  bool equal(const Value& a, const Value& b) const {
    if (a == b) return true;
    if (!tolerance_.given) return false;
    const auto left = number_in(a), right = number_in(b);
    return left && right && close(*left, *right, tolerance_);
  }

  void leaf(const Value* a, const Value* b, const std::string& where) {
    if (!wanted_(where)) return;
    ++result_.compared;
    if (a && b && equal(*a, *b)) return;
    ++result_.differing;
    if (result_.differences.size() == ValueComparison::kMostKept) return;
    ValueDifference difference{where, a ? short_text(*a) : "", b ? short_text(*b) : ""};
    if (a && b && difference.a == difference.b) {
      difference.a += str(" (", kind_of(*a), ")");
      difference.b += str(" (", kind_of(*b), ")");
    }
    result_.differences.push_back(std::move(difference));
  }

  const Tolerance& tolerance_;
  const std::function<bool(const std::string&)>& wanted_;
  ValueComparison result_;
};

// What several files say of one thing: once where they agree, a list of what they say where they don't.
Value agreed(const std::vector<Value>& said) {
  List different;
  for (const Value& value : said) {
    if (std::find(different.begin(), different.end(), value) == different.end()) different.push_back(value);
  }
  return different.size() == 1 ? different[0] : Value(different);
}

// One dict of all that the files' dicts say. Names of parameters are joined, in order.
Value joined(const std::vector<const Value*>& dicts) {
  std::vector<std::string> keys;
  std::map<std::string, std::vector<Value>> said;
  for (const Value* value : dicts) {
    const auto* dict = value->get_if<Dict>();
    if (!dict)
      return agreed([&] {
        std::vector<Value> all;
        for (const Value* one : dicts) all.push_back(*one);
        return all;
      }());
    for (const auto& [key, item] : dict->items) {
      const auto* name = key.get_if<std::string>();
      const std::string text = name ? *name : to_json(key);
      if (!said.count(text)) keys.push_back(text);
      said[text].push_back(item);
    }
  }
  Dict result;
  for (const auto& key : keys) {
    if (key != "params") {
      result.items.emplace_back(key, agreed(said[key]));
      continue;
    }
    std::set<std::string> names;
    for (const Value& list : said[key]) {
      for (const Value& name : list.get_if<List>() ? *list.get_if<List>() : List{list}) {
        names.insert(name.get_if<std::string>() ? *name.get_if<std::string>() : to_json(name));
      }
    }
    result.items.emplace_back(key, List(names.begin(), names.end()));
  }
  return result;
}

// The optimizer's value of each file -> one.
Value joined_optimizers(const List& files) {
  std::vector<const Value*> parts;
  std::vector<const Value*> states;
  std::vector<std::vector<const Value*>> groups;
  std::vector<Value> rest;
  for (const Value& file : files) {
    if (!file.get_if<Dict>()) return files;
    Value others = Dict{};
    for (const auto& [key, item] : file.get_if<Dict>()->items) {
      const auto* name = key.get_if<std::string>();
      if (name && *name == "state") {
        states.push_back(&item);
      } else if (const auto* list = item.get_if<List>(); name && *name == "param_groups" && list) {
        groups.resize(std::max(groups.size(), list->size()));
        for (size_t i = 0; i < list->size(); ++i) groups[i].push_back(&(*list)[i]);
      } else {
        others.get_if<Dict>()->items.emplace_back(key, item);
      }
    }
    rest.push_back(std::move(others));
  }
  for (const Value& value : rest) parts.push_back(&value);
  Value result = joined(parts);
  if (!states.empty()) result.set("state", joined(states));
  List all;
  for (const auto& group : groups) all.push_back(joined(group));
  result.set("param_groups", all);
  return result;
}

// A tensor in a place that is compared is a tensor: its bytes are compared elsewhere, under its name.
Value without_numbers(const Value& value) {
  if (value.get_if<TensorRef>()) return Opaque{"tensor", {}};
  if (const auto* list = value.get_if<List>()) {
    List result;
    for (const Value& item : *list) result.push_back(without_numbers(item));
    return result;
  }
  if (const auto* tuple = value.get_if<Tuple>()) {
    Tuple result;
    for (const Value& item : tuple->items) result.items.push_back(without_numbers(item));
    return result;
  }
  if (const auto* opaque = value.get_if<Opaque>()) {
    Opaque result{opaque->class_name, {}};
    for (const Value& item : opaque->state) result.state.push_back(without_numbers(item));
    return result;
  }
  if (const auto* dict = value.get_if<Dict>()) {
    Dict result;
    for (const auto& [key, item] : dict->items) result.items.emplace_back(key, without_numbers(item));
    return result;
  }
  return value;
}

}  // namespace

ValueComparison compare_values(const Value& a, const Value& b, const Tolerance& tolerance,
                               const std::function<bool(const std::string& path)>& wanted) {
  Comparison comparison(tolerance, wanted);
  comparison.compare(a, b, "");
  return comparison.take();
}

Value comparable_values(const Source& source, bool manifest) {
  Value values = source.index.values;
  if (const Value* optimizer = values.find("optimizer"); optimizer && values.find("model")) {
    List plain;
    if (const auto* files = optimizer->get_if<List>()) {
      for (const Value& file : *files) plain.push_back(without_tensors(file));
    } else {
      plain.push_back(without_tensors(*optimizer));
    }
    values.set("optimizer", joined_optimizers(plain));
  }
  if (manifest && source.manifest) {
    values.set("step", source.manifest->step);
    if (!source.manifest->model_config.is_none()) values.set("model_config", source.manifest->model_config);
  }
  Value result = without_numbers(without_tensors(values));
  return result.is_none() ? Value(Dict{}) : result;
}

}  // namespace shardsmith::cli
