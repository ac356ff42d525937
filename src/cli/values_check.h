// Elements that are no finite numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/values_stream.h"
#include "layout/index.h"
#include "storage/numbers.h"
#include "storage/storage.h"

namespace shardsmith::cli {

struct NotFinite {
  std::string name;
  Dtype dtype = Dtype::kF32;
  Shape shape;
  Specials found;
};

struct ValuesCheck {
  size_t tensors = 0;  // of floating or complex types; the others can't hold any
  int64_t elements = 0;
  std::vector<NotFinite> not_finite;  // tensors that hold a NaN or an infinity, in the index's order
};

ValuesCheck check_values(const Index& index, Storage& storage, const StreamOptions& options);

}  // namespace shardsmith::cli
