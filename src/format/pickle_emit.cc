#include "format/pickle_emit.h"

#include <bit>

#include "base/error.h"
#include "base/utf8.h"
#include "format/bytes.h"

namespace shardsmith {

std::optional<std::string> pickle_long(const std::string& digits) {
  const bool negative = !digits.empty() && digits[0] == '-';
  const size_t begin = negative || (!digits.empty() && digits[0] == '+') ? 1 : 0;
  if (begin == digits.size() || digits.size() > 620) return {};
  std::string magnitude;
  for (size_t i = begin; i < digits.size(); ++i) {
    if (digits[i] < '0' || digits[i] > '9') return {};
    unsigned carry = static_cast<unsigned>(digits[i] - '0');
    for (char& c : magnitude) {
      carry += static_cast<unsigned char>(c) * 10u;
      c = static_cast<char>(carry);
      carry >>= 8;
    }
    if (carry) magnitude += static_cast<char>(carry);
  }
  magnitude += '\0';  // room for the sign
  if (negative) {
    unsigned carry = 1;
    for (char& c : magnitude) {
      carry += static_cast<unsigned char>(~c);
      c = static_cast<char>(carry);
      carry >>= 8;
    }
  }
  const auto sign = [](char c) { return static_cast<signed char>(c) < 0; };
  while (magnitude.size() > 1 && (magnitude.back() == 0 || magnitude.back() == '\xff') &&
         sign(magnitude.back()) == sign(magnitude[magnitude.size() - 2]))
    magnitude.pop_back();
  if (magnitude.size() > 255) return {};
  return magnitude;
}

void PickleEmitter::put_integer(int64_t value) {
  if (value >= 0 && value < 256) {
    out_ += 'K';
    put_le(out_, static_cast<uint8_t>(value));
  } else if (value >= 0 && value < 65536) {
    out_ += 'M';
    put_le(out_, static_cast<uint16_t>(value));
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    out_ += 'J';
    put_le(out_, static_cast<uint32_t>(value));
  } else {
    put_long(*pickle_long(std::to_string(value)));
  }
}

void PickleEmitter::put_float(double value) {
  const uint64_t bits = std::bit_cast<uint64_t>(value);
  out_ += 'G';
  for (int shift = 56; shift >= 0; shift -= 8) out_ += static_cast<char>(bits >> shift);
}

void PickleEmitter::put_long(const std::string& bytes) {
  out_ += '\x8a';
  put_le(out_, static_cast<uint8_t>(bytes.size()));
  out_ += bytes;
}

void PickleEmitter::put_text(std::string_view text) {
  if (const auto known = text_memo_.find(text); known != text_memo_.end()) return put_get(known->second);
  if (!is_utf8(text)) fail(ErrorKind::kInvalidArgument, where_, ": a text that is not UTF-8; store it as bytes");
  if (text.size() > UINT32_MAX) fail(ErrorKind::kUnsupported, where_, ": a text of ", text.size(), " bytes");
  out_ += 'X';
  put_le(out_, static_cast<uint32_t>(text.size()));
  out_ += text;
  if (text.size() <= 256) text_memo_.emplace(text, put_memo());
}

void PickleEmitter::put_global(std::string_view module, std::string_view name) {
  line_.assign(1, 'c').append(module).append(1, '\n').append(name).append(1, '\n');
  if (const auto known = global_memo_.find(line_); known != global_memo_.end()) return put_get(known->second);
  out_ += line_;
  global_memo_.emplace(line_, put_memo());
}

void PickleEmitter::put_integers(const std::vector<int64_t>& values) {
  const size_t n = values.size();
  if (n == 0) out_ += ')';
  if (n > 3) out_ += '(';
  for (int64_t value : values) put_integer(value);
  if (n > 3)
    out_ += 't';
  else if (n > 0)
    out_ += static_cast<char>('\x84' + n);
}

void PickleEmitter::put_get(uint32_t slot) {
  out_ += slot < 256 ? 'h' : 'j';
  put_slot(slot);
}

uint32_t PickleEmitter::put_memo() {
  out_ += memo_ < 256 ? 'q' : 'r';
  put_slot(memo_);
  return memo_++;
}

void PickleEmitter::put_slot(uint32_t slot) {
  if (slot < 256)
    put_le(out_, static_cast<uint8_t>(slot));
  else
    put_le(out_, slot);
}

}  // namespace shardsmith
