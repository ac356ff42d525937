#include "storage/numbers.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <limits>

#include "storage/convert.h"

namespace shardsmith {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float decode(uint8_t bits, int mantissa_bits, int bias) {
  const int exponent = (bits & 0x7f) >> mantissa_bits;
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const float magnitude =
      exponent == 0 ? std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits)
                    : std::ldexp(static_cast<float>(mantissa + (1 << mantissa_bits)), exponent - bias - mantissa_bits);
  return bits & 0x80 ? -magnitude : magnitude;
}

template <typename T>
T load(const std::byte* source) {
  T value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

template <typename T, typename Real>
void load_plain(const std::byte* source, int64_t n, Real* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Real>(load<T>(source + i * sizeof(T)));
}

template <typename Real>
void load_16(float (*convert)(uint16_t), const std::byte* source, int64_t n, int64_t step, Real* out) {
  for (int64_t i = 0; i < n; ++i) out[i] = convert(load<uint16_t>(source + i * step));
}

template <typename T, typename Real>
void load_pairs(const std::byte* source, int64_t n, Real* real, Real* imaginary) {
  for (int64_t i = 0; i < n; ++i) {
    real[i] = load<T>(source + i * 2 * sizeof(T));
    imaginary[i] = load<T>(source + i * 2 * sizeof(T) + sizeof(T));
  }
}

const std::array<float, 256>& float8_table(Dtype dtype) {
  static const auto tables = [] {
    std::array<std::array<float, 256>, 5> result;
    constexpr Dtype kTypes[] = {Dtype::kF8E5M2, Dtype::kF8E4M3, Dtype::kF8E8M0, Dtype::kF8E4M3Fnuz, Dtype::kF8E5M2Fnuz};
    for (size_t t = 0; t < result.size(); ++t) {
      for (int bits = 0; bits < 256; ++bits) result[t][bits] = float8_to_float(kTypes[t], static_cast<uint8_t>(bits));
    }
    return result;
  }();
  static_assert(static_cast<int>(Dtype::kF8E5M2Fnuz) - static_cast<int>(Dtype::kF8E5M2) == 4);
  return tables[static_cast<size_t>(dtype) - static_cast<size_t>(Dtype::kF8E5M2)];
}

// Elements whose exponent bits are all set; which of them are NaN is asked only where there are any.
template <typename T>
Specials count_in(std::span<const std::byte> packed, T exponent) {
  constexpr size_t kChunk = 4096;
  const T mantissa = static_cast<T>((exponent & (~exponent + 1)) - 1);  // all below the exponent
  const size_t n = packed.size() / sizeof(T);
  Specials result;
  for (size_t at = 0; at < n; at += kChunk) {
    const size_t end = std::min(n, at + kChunk);
    size_t found = 0;
    for (size_t i = at; i < end; ++i) found += (load<T>(packed.data() + i * sizeof(T)) & exponent) == exponent;
    for (size_t i = at; found > 0 && i < end; ++i) {
      const T bits = load<T>(packed.data() + i * sizeof(T));
      if ((bits & exponent) != exponent) continue;
      --found;
      ++(bits & mantissa ? result.nan : result.infinite);
    }
  }
  return result;
}

template <typename T>
std::string shortest(T number) {
  std::array<char, 64> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), number);
  return {text.data(), end.ptr};
}

std::string float_text(Dtype dtype, const std::byte* element) {
  switch (dtype) {
    case Dtype::kF64:
    case Dtype::kC128:
      return shortest(load<double>(element));
    case Dtype::kF32:
    case Dtype::kC64:
      return shortest(load<float>(element));
    case Dtype::kF16:
    case Dtype::kC32:
      return shortest(half_to_float(load<uint16_t>(element)));
    case Dtype::kBF16:
      return shortest(bfloat16_to_float(load<uint16_t>(element)));
    default:
      return shortest(float8_to_float(dtype, load<uint8_t>(element)));
  }
}

}  // namespace

bool is_complex(Dtype dtype) { return dtype == Dtype::kC32 || dtype == Dtype::kC64 || dtype == Dtype::kC128; }

bool has_specials(Dtype dtype) { return is_floating(dtype) || is_complex(dtype); }

bool is_wide_integer(Dtype dtype) { return dtype == Dtype::kI64 || dtype == Dtype::kU64; }

float float8_to_float(Dtype dtype, uint8_t bits) {
  switch (dtype) {
    case Dtype::kF8E5M2:  // as IEEE's: the upper byte of a half
      return half_to_float(static_cast<uint16_t>(bits << 8));
    case Dtype::kF8E4M3:  // no infinity, one NaN of either sign
      return (bits & 0x7f) == 0x7f ? kNan : decode(bits, 3, 7);
    case Dtype::kF8E8M0:  // a power of two
      return bits == 0xff ? kNan : std::ldexp(1.0f, static_cast<int>(bits) - 127);
    case Dtype::kF8E4M3Fnuz:  // no infinity, no negative zero: its bits are the NaN
      return bits == 0x80 ? kNan : decode(bits, 3, 8);
    case Dtype::kF8E5M2Fnuz:
      return bits == 0x80 ? kNan : decode(bits, 2, 16);
    default:
      return kNan;
  }
}

