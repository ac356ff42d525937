// A nested object put together from paths: what planner_data of a DCP checkpoint says about its flat keys.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/value.h"

namespace shardsmith {

class ValueTree {
 public:
  // `path` holds texts (keys of a dict) and integers (positions in a list). Throws kCorrupt, beginning with `where`, if
  // there is something else at that place, or if the path is empty or too long.
  void add(const List& path, Value leaf, std::string_view where);
  // Positions that nothing was put at become None. At most `holes` of them: kCorrupt otherwise.
  Value take(size_t holes, std::string_view where);

 private:
  struct Node {
    Value leaf;
    bool is_leaf = false, is_list = false;
    std::vector<std::pair<Value, std::unique_ptr<Node>>> children;  // as added
    std::unordered_map<std::string, size_t> by_name;
  };
  Value value_of(Node& node, size_t& holes, std::string_view where);

  Node root_;
};

}  // namespace shardsmith
