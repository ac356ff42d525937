#include "base/utf8.h"

namespace shardsmith {

size_t utf8_length(std::string_view text, size_t at) {
  const auto byte = [&](size_t k) { return static_cast<unsigned char>(text[k]); };
  const unsigned char c = byte(at);
  if (c < 0x80) return 1;
  const size_t n = c >= 0xf0 && c <= 0xf4 ? 4 : c >= 0xe0 && c < 0xf0 ? 3 : c >= 0xc2 && c < 0xe0 ? 2 : 0;
  if (n == 0 || n > text.size() - at) return 0;
  for (size_t k = at + 1; k < at + n; ++k)
    if ((byte(k) & 0xc0) != 0x80) return 0;
  const unsigned char second = byte(at + 1);
  if ((c == 0xe0 && second < 0xa0) || (c == 0xed && second > 0x9f) || (c == 0xf0 && second < 0x90) ||
      (c == 0xf4 && second > 0x8f))
    return 0;
  return n;
}

bool is_utf8(std::string_view text) {
  for (size_t at = 0; at < text.size();) {
    const size_t n = utf8_length(text, at);
    if (n == 0) return false;
    at += n;
  }
  return true;
}

}  // namespace shardsmith
