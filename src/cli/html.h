// A checkpoint as a page to look at and to pass on: one file, no script, nothing loaded from elsewhere.
#pragma once

#include <string>
#include <string_view>

#include "cli/source.h"
#include "storage/storage.h"

namespace shardsmith::cli {

// Text of a file, between tags and in attributes alike: markup, control characters and what is no UTF-8 can't do harm.
std::string html_text(std::string_view text);

// The page: ranks x layers with their bytes, sums, tensors with their slices, ties and padding.
std::string html_page(const std::string& path, const Source& source, size_t depth);

// Appears whole or not at all. Throws kInvalidArgument where `file` is something other than such a page already.
void write_html(Storage& storage, const std::string& file, const std::string& path, const Source& source, size_t depth);

}  // namespace shardsmith::cli
