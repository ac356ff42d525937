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
constexpr std::array<std::string_view, 22> kOtherDtypes{
    "quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16", "float4_e2m1fn_x2",
    "int1",     "int2",     "int3",    "int4",    "int5",    "int6",  "int7",   "uint1",
    "uint2",    "uint3",    "uint4",   "uint5",   "uint6",   "uint7"};

constexpr std::array<std::string_view, 5> kQSchemes{"per_tensor_affine", "per_tensor_symmetric", "per_channel_affine",
                                                    "per_channel_symmetric", "per_channel_affine_float_qparams"};

// torch.FloatTensor, torch.cuda.FloatTensor, torch.sparse.FloatTensor, ...: the classes of torch's first years.
constexpr std::array<std::string_view, 10> kTensorClasses{
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor",
    "IntTensor",   "ShortTensor",  "CharTensor", "ByteTensor",     "BoolTensor"};

// Modules whose tensors lie on several ranks or wrap others: worth a better word than "forbidden".
constexpr std::array<std::string_view, 4> kForeignModules{"torch.distributed.tensor", "torch.distributed._tensor",
                                                          "torch.distributed._shard", "torch.distributed.device_mesh"};

bool is_within(std::string_view module, std::string_view parent) {
  return module.starts_with(parent) && (module.size() == parent.size() || module[parent.size()] == '.');
}

// torch.distributed.checkpoint's own classes, in the homes that they had since torch 1.13.
const std::unordered_map<std::string_view, PickleName>& dcp_names() {
  static const std::unordered_map<std::string_view, PickleName> names{
      {"torch.distributed.checkpoint.metadata.Metadata", PickleName::kObject},
      {"torch.distributed.checkpoint.metadata.TensorStorageMetadata", PickleName::kObject},
      {"torch.distributed.checkpoint.metadata.BytesStorageMetadata", PickleName::kObject},
      {"torch.distributed.checkpoint.metadata.ChunkStorageMetadata", PickleName::kObject},
      {"torch.distributed.checkpoint.metadata.MetadataIndex", PickleName::kObject},
      {"torch.distributed.checkpoint.metadata.StorageMeta", PickleName::kObject},
      {"torch.distributed.checkpoint.metadata.TensorProperties", PickleName::kObject},
      {"torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", PickleName::kObject},
      {"torch.distributed.checkpoint.filesystem._StorageInfo", PickleName::kObject},
      {"torch.distributed._shard.checkpoint.metadata.Metadata", PickleName::kObject},
      {"torch.distributed._shard.checkpoint.metadata.TensorStorageMetadata", PickleName::kObject},
      {"torch.distributed._shard.checkpoint.metadata.BytesStorageMetadata", PickleName::kObject},
      {"torch.distributed._shard.checkpoint.metadata.ChunkStorageMetadata", PickleName::kObject},
      {"torch.distributed._shard.checkpoint.metadata.MetadataIndex", PickleName::kObject},
      {"torch.distributed._shard.checkpoint.filesystem._StorageInfo", PickleName::kObject},
      {"torch.distributed._shard.sharded_tensor.metadata.TensorProperties", PickleName::kObject},
      {"torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING", PickleName::kObject},
      {"pathlib.Path", PickleName::kObject},
      {"pathlib.PosixPath", PickleName::kObject},
      {"pathlib.PurePosixPath", PickleName::kObject},
      {"pathlib.WindowsPath", PickleName::kObject},
      {"pathlib._local.Path", PickleName::kObject},
      {"pathlib._local.PosixPath", PickleName::kObject},
      {"pathlib._local.PurePosixPath", PickleName::kObject},
      {"pathlib._local.WindowsPath", PickleName::kObject},
      {"builtins.getattr", PickleName::kGetattr}};
  return names;
}

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
      {"torch._utils._rebuild_qtensor", PickleName::kQuantized},
      {"torch._utils._rebuild_sparse_tensor", PickleName::kSparse},
      {"torch._utils._rebuild_sparse_csr_tensor", PickleName::kSparse},
      {"torch._utils._rebuild_device_tensor_from_cpu_tensor", PickleName::kFromCpuTensor},
      {"torch._utils._rebuild_meta_tensor_no_storage", PickleName::kNotHeld},
      {"torch._utils._rebuild_nested_tensor", PickleName::kNotHeld},
      {"torch._utils._rebuild_wrapper_subclass", PickleName::kNotHeld},
      {"torch._utils._rebuild_device_tensor_from_numpy", PickleName::kNotHeld},
      {"torch.QUInt4x2Storage", PickleName::kNotHeld},
      {"torch.QUInt2x4Storage", PickleName::kNotHeld}};
  return names;
}

}  // namespace

std::optional<PickleGlobal> pickle_global(std::string_view module, std::string_view name, PickleNames names) {
  const std::string full = std::string(module) + "." + std::string(name);
  if (const auto found = fixed_names().find(full); found != fixed_names().end()) return PickleGlobal{found->second};
  if (names == PickleNames::kDcp)
    if (const auto found = dcp_names().find(full); found != dcp_names().end()) return PickleGlobal{found->second};
  if (module == "torch" || module == "torch.cuda" || module == "torch.storage") {
    for (const StorageClass& c : kStorageClasses)
      if (c.name == name) return PickleGlobal{PickleName::kStorage, c.dtype};
  }
  if (module == "torch") {
    if (dtype_from_torch(name)) return PickleGlobal{PickleName::kDtype};
    for (std::string_view other : kOtherDtypes)
      if (other == name) return PickleGlobal{PickleName::kDtype};
    for (std::string_view scheme : kQSchemes)
      if (scheme == name) return PickleGlobal{PickleName::kQScheme};
  }
  if (module == "torch" || module == "torch.cuda" || module == "torch.sparse" || module == "torch.cuda.sparse") {
    for (std::string_view tensor : kTensorClasses)
      if (tensor == name) return PickleGlobal{PickleName::kClass};
  }
  if (names == PickleNames::kAny) return PickleGlobal{PickleName::kObject};
  if (names == PickleNames::kDcp) return {};
  for (std::string_view foreign : kForeignModules)
    if (is_within(module, foreign)) return PickleGlobal{PickleName::kForeignTensor};
  return {};
}

std::string_view quantized_storage_class(Dtype dtype) {
  if (dtype != Dtype::kQI8 && dtype != Dtype::kQU8 && dtype != Dtype::kQI32) return {};
  for (const StorageClass& c : kStorageClasses)
    if (c.dtype == dtype) return c.name;
  return {};
}

bool is_special_tensor(std::string_view class_name) {
  return class_name == "torch.sparse_coo" || class_name == "torch.sparse_csr" || class_name == "torch.sparse_csc" ||
         class_name == "torch.sparse_bsr" || class_name == "torch.sparse_bsc" || class_name == "torch.quantized";
}

bool is_dcp_enum(std::string_view full_name) {
  return full_name == "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING" ||
         full_name == "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING";
}

std::string_view storage_class(Dtype dtype) {
  if (!quantized_storage_class(dtype).empty()) return {};  // needs a scale and zero point
  for (const StorageClass& c : kStorageClasses)
    if (c.dtype == dtype) return c.name;
  return {};
}

}  // namespace shardsmith
