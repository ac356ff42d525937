// JSON with one long list in it, whose items needn't all be there at once.
#pragma once

#include <functional>
#include <string_view>

#include "base/value.h"

namespace shardsmith {

// As parse_json(text, where), but the items of the list that stands under `key` of the outermost object are handed over
// one by one, in their order, and are not in the result, where the list is empty.
Value parse_json_items(std::string_view text, std::string_view where, std::string_view key,
                       const std::function<void(const Value& item)>& take);

}  // namespace shardsmith
