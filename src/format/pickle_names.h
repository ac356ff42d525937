// The names that a pickle may hold, and what each means to us.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "layout/dtype.h"

namespace shardsmith {

enum class PickleName {
  kDict,  // OrderedDict, Counter
  kSize,  // torch.Size: a tuple
  kSet,
  kBytearray,
  kComplex,
  kEncode,  // _codecs.encode(text, 'latin1'): how protocol 2 spells bytes
  kDevice,
  kLayout,  // torch.serialization._get_layout(text)
  kTensorV2,
  kTensorV3,
  kTensorV1,   // torch._utils._rebuild_tensor(storage, offset, size, stride)
  kParameter,  // torch._utils._rebuild_parameter
  kFromType,   // torch._tensor._rebuild_from_type_v2(function, type, args, state)
  kStorage,    // a typed storage class
  kUntyped,    // torch.storage.UntypedStorage
  kDtype,
  kClass,    // torch.Tensor, torch.nn.parameter.Parameter: as arguments only
  kNotHeld,  // legal in torch's files, but not held here: sparse, quantised, meta
};

struct PickleGlobal {
  PickleName name;
  Dtype dtype = Dtype::kU8;  // of a typed storage
};

// Nothing for a name that is not allowed. "module.name" is matched as a whole.
std::optional<PickleGlobal> pickle_global(std::string_view module, std::string_view name);

// "FloatStorage"; empty where torch has no typed storage for it.
std::string_view storage_class(Dtype dtype);

}  // namespace shardsmith
