// Sparse and quantised tensors, and the rest of what torch's weights_only unpickler knows.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/pickle.h"
#include "format/pickle_emit.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using namespace std::string_literals;
using ::testing::HasSubstr;

Error error_of(const std::string& pickle) {
  return thrown([&] { read_pickle(pickle, "file.pt"); });
}

Value opaque(const char* name, std::vector<std::pair<const char*, Value>> fields) {
  Dict dict;
  for (auto& [key, value] : fields) dict.items.emplace_back(Value(key), std::move(value));
  return Value(Opaque{name, {Value(std::move(dict))}});
}

const Value kSize(Tuple{{Value(4), Value(5)}});

struct Parts {
  std::vector<PickledStorage> storages{{"0", 48}, {"1", 24}, {"2", 80}, {"3", 6}, {"4", 32}, {"5", 16}};
  std::vector<PickledTensor> tensors{
      {0, Dtype::kI64, 0, {2, 3}, {3, 1}, false}, {1, Dtype::kF64, 0, {3}, {1}, false},
      {2, Dtype::kI64, 0, {5}, {1}, false},       {3, Dtype::kQI8, 0, {2, 3}, {3, 1}, false},
      {4, Dtype::kF64, 0, {2}, {1}, false},       {5, Dtype::kI64, 0, {2}, {1}, false}};
  std::vector<size_t> order;
  std::string write(const Value& value) { return write_pickle(value, tensors, storages, "w", &order); }
};

TEST(PickleSpecial, SparseTensorsComeBack) {
  const Value indices(TensorRef{0}), values(TensorRef{1}), crow(TensorRef{2});
  for (const Value& coalesced : {Value(true), Value(false), Value()}) {
    const Value coo = opaque("torch.sparse_coo",
                             {{"indices", indices}, {"values", values}, {"size", kSize}, {"is_coalesced", coalesced}});
    const std::string bytes = Parts().write(coo);
    EXPECT_THAT(bytes, HasSubstr("_rebuild_sparse_tensor"));
    EXPECT_EQ(read_pickle(bytes, "r").value, coo);
  }
  for (const char* name : {"torch.sparse_csr", "torch.sparse_bsr", "torch.sparse_csc", "torch.sparse_bsc"}) {
    const bool rows = name[15] == 'r';
    const Value sparse = opaque(name, {{rows ? "crow_indices" : "ccol_indices", Value(TensorRef{0})},
                                       {rows ? "col_indices" : "row_indices", Value(TensorRef{1})},
                                       {"values", Value(TensorRef{2})},
                                       {"size", kSize}});
    EXPECT_EQ(read_pickle(Parts().write(sparse), "r").value, sparse) << name;
  }
}

TEST(PickleSpecial, QuantisedTensorsComeBack) {
  const Value per_tensor = opaque("torch.quantized", {{"data", Value(TensorRef{0})},
                                                      {"qscheme", Value("torch.per_tensor_affine")},
                                                      {"scale", Value(0.25)},
                                                      {"zero_point", Value(-3)}});
  Parts parts;
  Value written = per_tensor;
  written.get_if<Opaque>()->state[0].set("data", Value(TensorRef{3}));
  const Pickled back = read_pickle(parts.write(Value(List{written, written})), "r");
  EXPECT_EQ(back.value, Value(List{per_tensor, per_tensor}));
  EXPECT_EQ(parts.order, (std::vector<size_t>{3}));
  EXPECT_EQ(back.tensors[0].dtype, Dtype::kQI8);
  EXPECT_EQ(back.tensors[0].size, (Shape{2, 3}));

  const auto per_channel = [](size_t data, size_t scales, size_t zeros) {
    return opaque("torch.quantized", {{"data", Value(TensorRef{data})},
                                      {"qscheme", Value("torch.per_channel_affine")},
                                      {"scales", Value(TensorRef{scales})},
                                      {"zero_points", Value(TensorRef{zeros})},
                                      {"axis", Value(0)}});
  };
  EXPECT_EQ(read_pickle(parts.write(per_channel(3, 4, 5)), "r").value, per_channel(2, 0, 1));
  EXPECT_EQ(parts.order, (std::vector<size_t>{4, 5, 3}));
}

