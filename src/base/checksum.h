// CRC-32 (the zip polynomial, reflected) with ISA-L, and the arithmetic that joins the
// checksums of neighbouring ranges. Pure; any thread may call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace shardsmith {

// Continues `crc` (0 to begin) over `bytes`; equals zlib's crc32().
uint32_t crc32(std::span<const std::byte> bytes, uint32_t crc = 0);

// The CRC of A followed by B, from crc(A), crc(B) and B's length in bytes.
uint32_t crc32_combine(uint32_t a, uint32_t b, uint64_t length_b);

}  // namespace shardsmith
