#include "base/checksum.h"

#include <isa-l.h>

#include <array>

namespace shardsmith {
namespace {

constexpr uint32_t kPolynomial = 0xedb88320;  // reflected: bit 31 is x^0

// a * b modulo the polynomial, bits reflected.
uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// powers[k] = x^(8 * 2^k).
std::array<uint32_t, 64> make_powers() {
  std::array<uint32_t, 64> powers{};
  powers[0] = 0x00800000u;  // x^8
  for (size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
  return powers;
}

}  // namespace

uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc) {
  return crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

uint32_t crc32_combine(uint32_t a, uint32_t b, uint64_t length_b) {
  static const std::array<uint32_t, 64> powers = make_powers();
  for (size_t k = 0; length_b != 0; ++k, length_b >>= 1) {
    if (length_b & 1) a = multiply(powers[k], a);
  }
  return a ^ b;
}

}  // namespace shardsmith
