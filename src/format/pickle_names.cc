#include "format/pickle_names.h"

#include <array>
#include <unordered_map>

namespace shardsmith {
namespace {

struct StorageClass {
  std::string_view name;
  Dtype dtype;
};
constexpr std::array<StorageClass, 15> kStorageClasses{{{"DoubleStorage", Dtype::kF64},
                                                        {"FloatStorage", Dtype::kF32},
                                                        {"HalfStorage", Dtype::kF16},
                                                        {"BFloat16Storage", Dtype::kBF16},
                                                        {"LongStorage", Dtype::kI64},
                                                        {"IntStorage", Dtype::kI32},
                                                        {"ShortStorage", Dtype::kI16},
                                                        {"CharStorage", Dtype::kI8},
                                                        {"ByteStorage", Dtype::kU8},
                                                        {"BoolStorage", Dtype::kBool},
                                                        {"ComplexDoubleStorage", Dtype::kC128},
                                                        {"ComplexFloatStorage", Dtype::kC64},
                                                        {"QInt8Storage", Dtype::kQI8},
                                                        {"QUInt8Storage", Dtype::kQU8},
                                                        {"QInt32Storage", Dtype::kQI32}}};

// torch.X that are dtypes without an element type of ours: known as names only.
constexpr std::array<std::string_view, 16> kOtherDtypes{
    "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2",
    "int1",     "int2",     "int3",    "int4",    "uint1",   "uint2", "uint3",  "uint4"};

const std::unordered_map<std::string_view, PickleName>& fixed_names() {
  static const std::unordered_map<std::string_view, PickleName> names{
      {"collections.OrderedDict", PickleName::kDict},
      {"collections.Counter", PickleName::kDict},
      {"torch.Size", PickleName::kSize},
      {"torch.Tensor", PickleName::kClass},
      {"torch.nn.parameter.Parameter", PickleName::kClass},
      {"torch.device", PickleName::kDevice},
      {"torch.serialization._get_layout", PickleName::kLayout},
      {"_codecs.encode", PickleName::kEncode},
      {"builtins.set", PickleName::kSet},
      {"__builtin__.set", PickleName::kSet},
      {"builtins.bytearray", PickleName::kBytearray},
      {"__builtin__.bytearray", PickleName::kBytearray},
      {"builtins.complex", PickleName::kComplex},
      {"__builtin__.complex", PickleName::kComplex},
      {"torch._utils._rebuild_tensor", PickleName::kTensorV1},
      {"torch._utils._rebuild_tensor_v2", PickleName::kTensorV2},
      {"torch._utils._rebuild_tensor_v3", PickleName::kTensorV3},
      {"torch._utils._rebuild_parameter", PickleName::kParameter},
      {"torch._utils._rebuild_parameter_with_state", PickleName::kParameter},
      {"torch._tensor._rebuild_from_type_v2", PickleName::kFromType},
      {"torch.storage.UntypedStorage", PickleName::kUntyped},
      {"torch.UntypedStorage", PickleName::kUntyped},
      {"torch._utils._rebuild_qtensor", PickleName::kNotHeld},
      {"torch._utils._rebuild_sparse_tensor", PickleName::kNotHeld},
      {"torch._utils._rebuild_sparse_csr_tensor", PickleName::kNotHeld},
      {"torch._utils._rebuild_meta_tensor_no_storage", PickleName::kNotHeld},
      {"torch._utils._rebuild_wrapper_subclass", PickleName::kNotHeld},
      {"torch._utils._rebuild_device_tensor_from_numpy", PickleName::kNotHeld},
      {"torch._utils._rebuild_device_tensor_from_cpu_tensor", PickleName::kNotHeld}};
  return names;
}

}  // namespace

std::optional<PickleGlobal> pickle_global(std::string_view module, std::string_view name) {
  const std::string full = std::string(module) + "." + std::string(name);
  if (const auto found = fixed_names().find(full); found != fixed_names().end()) return PickleGlobal{found->second};
  if (module == "torch" || module == "torch.cuda" || module == "torch.storage") {
    for (const StorageClass& c : kStorageClasses)
      if (c.name == name) return PickleGlobal{PickleName::kStorage, c.dtype};
  }
  if (module == "torch") {
    if (dtype_from_torch(name)) return PickleGlobal{PickleName::kDtype};
    for (std::string_view other : kOtherDtypes)
      if (other == name) return PickleGlobal{PickleName::kDtype};
  }
  return {};
}

std::string_view storage_class(Dtype dtype) {
  if (dtype == Dtype::kQI8 || dtype == Dtype::kQU8 || dtype == Dtype::kQI32) return {};  // need a scale and zero point
  for (const StorageClass& c : kStorageClasses)
    if (c.dtype == dtype) return c.name;
  return {};
}

}  // namespace shardsmith
