#include "format/packed.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace shardsmith {
namespace {

bool is_packed(const Shape& size, const Strides& strides) {
  int64_t step = 1;
  for (size_t d = size.size(); d-- > 0;) {
    if (size[d] != 1 && strides[d] != step) return false;
    step *= size[d];
  }
  return true;
}

// Walks a strided view in row-major order, a piece at a time.
class Gather {
 public:
  Gather(const std::byte* base, const PtTensor& tensor)
      : base_(base), size_(tensor.size), strides_(tensor.strides), element_(size_of(tensor.dtype)) {}

  // Bytes [offset, offset + out.size()) of the packed tensor; a range may begin and end inside of an element.
  void fill(uint64_t offset, std::span<std::byte> out) const {
    const auto element = static_cast<uint64_t>(element_);
    std::vector<int64_t> at = place(offset / element);
    uint64_t skip = offset % element;
    size_t done = 0;
    while (done < out.size()) {
      const size_t count = std::min<size_t>(out.size() - done, static_cast<size_t>(element - skip));
      std::memcpy(out.data() + done, base_ + source(at) * element_ + static_cast<int64_t>(skip), count);
      done += count;
      skip = 0;
      for (size_t d = at.size(); d-- > 0;) {
        if (++at[d] < size_[d]) break;
        at[d] = 0;
      }
    }
  }

 private:
  std::vector<int64_t> place(uint64_t number) const {
    std::vector<int64_t> at(size_.size(), 0);
    for (size_t d = size_.size(); d-- > 0;) {
      at[d] = static_cast<int64_t>(number % static_cast<uint64_t>(size_[d]));
      number /= static_cast<uint64_t>(size_[d]);
    }
    return at;
  }
  int64_t source(const std::vector<int64_t>& at) const {
    int64_t sum = 0;
    for (size_t d = 0; d < at.size(); ++d) sum += at[d] * strides_[d];
    return sum;
  }

  const std::byte* base_;  // of the tensor's first element
  Shape size_;
  Strides strides_;
  int64_t element_;
};

}  // namespace

ByteSource PackedSources::of(size_t number, const std::string& path) {
  const PtTensor& tensor = content_.tensors[number];
  const ByteSource& storage = content_.storages[tensor.storage];
  const uint64_t bytes = static_cast<uint64_t>(volume(tensor.size)) * static_cast<uint64_t>(size_of(tensor.dtype));
  if (bytes == 0) return {};
  const uint64_t begin = static_cast<uint64_t>(tensor.offset) * static_cast<uint64_t>(size_of(tensor.dtype));
  const bool packed = is_packed(tensor.size, tensor.strides);
  if (storage.data) {
    if (packed) return {bytes, storage.data + begin, {}};
    const auto gather = std::make_shared<Gather>(storage.data + begin, tensor);
    return {bytes, nullptr, [gather](uint64_t offset, std::span<std::byte> out) { gather->fill(offset, out); }};
  }
  if (!packed || begin != 0 || bytes != storage.size || used_[tensor.storage])
    fail(ErrorKind::kInvalidArgument, path, ": tensor ",
         tensor.name.empty() ? std::to_string(number) : "'" + tensor.name + "'", " ", to_string(tensor.size),
         used_[tensor.storage] ? " shares its bytes with another one" : " is a view of a part of its storage",
         ", which is not in memory; give it a storage of its own");
  used_[tensor.storage] = true;
  return storage;
}

}  // namespace shardsmith