template <typename Real>
void load_numbers(Dtype dtype, const std::byte* source, int64_t n, Real* real, Real* imaginary) {
  switch (dtype) {
    case Dtype::kBool:
      for (int64_t i = 0; i < n; ++i) real[i] = source[i] != std::byte{0} ? 1 : 0;
      return;
    case Dtype::kU8:
    case Dtype::kQU8:
      return load_plain<uint8_t>(source, n, real);
    case Dtype::kI8:
    case Dtype::kQI8:
      return load_plain<int8_t>(source, n, real);
    case Dtype::kF8E5M2:
    case Dtype::kF8E4M3:
    case Dtype::kF8E8M0:
    case Dtype::kF8E4M3Fnuz:
    case Dtype::kF8E5M2Fnuz: {
      const auto& table = float8_table(dtype);
      for (int64_t i = 0; i < n; ++i) real[i] = table[static_cast<uint8_t>(source[i])];
      return;
    }
    case Dtype::kI16:
      return load_plain<int16_t>(source, n, real);
    case Dtype::kU16:
      return load_plain<uint16_t>(source, n, real);
    case Dtype::kF16:
      return load_16(half_to_float, source, n, 2, real);
    case Dtype::kBF16:
      return load_16(bfloat16_to_float, source, n, 2, real);
    case Dtype::kI32:
    case Dtype::kQI32:
      return load_plain<int32_t>(source, n, real);
    case Dtype::kU32:
      return load_plain<uint32_t>(source, n, real);
    case Dtype::kF32:
      return load_plain<float>(source, n, real);
    case Dtype::kF64:
      return load_plain<double>(source, n, real);
    case Dtype::kI64:
      return load_plain<int64_t>(source, n, real);
    case Dtype::kU64:
      return load_plain<uint64_t>(source, n, real);
    case Dtype::kC32:
      load_16(half_to_float, source, n, 4, real);
      return load_16(half_to_float, source + 2, n, 4, imaginary);
    case Dtype::kC64:
      return load_pairs<float>(source, n, real, imaginary);
    case Dtype::kC128:
      return load_pairs<double>(source, n, real, imaginary);
  }
}

template void load_numbers<double>(Dtype, const std::byte*, int64_t, double*, double*);
template void load_numbers<long double>(Dtype, const std::byte*, int64_t, long double*, long double*);

Specials count_specials(Dtype dtype, std::span<const std::byte> packed) {
  Specials result;
  switch (dtype) {
    case Dtype::kF16:
      return count_in<uint16_t>(packed, 0x7c00);
    case Dtype::kBF16:
      return count_in<uint16_t>(packed, 0x7f80);
    case Dtype::kF32:
      return count_in<uint32_t>(packed, 0x7f800000);
    case Dtype::kF64:
      return count_in<uint64_t>(packed, 0x7ff0000000000000);
    default:
      break;
  }
  if (!has_specials(dtype)) return result;
  constexpr int64_t kChunk = 512;
  std::array<double, kChunk> real, imaginary;
  const int64_t size = size_of(dtype), n = static_cast<int64_t>(packed.size()) / size;
  const bool complex = is_complex(dtype);
  for (int64_t at = 0; at < n; at += kChunk) {
    const int64_t count = std::min(kChunk, n - at);
    load_numbers(dtype, packed.data() + at * size, count, real.data(), imaginary.data());
    for (int64_t i = 0; i < count; ++i) {
      const bool nan = std::isnan(real[i]) || (complex && std::isnan(imaginary[i]));
      const bool infinite = std::isinf(real[i]) || (complex && std::isinf(imaginary[i]));
      if (nan)
        ++result.nan;
      else if (infinite)
        ++result.infinite;
    }
  }
  return result;
}

std::string element_text(Dtype dtype, const std::byte* element) {
  if (is_complex(dtype)) {
    const std::string imaginary = float_text(dtype, element + size_of(dtype) / 2);
    return float_text(dtype, element) + (imaginary.starts_with('-') ? "" : "+") + imaginary + "j";
  }
  if (has_specials(dtype)) return float_text(dtype, element);
  switch (dtype) {
    case Dtype::kBool:
      return element[0] == std::byte{0} ? "false" : "true";
    case Dtype::kI64:
      return std::to_string(load<int64_t>(element));
    case Dtype::kU64:
      return std::to_string(load<uint64_t>(element));
    default: {
      double number = 0;
      load_numbers<double>(dtype, element, 1, &number, nullptr);
      return std::to_string(static_cast<int64_t>(number));
    }
  }
}

}  // namespace shardsmith
