#include "cli/values.h"

#include <algorithm>

#include "base/error.h"
#include "base/utf8.h"
#include "cli/output.h"

namespace shardsmith::cli {

Value readable(const Value& value, const Index& index, size_t longest) {
  const auto cut = [&](const List& items) {
    List result;
    for (const auto& item : items) {
      if (result.size() == longest) {
        result.emplace_back(str("... ", items.size() - longest, " more"));
        break;
      }
      result.push_back(readable(item, index, longest));
    }
    return result;
  };
  if (const auto* reference = value.get_if<TensorRef>()) {
    if (reference->index >= index.tensors.size()) return "<tensor>";
    return str("<tensor ", index.tensors[reference->index].name, ">");
  }
  if (const auto* list = value.get_if<List>()) return cut(*list);
  if (const auto* tuple = value.get_if<Tuple>()) return cut(tuple->items);
  if (const auto* set = value.get_if<Set>()) return cut(set->items);
  if (const auto* dict = value.get_if<Dict>()) {
    Dict result;
    for (const auto& [key, item] : dict->items) result.items.emplace_back(key, readable(item, index, longest));
    return result;
  }
  if (const auto* text = value.get_if<std::string>(); text && text->size() > 200 && longest < text->size()) {
    return text->substr(0, 200) + str("... ", text->size() - 200, " more");
  }
  if (const auto* opaque = value.get_if<Opaque>()) return str("<", opaque->class_name, ", not rebuilt>");
  return value;
}

bool only_tensors(const Value& value) {
  if (value.get_if<TensorRef>()) return true;
  if (const auto* list = value.get_if<List>()) {
    return !list->empty() && std::all_of(list->begin(), list->end(), only_tensors);
  }
  if (const auto* dict = value.get_if<Dict>()) {
    return !dict->items.empty() && std::all_of(dict->items.begin(), dict->items.end(),
                                               [](const auto& item) { return only_tensors(item.second); });
  }
  return false;
}

Value without_tensors(const Value& value) {
  if (only_tensors(value)) return {};
  if (const auto* list = value.get_if<List>()) {
    List rest;
    for (const auto& item : *list) {
      if (!only_tensors(item)) rest.push_back(without_tensors(item));
    }
    return rest;
  }
  if (const auto* dict = value.get_if<Dict>()) {
    Dict rest;
    for (const auto& [key, item] : dict->items) {
      if (!only_tensors(item)) rest.items.emplace_back(key, without_tensors(item));
    }
    return rest;
  }
  return value;
}

std::string short_text(const Value& value, size_t longest) {
  std::string text = printable(to_json(readable(value, Index{}, longest)));
  if (text.size() <= longest) return text;
  size_t end = longest;
  while (end > 0 && utf8_length(text, end) == 0) --end;  // not within a character
  return text.substr(0, end) + "...";
}

bool is_empty(const Value& value) {
  const auto* dict = value.get_if<Dict>();
  return value.is_none() || (dict && dict->items.empty());
}

}  // namespace shardsmith::cli
