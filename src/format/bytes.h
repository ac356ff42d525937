// Little-endian numbers in byte strings.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace shardsmith {

// The caller has checked that the bytes are there.
template <typename T>
T get_le(std::string_view bytes, size_t at) {
  T value = 0;
  for (size_t i = 0; i < sizeof(T); ++i)
    value =
        static_cast<T>(value | static_cast<T>(static_cast<T>(static_cast<unsigned char>(bytes[at + i])) << (8 * i)));
  return value;
}

template <typename T>
void put_le(std::string& out, T value) {
  for (size_t i = 0; i < sizeof(T); ++i) out += static_cast<char>(static_cast<uint64_t>(value) >> (8 * i));
}

}  // namespace shardsmith