TEST(PickleSpecial, QuantisedNumbersWithoutTheirScaleAreNotWritten) {
  const Error e = thrown([] { Parts().write(Value(TensorRef{3})); });
  EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(e.what(), HasSubstr("qint8"));
}

TEST(PickleSpecial, WhatOnlyLooksSpecialIsTagged) {
  for (const Value& value :
       {Value(Opaque{"torch.sparse_coo", {}}), opaque("torch.sparse_coo", {{"indices", Value(TensorRef{0})}}),
        opaque("torch.quantized", {{"data", Value(1)}}), Value(Opaque{"torch.device", {Value(3)}}),
        opaque("torch.quantized", {{"data", Value(TensorRef{0})},
                                   {"qscheme", Value("os.system")},
                                   {"scale", Value(1.0)},
                                   {"zero_point", Value(0)}})})
    EXPECT_EQ(untag(read_pickle(Parts().write(value), "r").value), value);
}

TEST(PickleSpecial, TorchsOwnObjectsAreWrittenAsWhatTheyAre) {
  const Value value(
      List{Value(Opaque{"torch.device", {Value("cuda"), Value(1)}}), Value(Opaque{"torch.device", {Value("cpu")}}),
           Value(Opaque{"torch.layout", {Value("torch.strided")}}), Value(Opaque{"torch.per_tensor_affine", {}}),
           Value(Opaque{"torch.nn.parameter.Parameter", {}})});
  const std::string bytes = write_pickle(value, {}, {}, "w");
  EXPECT_EQ(bytes.find("__shardsmith__"), std::string::npos);
  EXPECT_EQ(read_pickle(bytes, "r").value, value);
}

// collections.Counter({"a": 2}), bytearray(b"x"), complex(1.0, 2.0) as CPython writes them in protocol 2
TEST(PickleSpecial, TheOtherNamesOfWeightsOnlyAreRead) {
  EXPECT_EQ(read_pickle("\x80\x02"
                        "ccollections\nCounter\n}X\x01\0\0\0aK\x02s\x85R."s,
                        "r")
                .value.find("a")
                ->variant(),
            Value(2).variant());
  EXPECT_EQ(read_pickle("\x80\x02"
                        "c__builtin__\nbytearray\nX\x01\0\0\0xX\x07\0\0\0latin-1\x86R."s,
                        "r")
                .value,
            Value(Bytes{"x"}));
  EXPECT_EQ(read_pickle("\x80\x02"
                        "ctorch\nuint7\n."s,
                        "r")
                .value,
            Value(DtypeName{"uint7"}));
  EXPECT_EQ(read_pickle("\x80\x02"
                        "ctorch\nper_channel_affine_float_qparams\n."s,
                        "r")
                .value,
            Value(Opaque{"torch.per_channel_affine_float_qparams", {}}));
  EXPECT_EQ(read_pickle("\x80\x02"
                        "U\x01"
                        "a."s,
                        "r")
                .value,
            Value("a"));
}

std::string storage(std::string_view cls, std::string_view numel) {
  return "(X\x07\0\0\0storagectorch\n"s + std::string(cls) +
         "\nX\x01\0\0\0"
         "0X\x03\0\0\0cpu"s +
         std::string(numel) + "tQ";
}

TEST(PickleSpecial, TensorsOfTheFirstYearsGetTheirState) {
  // torch.FloatTensor.__new__(); state (storage, offset, size, stride)
  const std::string begin =
      "\x80\x02"
      "ctorch\nFloatTensor\n)\x81"s;
  const Pickled tensor =
      read_pickle(begin + "(" + storage("FloatStorage", "K\x06") + "K\x01K\x02\x85K\x02\x85tb."s, "r");
  ASSERT_EQ(tensor.tensors.size(), 1u);
  EXPECT_EQ(tensor.tensors[0].offset, 1);
  EXPECT_EQ(tensor.tensors[0].strides, (Strides{2}));
  EXPECT_THAT(error_of(begin + ".").what(), HasSubstr("without a state"));
  EXPECT_THAT(error_of(begin + "K\x01"
                               "b.")
                  .what(),
              HasSubstr("state"));
  EXPECT_THAT(error_of(begin + "(" + storage("FloatStorage", "K\x06") + "K\x05K\x02\x85K\x02\x85tb."s).what(),
              HasSubstr("leaves"));
}

