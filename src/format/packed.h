// A tensor's bytes, packed row-major, out of whatever view of a storage it is.
#pragma once

#include <string>
#include <vector>

#include "format/pt.h"

namespace shardsmith {

class PackedSources {
 public:
  // `content` must outlive this and its results.
  explicit PackedSources(const PtContent& content) : content_(content), used_(content.storages.size(), false) {}
  // Throws kInvalidArgument, naming the tensor, where a storage has no ByteSource::data and would have to be read out
  // of order or twice.
  ByteSource of(size_t tensor, const std::string& path);

 private:
  const PtContent& content_;
  std::vector<bool> used_;  // storages without `data` that are spoken for
};

}  // namespace shardsmith
