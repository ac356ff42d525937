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

#include "base/error.h"
#include "base/value.h"
#include "layout/box.h"
#include "layout/dtype.h"

namespace shardsmith {

struct PickledStorage {
  std::string key;      // its record is data/{key}
  uint64_t bytes = 0;   // as declared; the reader of the container compares
  int64_t element = 1;  // bytes of the unit in which its size was declared
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

// Tensors that are more than numbers at strides stand in a Value as an Opaque whose state is one Dict, and write_pickle
// turns these back into what torch builds again (anything else in them: an Opaque like any other):
//
//   "torch.sparse_coo"                      {"indices": tensor, "values": tensor, "size": tuple, "is_coalesced": bool
//   or
//                                           None (a file that doesn't say)}
//   "torch.sparse_csr", "torch.sparse_bsr"  {"crow_indices": tensor, "col_indices": tensor, "values": tensor, "size":
//   tuple} "torch.sparse_csc", "torch.sparse_bsc"  {"ccol_indices": tensor, "row_indices": tensor, "values": tensor,
//   "size": tuple} "torch.quantized"                       {"data": tensor of qint8, quint8 or qint32, "qscheme": text,
//   and
//                                            "scale": float, "zero_point": int          (torch.per_tensor_affine)
//                                            or "scales", "zero_points": tensors or lists, "axis": int  (per channel)}
//
// In an Index these tensors are named after the key, `{name}/indices`; a quantised one's "data" has the name itself.
// Other Opaques of torch's own that are written as what they are: "torch.device" (its arguments), "torch.layout" (its
// name), and without state the quantisation schemes and tensor classes.
bool is_special_tensor(std::string_view class_name);  // one of the above names

// Which names a pickle may hold.
enum class PickleNames {
  kTorch,  // what torch's weights_only unpickler knows
  kDcp,    // that, and the classes of torch.distributed.checkpoint's metadata: Opaques of [arguments..., state]
  kAny,    // every name: unknown ones become Opaques of [arguments..., state]. Still nothing is called
};

struct PickleLimits {
  uint64_t objects = 16 << 20;  // made while reading, and in the result: references can multiply
  size_t depth = 200;
};

// The pickle is longer than the bytes that were given.
class PickleTruncated : public Error {
 public:
  using Error::Error;
};

// `where` begins every error's text. Throws kCorrupt, and kUnsupported for what is legal but not held
// here (meta tensors, wrapper subclasses, ...). Every tensor lies inside of its storage's declared bytes.
// Python attributes of tensors and dicts are not held. `used` gets the pickle's length.
Pickled read_pickle(std::string_view bytes, std::string_view where, const PickleLimits& limits = {},
                    PickleNames names = PickleNames::kTorch, size_t* used = nullptr);

// Protocol 2, within what torch's weights_only unpickler accepts; storages get the keys "0", "1", ... in order.
// `order` gets the tensors' numbers as they stand in the pickle, each once; read_pickle will number them so.
// What torch refuses becomes {"__shardsmith__": kind, ...}: see docs/formats/pt.md.
std::string write_pickle(const Value& value, std::span<const PickledTensor> tensors,
                         std::span<const PickledStorage> storages, std::string_view where,
                         std::vector<size_t>* order = nullptr);

// The tagged dicts of write_pickle back into what they stood for.
Value untag(Value value);

}  // namespace shardsmith
