#include "layout/dtype.h"

#include <array>

namespace shardsmith {
namespace {

struct Row {
  Dtype dtype;
  int64_t size;
  std::string_view torch;
  std::string_view safetensors;
};

// In the order of the enumeration, so that a dtype is its own row number.
constexpr std::array<Row, 24> kRows = {{
    {Dtype::kBool, 1, "bool", "BOOL"},
    {Dtype::kU8, 1, "uint8", "U8"},
    {Dtype::kI8, 1, "int8", "I8"},
    {Dtype::kF8E5M2, 1, "float8_e5m2", "F8_E5M2"},
    {Dtype::kF8E4M3, 1, "float8_e4m3fn", "F8_E4M3"},
    {Dtype::kF8E8M0, 1, "float8_e8m0fnu", "F8_E8M0"},
    {Dtype::kF8E4M3Fnuz, 1, "float8_e4m3fnuz", "F8_E4M3FNUZ"},
    {Dtype::kF8E5M2Fnuz, 1, "float8_e5m2fnuz", "F8_E5M2FNUZ"},
    {Dtype::kI16, 2, "int16", "I16"},
    {Dtype::kU16, 2, "uint16", "U16"},
    {Dtype::kF16, 2, "float16", "F16"},
    {Dtype::kBF16, 2, "bfloat16", "BF16"},
    {Dtype::kI32, 4, "int32", "I32"},
    {Dtype::kU32, 4, "uint32", "U32"},
    {Dtype::kF32, 4, "float32", "F32"},
    {Dtype::kC32, 4, "complex32", ""},
    {Dtype::kC64, 8, "complex64", "C64"},
    {Dtype::kF64, 8, "float64", "F64"},
    {Dtype::kI64, 8, "int64", "I64"},
    {Dtype::kU64, 8, "uint64", "U64"},
    {Dtype::kC128, 16, "complex128", ""},
    {Dtype::kQI8, 1, "qint8", ""},
    {Dtype::kQU8, 1, "quint8", ""},
    {Dtype::kQI32, 4, "qint32", ""},
}};

constexpr bool rows_are_in_order() {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (static_cast<size_t>(kRows[i].dtype) != i) return false;
  }
  return true;
}
static_assert(rows_are_in_order());

const Row& row(Dtype dtype) { return kRows[static_cast<size_t>(dtype)]; }

}  // namespace

int64_t size_of(Dtype dtype) { return row(dtype).size; }

bool is_floating(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF8E5M2:
    case Dtype::kF8E4M3:
    case Dtype::kF8E8M0:
    case Dtype::kF8E4M3Fnuz:
    case Dtype::kF8E5M2Fnuz:
    case Dtype::kF16:
    case Dtype::kBF16:
    case Dtype::kF32:
    case Dtype::kF64:
      return true;
    default:
      return false;
  }
}

std::string_view to_string(Dtype dtype) { return row(dtype).torch; }

std::optional<Dtype> dtype_from_torch(std::string_view name) {
  for (const Row& r : kRows) {
    if (r.torch == name) return r.dtype;
  }
  return std::nullopt;
}

std::string_view safetensors_name(Dtype dtype) { return row(dtype).safetensors; }

std::optional<Dtype> dtype_from_safetensors(std::string_view name) {
  if (name.empty()) return std::nullopt;
  for (const Row& r : kRows) {
    if (r.safetensors == name) return r.dtype;
  }
  return std::nullopt;
}

}  // namespace shardsmith
