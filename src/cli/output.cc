#include "cli/output.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <iostream>
#include <memory>
#include <mutex>

#include "base/error.h"
#include "base/utf8.h"

namespace shardsmith::cli {
namespace {

bool colours() {
  static const bool on = [] {
    const char* no_color = std::getenv("NO_COLOR");
    const char* term = std::getenv("TERM");
    return !(no_color && *no_color) && isatty(STDOUT_FILENO) && !(term && std::string_view(term) == "dumb");
  }();
  return on;
}

std::string styled(std::string_view code, std::string_view text) {
  return colours() ? str("\033[", code, "m", text, "\033[0m") : std::string(text);
}

// Columns a cell takes: escape sequences take none, UTF-8 continuation bytes neither.
size_t width(std::string_view text) {
  size_t columns = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\033') {
      i = std::min(text.find('m', i), text.size());
    } else if ((text[i] & 0xC0) != 0x80) {
      ++columns;
    }
  }
  return columns;
}

std::string fixed(double number, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, number);
  return text;
}

// One bar or the lines of one log.
class Meter {
 public:
  explicit Meter(bool terminal) : terminal_(terminal) {}
  ~Meter() { clear(); }

  void show(const ProgressEvent& event) {
    std::lock_guard lock(mutex_);
    const auto now = std::chrono::steady_clock::now();
    const bool last = event.total > 0 && event.done >= event.total;
    if (last) return clear();
    const auto pause = terminal_ ? std::chrono::milliseconds(100) : std::chrono::milliseconds(30000);
    if (now - shown_ < pause) return;
    shown_ = now;
    terminal_ ? bar(event) : line(event);
  }

 private:
  static std::string amount(const ProgressEvent& event, uint64_t number) {
    return event.unit == "bytes" ? human_bytes(number) : str(number, " ", event.unit);
  }
  void bar(const ProgressEvent& event) {
    constexpr int kWidth = 30;
    std::string text = str("\r\033[K", event.what, " ");
    if (event.total > 0) {
      const int full = static_cast<int>(kWidth * static_cast<double>(event.done) / static_cast<double>(event.total));
      text += str("[", std::string(full, '='), std::string(kWidth - full, ' '), "] ");
    }
    text += amount(event, event.done);
    if (event.total > 0) text += str(" of ", amount(event, event.total));
    std::cerr << text << std::flush;
    drawn_ = true;
  }
  void line(const ProgressEvent& event) {
    std::cerr << event.what << ": " << amount(event, event.done);
    if (event.total > 0) std::cerr << " of " << amount(event, event.total);
    std::cerr << "\n";
  }
  void clear() {
    if (drawn_) std::cerr << "\r\033[K" << std::flush;
    drawn_ = false;
  }

  const bool terminal_;
  std::mutex mutex_;
  std::chrono::steady_clock::time_point shown_ = std::chrono::steady_clock::now();
  bool drawn_ = false;
};

}  // namespace

void Output::notice(std::string_view text) const {
  if (!quiet) std::cerr << printable(text) << "\n";
}

Progress Output::progress() const {
  if (quiet || json) return {};
  auto meter = std::make_shared<Meter>(isatty(STDERR_FILENO) == 1);
  return [meter](const ProgressEvent& event) { meter->show(event); };
}

void Output::print(const Value& value) const { std::cout << to_json(value, 2) << "\n"; }

std::string bold(std::string_view text) { return styled("1", text); }
std::string dim(std::string_view text) { return styled("2", text); }
std::string red(std::string_view text) { return styled("31", text); }
std::string green(std::string_view text) { return styled("32", text); }

std::string printable(std::string_view text) {
  std::string result;
  char escaped[16];
  for (size_t i = 0; i < text.size();) {
    const size_t length = utf8_length(text, i);
    const auto byte = [&](size_t k) { return static_cast<unsigned>(static_cast<unsigned char>(text[i + k])); };
    if (length == 0 || byte(0) < 0x20 || byte(0) == 0x7F) {
      std::snprintf(escaped, sizeof escaped, "\\x%02x", byte(0));
      result += escaped;
      ++i;
      continue;
    }
    unsigned code = 0;  // of what two or three bytes hold
    if (length == 2) code = (byte(0) & 0x1F) << 6 | (byte(1) & 0x3F);
    if (length == 3) code = (byte(0) & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F);
    // Further control characters, and those that turn the direction of what follows.
    const bool turns = (code >= 0x2028 && code <= 0x202E) || (code >= 0x2066 && code <= 0x2069);
    if ((code >= 0x80 && code < 0xA0) || turns || code == 0x200E || code == 0x200F || code == 0x061C) {
      std::snprintf(escaped, sizeof escaped, "\\u%04x", code);
      result += escaped;
    } else {
      result += text.substr(i, length);
    }
    i += length;
  }
  return result;
}

std::string printable_lines(std::string_view text) {
  std::string result;
  while (true) {
    const size_t end = text.find('\n');
    result += printable(text.substr(0, end));
    if (end == std::string_view::npos) return result;
    result += '\n';
    text.remove_prefix(end + 1);
  }
}

std::string human_bytes(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB", "EB"};
  if (bytes < 1000) return str(bytes, " B");
  double number = static_cast<double>(bytes);
  size_t unit = 0;
  // 999.95 would be printed as 1000.0.
  while (number >= 999.95 && unit + 1 < std::size(kUnits)) {
    number /= 1000;
    ++unit;
  }
  return str(fixed(number, 1), " ", kUnits[unit]);
}

std::string human_count(int64_t count) {
  if (count < 10000) return std::to_string(count);
  double number = static_cast<double>(count);
  static constexpr const char* kUnits[] = {"", "k", "M", "G", "T"};
  size_t unit = 0;
  while (number >= 999.95 && unit + 1 < std::size(kUnits)) {
    number /= 1000;
    ++unit;
  }
  return fixed(number, 1) + kUnits[unit];
}

std::string human_time(double seconds) {
  const auto time = static_cast<std::time_t>(seconds);
  std::tm parts{};
  char text[64];
  if (!localtime_r(&time, &parts) || std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S", &parts) == 0) return "?";
  return text;
}

uint64_t parse_size(const std::string& text, std::string_view option) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  std::string unit(end);
  unit.erase(std::remove(unit.begin(), unit.end(), ' '), unit.end());
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return std::toupper(c); });
  static const std::vector<std::pair<std::string, double>> kUnits = {
      {"", 1},      {"B", 1},        {"KB", 1e3},        {"MB", 1e6},           {"GB", 1e9},
      {"TB", 1e12}, {"KIB", 1024.0}, {"MIB", 1048576.0}, {"GIB", 1073741824.0}, {"TIB", 1099511627776.0}};
  for (const auto& [name, factor] : kUnits) {
    if (unit == name && end != text.c_str() && std::isfinite(number) && number * factor >= 1 &&
        number * factor < 9e18) {
      return static_cast<uint64_t>(number * factor);
    }
  }
  fail(ErrorKind::kInvalidArgument, option, ": '", text, "' is no size (examples: 5GB, 500MB, 1GiB)");
}

void Table::add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

std::string Table::text(std::string_view indent) const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], width(row[i]));
  }
  std::string result;
  for (const auto& row : rows_) {
    std::string line(indent);
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - width(row[i]), ' ');
      const bool right = i < right_.size() && right_[i];
      line += right ? padding + row[i] : row[i] + padding;
      if (i + 1 < row.size()) line += "  ";
    }
    line.erase(line.find_last_not_of(' ') + 1);
    result += line + "\n";
  }
  return result;
}

}  // namespace shardsmith::cli
