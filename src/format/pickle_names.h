// The names that a pickle may hold, and what each means to us.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "format/pickle.h"
#include "layout/dtype.h"

namespace shardsmith {

enum class PickleName : uint8_t {
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
  kClass,          // torch.Tensor, torch.nn.parameter.Parameter, torch.FloatTensor, ...
  kQScheme,        // torch.per_tensor_affine, ...
  kSparse,         // torch._utils._rebuild_sparse_tensor(layout, parts)
  kQuantized,      // torch._utils._rebuild_qtensor
  kFromCpuTensor,  // torch._utils._rebuild_device_tensor_from_cpu_tensor
  kNotHeld,        // legal in torch's files, but not held here: meta, nested, packed four-bit numbers
  kForeignTensor,  // a tensor that is spread over ranks (DTensor, ShardedTensor) or made of others
  kObject,         // a class that is known by name only
  kGetattr,        // builtins.getattr, which some versions of Python write for an enumeration
};

struct PickleGlobal {
  PickleName name;
  Dtype dtype = Dtype::kU8;  // of a typed storage
};

// Nothing for a name that is not allowed. "module.name" is matched as a whole.
std::optional<PickleGlobal> pickle_global(std::string_view module, std::string_view name,
                                          PickleNames names = PickleNames::kTorch);

// "FloatStorage"; empty where torch has no typed storage for it, or one for quantised tensors only.
std::string_view storage_class(Dtype dtype);
// "QInt8Storage"; empty for the others.
std::string_view quantized_storage_class(Dtype dtype);
// The enumeration that builtins.getattr may be asked about.
bool is_dcp_enum(std::string_view full_name);

}  // namespace shardsmith
