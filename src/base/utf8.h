// Is it text?
#pragma once

#include <cstddef>
#include <string_view>

namespace shardsmith {

// The length of the valid UTF-8 sequence that begins at text[at], or 0. Overlong forms and surrogates are not valid.
size_t utf8_length(std::string_view text, size_t at);
bool is_utf8(std::string_view text);

}  // namespace shardsmith
