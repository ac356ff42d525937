// Pickles as data: an interpreter that builds plain values and tensors' descriptions and calls nothing.
//
// It knows the opcodes of protocols 2 to 5 and the names in docs/formats/pt.md. A name that is not among them is an
// error that tells it, at the moment it is met.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/value.h"
#include "layout/box.h"
#include "layout/dtype.h"

namespace shardsmith {

struct PickledStorage {
  std::string key;     // its record is data/{key}
  uint64_t bytes = 0;  // as declared; the reader of the container compares
};

struct PickledTensor {
  size_t storage = 0;  // which of Pickled::storages
  Dtype dtype = Dtype::kF32;
  int64_t offset = 0;  // elements
  Shape size;
  Strides strides;
  bool requires_grad = false;
};

struct Pickled {
  Value value;  // TensorRef::index counts in `tensors`; one that stands at several places has one index
  std::vector<PickledTensor> tensors;
  std::vector<PickledStorage> storages;
};

struct PickleLimits {
  uint64_t objects = 16 << 20;  // made while reading, and in the result: references can multiply
  size_t depth = 200;
};

// `where` begins every error's text. Throws kCorrupt, and kUnsupported for what is legal but not held
// here (sparse and quantised tensors, ...). Every tensor lies inside of its storage's declared bytes.
Pickled read_pickle(std::string_view bytes, std::string_view where, const PickleLimits& limits = {});

// Protocol 2, within what torch's weights_only unpickler accepts; storages get the keys "0", "1", ... in order.
// `order` gets the tensors' numbers as they stand in the pickle, each once; read_pickle will number them so.
// What torch refuses becomes {"__shardsmith__": kind, ...}: see docs/formats/pt.md.
std::string write_pickle(const Value& value, std::span<const PickledTensor> tensors,
                         std::span<const PickledStorage> storages, std::string_view where,
                         std::vector<size_t>* order = nullptr);

// The tagged dicts of write_pickle back into what they stood for.
Value untag(Value value);

}  // namespace shardsmith
