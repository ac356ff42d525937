// Plain values for people: what stands in a checkpoint beside its tensors.
#pragma once

#include <cstddef>
#include <string>

#include "base/value.h"
#include "layout/index.h"

namespace shardsmith::cli {

// Tensors by their names, lists longer than `longest` cut.
Value readable(const Value& value, const Index& index, size_t longest);

// Whether a value says nothing but where tensors are.
bool only_tensors(const Value& value);
// The value without its branches of tensors; None where nothing is left.
Value without_tensors(const Value& value);

// One line, cut to about `longest` characters; control characters are escaped.
std::string short_text(const Value& value, size_t longest = 60);

// Whether there is nothing in it: None, or an empty dict.
bool is_empty(const Value& value);

}  // namespace shardsmith::cli
