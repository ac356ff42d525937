#include "checkpoint/value_message.h"

#include <algorithm>
#include <string>

namespace shardsmith {
namespace {

constexpr const char* kTuple = "shardsmith.message.tuple";
constexpr const char* kSet = "shardsmith.message.set";
constexpr const char* kDict = "shardsmith.message.dict";  // keys and values by turns

List packed(const List& items) {
  List result;
  for (const Value& item : items) result.push_back(pack_value(item));
  return result;
}

bool is_plain_key(const Value& key) {
  const std::string* text = key.get_if<std::string>();
  return text && *text != "__kind__";
}

Value unpacked(Value value) {
  if (List* list = value.get_if<List>()) {
    for (Value& item : *list) item = unpacked(std::move(item));
  } else if (Dict* dict = value.get_if<Dict>()) {
    for (auto& [key, item] : dict->items) item = unpacked(std::move(item));
  } else if (Opaque* opaque = value.get_if<Opaque>()) {
    for (Value& item : opaque->state) item = unpacked(std::move(item));
    if (opaque->class_name == kTuple) return Tuple{std::move(opaque->state)};
    if (opaque->class_name == kSet) return Set{std::move(opaque->state)};
    if (opaque->class_name == kDict) {
      Dict result;
      for (size_t i = 0; i + 1 < opaque->state.size(); i += 2)
        result.items.emplace_back(std::move(opaque->state[i]), std::move(opaque->state[i + 1]));
      return result;
    }
  }
  return value;
}

}  // namespace

Value pack_value(const Value& value) {
  if (const List* list = value.get_if<List>()) return packed(*list);
  if (const Tuple* tuple = value.get_if<Tuple>()) return Opaque{kTuple, packed(tuple->items)};
  if (const Set* set = value.get_if<Set>()) return Opaque{kSet, packed(set->items)};
  if (const Opaque* opaque = value.get_if<Opaque>()) return Opaque{opaque->class_name, packed(opaque->state)};
  const Dict* dict = value.get_if<Dict>();
  if (!dict) return value;
  const bool plain =
      std::all_of(dict->items.begin(), dict->items.end(), [](const auto& item) { return is_plain_key(item.first); });
  if (plain) {
    Dict result;
    for (const auto& [key, item] : dict->items) result.items.emplace_back(key, pack_value(item));
    return result;
  }
  Opaque result{kDict, {}};
  for (const auto& [key, item] : dict->items) {
    result.state.push_back(pack_value(key));
    result.state.push_back(pack_value(item));
  }
  return result;
}

Value unpack_value(Value value) { return unpacked(restore_kinds(std::move(value))); }

}  // namespace shardsmith
