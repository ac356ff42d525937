#include "format/value_tree.h"

#include <algorithm>

#include "base/error.h"

namespace shardsmith {
namespace {

constexpr size_t kMaxPath = 100;

std::string name_of(const Value& element) {
  const std::string* text = element.get_if<std::string>();
  return text ? path_join("", *text) : path_join("", *element.get_if<int64_t>());
}

}  // namespace

void ValueTree::add(const List& path, Value leaf, std::string_view where) {
  if (path.empty() || path.size() > kMaxPath)
    fail(ErrorKind::kCorrupt, where, ": a path of ", path.size(), " elements");
  Node* node = &root_;
  std::string name;
  for (const Value& element : path) {
    const bool is_list = element.get_if<int64_t>() != nullptr;
    const std::string step = name_of(element);
    name = name.empty() ? step : name + "/" + step;
    if (node->is_leaf || (!node->children.empty() && node->is_list != is_list) || (is_list && node == &root_))
      fail(ErrorKind::kCorrupt, where, ": '", name, "' lies inside of something that is no ",
           is_list ? "list" : "dict");
    node->is_list = is_list;
    const auto [found, is_new] = node->by_name.emplace(step, node->children.size());
    if (is_new) node->children.emplace_back(element, std::make_unique<Node>());
    node = node->children[found->second].second.get();
  }
  if (node->is_leaf || !node->children.empty())
    fail(ErrorKind::kCorrupt, where, ": '", name, "' stands twice, or is a value and holds others");
  node->is_leaf = true;
  node->leaf = std::move(leaf);
}

Value ValueTree::value_of(Node& node, size_t& holes, std::string_view where) {
  if (node.is_leaf) return std::move(node.leaf);
  if (!node.is_list) {
    Dict dict;
    dict.items.reserve(node.children.size());
    for (auto& [key, child] : node.children) dict.items.emplace_back(std::move(key), value_of(*child, holes, where));
    return Value(std::move(dict));
  }
  int64_t last = 0;
  for (const auto& [position, child] : node.children) last = std::max(last, *position.get_if<int64_t>());
  const size_t missing = static_cast<size_t>(last) + 1 - node.children.size();
  if (missing > holes)
    fail(ErrorKind::kCorrupt, where, ": a list of which position ", last, " is told, but few others");
  holes -= missing;
  List list(static_cast<size_t>(last) + 1);
  for (auto& [position, child] : node.children)
    list[static_cast<size_t>(*position.get_if<int64_t>())] = value_of(*child, holes, where);
  return Value(std::move(list));
}

Value ValueTree::take(size_t holes, std::string_view where) {
  if (root_.children.empty()) return Value(Dict{});
  return value_of(root_, holes, where);
}

}  // namespace shardsmith
