// The pickle in DCP's `.metadata`: which items there are, of which tensors, and where they lie.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/value.h"
#include "layout/box.h"
#include "layout/dtype.h"

namespace shardsmith {

// Bytes of a data file: a whole torch.save archive.
struct DcpItem {
  std::string file;  // a name in the folder
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct DcpChunk {
  Box box;
  DcpItem item;  // no file: a chunk without elements, of which nothing was stored
};

struct DcpEntry {
  std::string key;  // flat: torch joins with '.'
  List path;        // texts and integers; empty: the key is all there is
  bool is_tensor = false;
  Dtype dtype = Dtype::kF32;
  Shape shape;
  bool requires_grad = false;
  std::vector<DcpChunk> chunks;  // of a tensor
  DcpItem item;                  // of anything else
};

// Knows every generation since torch 1.13. Throws kCorrupt, and kUnsupported that names the transform that an item went
// through or the dtype that can't be held.
std::vector<DcpEntry> parse_dcp_metadata(std::string_view bytes, std::string_view where);

// What torch's own reader unpickles into a Metadata.
std::string make_dcp_metadata(const std::vector<DcpEntry>& entries);

}  // namespace shardsmith