TEST(PickleSpecial, TensorsOverSeveralRanksAreNamed) {
  for (const std::string name : {"torch.distributed.tensor\nDTensor", "torch.distributed._tensor.api\nDTensor",
                                 "torch.distributed._shard.sharded_tensor.api\nShardedTensor"}) {
    const Error e = error_of(
        "\x80\x02"
        "c"s +
        name + "\n.");
    EXPECT_EQ(e.kind(), ErrorKind::kUnsupported) << name;
    EXPECT_THAT(e.what(), HasSubstr(name.substr(name.find('\n') + 1)));
  }
}

TEST(PickleSpecial, NamesOfDistributedMetadataBelongThereOnly) {
  const std::string metadata =
      "\x80\x02"
      "ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81."s;
  EXPECT_EQ(read_pickle(metadata, "r", {}, PickleNames::kDcp).value,
            Value(Opaque{"torch.distributed.checkpoint.metadata.Metadata", {}}));
  EXPECT_EQ(error_of(metadata).kind(), ErrorKind::kCorrupt);
  const auto dcp_error = [](const std::string& pickle) {
    return thrown([&] { read_pickle("\x80\x02" + pickle, "r", {}, PickleNames::kDcp); });
  };
  EXPECT_THAT(dcp_error("cposix\nsystem\nX\x02\0\0\0ls\x85R."s).what(), HasSubstr("'posix.system'"));
  // getattr is there for one thing only.
  const std::string get = "cbuiltins\ngetattr\n"s;
  EXPECT_EQ(read_pickle(
                "\x80\x02" + get + "ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nX\x01\0\0\0A\x86R."s,
                "r", {}, PickleNames::kDcp)
                .value,
            Value(Opaque{"torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", {Value("A")}}));
  EXPECT_THAT(dcp_error(get + "ctorch.distributed.checkpoint.metadata\nMetadata\nX\x01\0\0\0A\x86R."s).what(),
              HasSubstr("forbidden"));
  EXPECT_THAT(dcp_error(get + "cbuiltins\ngetattr\nX\x01\0\0\0A\x86R."s).what(), HasSubstr("forbidden"));
  EXPECT_THAT(dcp_error(get + "ctorch\nfloat32\nX\x01\0\0\0A\x86R."s).what(), HasSubstr("forbidden"));
}

TEST(PickleSpecial, DamagedSpecialTensorsAreErrors) {
  Parts parts;
  const Value sparse = opaque("torch.sparse_coo", {{"indices", Value(TensorRef{0})},
                                                   {"values", Value(TensorRef{1})},
                                                   {"size", kSize},
                                                   {"is_coalesced", Value(true)}});
  const Value quantised = opaque("torch.quantized", {{"data", Value(TensorRef{3})},
                                                     {"qscheme", Value("torch.per_channel_affine")},
                                                     {"scales", Value(TensorRef{4})},
                                                     {"zero_points", Value(TensorRef{5})},
                                                     {"axis", Value(0)}});
  for (const Value& value : {sparse, quantised}) {
    const std::string good = parts.write(value);
    for (size_t n = 0; n < good.size(); ++n) EXPECT_EQ(error_of(good.substr(0, n)).kind(), ErrorKind::kCorrupt) << n;
    for (size_t at = 0; at < good.size(); ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
        for (const PickleNames names : {PickleNames::kTorch, PickleNames::kDcp, PickleNames::kAny}) {
          try {
            read_pickle(bad, "r", {}, names);
          } catch (const Error&) {  // either is right; a crash or another exception is not
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardsmith
