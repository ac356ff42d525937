// What every verb prints: human text or one JSON object on stdout, notices and progress on stderr.
// Used by the main thread; only progress events may come from other threads.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/progress.h"
#include "base/value.h"

namespace shardsmith::cli {

struct Output {
  bool json = false;   // one object on stdout, nothing else there
  bool quiet = false;  // no notices, no progress

  // One line on stderr, unless quiet.
  void notice(std::string_view text) const;
  // A bar on a terminal; elsewhere a plain line every half minute; nothing under --json or -q.
  Progress progress() const;
  // The object on stdout, indented.
  void print(const Value& value) const;
};

// Styles for terminals; the text itself where stdout is none or NO_COLOR is set.
std::string bold(std::string_view text);
std::string dim(std::string_view text);
std::string red(std::string_view text);
std::string green(std::string_view text);

// Names in files are foreign: control characters become \xNN, those beyond ASCII and those that turn the direction of
// writing \uNNNN, so that none reaches the terminal.
std::string printable(std::string_view text);
std::string printable_lines(std::string_view text);  // line breaks stay

std::string human_bytes(uint64_t bytes);  // "538.1 MB": decimal units
std::string human_count(int64_t count);   // "134.5M"
std::string human_time(double seconds_since_1970);
// "5GB", "500 MB", "1GiB", "4096": bytes. Throws kInvalidArgument that names `option`.
uint64_t parse_size(const std::string& text, std::string_view option);

// Columns aligned by the widest cell; `right` marks those aligned to the right. Styled cells may be wider in bytes.
class Table {
 public:
  explicit Table(std::vector<bool> right) : right_(std::move(right)) {}
  void add(std::vector<std::string> cells);
  std::string text(std::string_view indent = "  ") const;

 private:
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace shardsmith::cli
