// One strided copy: runs by memcpy, transposes by tiles, all else element by element.
#include <algorithm>
#include <array>
#include <cstring>

#include "base/error.h"
#include "storage/convert.h"
#include "storage/transfer.h"

namespace shardsmith {
namespace {

__extension__ typedef __int128 Wide;  // holds extent x step without overflow

struct Loop {
  int64_t extent, source, destination;  // steps in bytes
};

// Moves n elements along one loop.
using Row = void (*)(const std::byte* source, std::byte* destination, int64_t n, int64_t source_step,
                     int64_t destination_step);

template <size_t kSize>
void move_row(const std::byte* source, std::byte* destination, int64_t n, int64_t source_step,
              int64_t destination_step) {
  for (int64_t i = 0; i < n; ++i) std::memcpy(destination + i * destination_step, source + i * source_step, kSize);
}

// Reverses the bytes of each of kParts equal parts of an element (a complex number has two).
template <size_t kSize, size_t kParts>
void swap_row(const std::byte* source, std::byte* destination, int64_t n, int64_t source_step,
              int64_t destination_step) {
  constexpr size_t part = kSize / kParts;
  for (int64_t i = 0; i < n; ++i) {
    std::array<std::byte, kSize> element;
    std::memcpy(element.data(), source + i * source_step, kSize);
    for (size_t p = 0; p < kParts; ++p) std::reverse(element.begin() + p * part, element.begin() + (p + 1) * part);
    std::memcpy(destination + i * destination_step, element.data(), kSize);
  }
}

Row swap_row_of(Dtype dtype) {
  const bool complex = dtype == Dtype::kC32 || dtype == Dtype::kC64 || dtype == Dtype::kC128;
  switch (size_of(dtype)) {
    case 2:
      return swap_row<2, 1>;
    case 4:
      return complex ? swap_row<4, 2> : swap_row<4, 1>;
    case 8:
      return complex ? swap_row<8, 2> : swap_row<8, 1>;
    case 16:
      return swap_row<16, 2>;
    default:
      return move_row<1>;
  }
}

Row move_row_of(int64_t size) {
  switch (size) {
    case 1:
      return move_row<1>;
    case 2:
      return move_row<2>;
    case 4:
      return move_row<4>;
    case 8:
      return move_row<8>;
    default:
      return move_row<16>;
  }
}

// Both steps go one element along different loops: a transpose. A tile is read in whole cache lines, turned in
// the first-level cache, and written in whole cache lines.
template <size_t kSize>
void transpose(const std::byte* source, std::byte* destination, const Loop& along_source,
               const Loop& along_destination) {
  constexpr int64_t kTile = kSize >= 8 ? 16 : 32;
  std::array<std::byte, kTile * kTile * kSize> tile;
  for (int64_t i = 0; i < along_destination.extent; i += kTile) {
    const int64_t rows = std::min(kTile, along_destination.extent - i);
    for (int64_t j = 0; j < along_source.extent; j += kTile) {
      const int64_t columns = std::min(kTile, along_source.extent - j);
      for (int64_t r = 0; r < rows; ++r)
        std::memcpy(tile.data() + r * kTile * kSize, source + (i + r) * along_destination.source + j * kSize,
                    columns * kSize);
      for (int64_t c = 0; c < columns; ++c) {
        std::byte* out = destination + (j + c) * along_source.destination + i * kSize;
        for (int64_t r = 0; r < rows; ++r) std::memcpy(out + r * kSize, tile.data() + (r * kTile + c) * kSize, kSize);
      }
    }
  }
}

using Transpose = void (*)(const std::byte*, std::byte*, const Loop&, const Loop&);
Transpose transpose_of(int64_t size) {
  switch (size) {
    case 1:
      return transpose<1>;
    case 2:
      return transpose<2>;
    case 4:
      return transpose<4>;
    case 8:
      return transpose<8>;
    default:
      return transpose<16>;
  }
}

void check_bounds(const char* what, uint64_t begin, const std::vector<int64_t>& extent,
                  const std::vector<int64_t>& step, int64_t element, size_t size) {
  Wide end = static_cast<Wide>(begin) + element;
  for (size_t d = 0; d < extent.size(); ++d) {
    if (step[d] < 0) fail(ErrorKind::kInvalidArgument, "a copy has a negative step in its ", what);
    end += static_cast<Wide>(extent[d] - 1) * step[d];
  }
  if (end > static_cast<Wide>(size))
    fail(ErrorKind::kInvalidArgument, "a copy of ", to_string(Shape(extent)), " elements leaves its ", what, " of ",
         size, " bytes");
}

// Loops without those of one step, outermost first by destination, neighbours joined where they are one long loop.
std::vector<Loop> simplified(const Copy& copy) {
  std::vector<Loop> loops;
  for (size_t d = 0; d < copy.extent.size(); ++d)
    if (copy.extent[d] != 1) loops.push_back({copy.extent[d], copy.source_step[d], copy.destination_step[d]});
  std::stable_sort(loops.begin(), loops.end(),
                   [](const Loop& a, const Loop& b) { return a.destination > b.destination; });
  std::vector<Loop> joined;
  for (const Loop& loop : loops) {
    if (!joined.empty() && joined.back().source == loop.source * loop.extent &&
        joined.back().destination == loop.destination * loop.extent) {
      joined.back() = {joined.back().extent * loop.extent, loop.source, loop.destination};
    } else {
      joined.push_back(loop);
    }
  }
  return joined;
}

// Calls body(source, destination) for every combination of the loops.
template <typename Body>
void for_each(std::span<const Loop> loops, const std::byte* source, std::byte* destination, const Body& body) {
  if (loops.empty()) {
    body(source, destination);
    return;
  }
  const Loop& loop = loops.front();
  for (int64_t i = 0; i < loop.extent; ++i)
    for_each(loops.subspan(1), source + i * loop.source, destination + i * loop.destination, body);
}

// Through a small buffer: swapped first, then cast.
void swap_and_convert(Row swap, ConvertRow convert, int64_t size, const std::byte* source, std::byte* destination,
                      const Loop& loop) {
  constexpr int64_t kChunk = 256;
  std::array<std::byte, kChunk * 16> native;
  for (int64_t i = 0; i < loop.extent; i += kChunk) {
    const int64_t n = std::min(kChunk, loop.extent - i);
    swap(source + i * loop.source, native.data(), n, loop.source, size);
    convert(native.data(), destination + i * loop.destination, n, size, loop.destination);
  }
}

}  // namespace

void run_copy(const Copy& copy, std::span<const std::byte> source, std::span<std::byte> destination) {
  const int64_t size = size_of(copy.from);
  if (copy.source_step.size() != copy.extent.size() || copy.destination_step.size() != copy.extent.size())
    fail(ErrorKind::kInvalidArgument, "a copy has ", copy.extent.size(), " loops but other numbers of steps");
  for (int64_t extent : copy.extent) {
    if (extent < 0) fail(ErrorKind::kInvalidArgument, "a copy has a negative extent");
    if (extent == 0) return;
  }
  check_bounds("source", copy.source, copy.extent, copy.source_step, size, source.size());
  check_bounds("destination", copy.offset, copy.extent, copy.destination_step, size_of(copy.to), destination.size());

  ConvertRow convert = nullptr;
  if (copy.from != copy.to) {
    convert = convert_row(copy.from, copy.to);
    if (!convert)
      fail(ErrorKind::kUnsupported, "no cast from ", to_string(copy.from), " to ", to_string(copy.to),
           ": only float64, float32, float16 and bfloat16 are cast");
  }
  const bool swapped = copy.byte_swapped && size > 1;
  const std::byte* from = source.data() + copy.source;
  std::byte* to = destination.data() + copy.offset;
  std::vector<Loop> loops = simplified(copy);
  Loop inner{1, size, size_of(copy.to)};
  if (!loops.empty()) {
    inner = loops.back();
    loops.pop_back();
  }

  if (convert || swapped) {
    const Row swap = swap_row_of(copy.from);
    for_each(loops, from, to, [&](const std::byte* s, std::byte* d) {
      if (!convert)
        swap(s, d, inner.extent, inner.source, inner.destination);
      else if (!swapped)
        convert(s, d, inner.extent, inner.source, inner.destination);
      else
        swap_and_convert(swap, convert, size, s, d, inner);
    });
    return;
  }
  if (inner.source == size && inner.destination == size) {
    for_each(loops, from, to,
             [&](const std::byte* s, std::byte* d) { std::memcpy(d, s, static_cast<size_t>(inner.extent * size)); });
    return;
  }
  const auto along_source =
      std::find_if(loops.begin(), loops.end(), [&](const Loop& loop) { return loop.source == size; });
  if (inner.destination == size && along_source != loops.end()) {
    const Loop other = *along_source;
    loops.erase(along_source);
    const Transpose turn = transpose_of(size);
    for_each(loops, from, to, [&](const std::byte* s, std::byte* d) { turn(s, d, other, inner); });
    return;
  }
  const Row row = move_row_of(size);
  for_each(loops, from, to,
           [&](const std::byte* s, std::byte* d) { row(s, d, inner.extent, inner.source, inner.destination); });
}

}  // namespace shardsmith
