// Pickles as data: round trips, every forbidden thing, and hostile input.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "format/bytes.h"
#include "format/pickle.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using namespace std::string_literals;
using ::testing::HasSubstr;

Value round_trip(const Value& value) { return untag(read_pickle(write_pickle(value, {}, {}, "w"), "r").value); }

Error error_of(const std::string& pickle, const PickleLimits& limits = {}) {
  return thrown([&] { read_pickle(pickle, "file.pt", limits); });
}

TEST(Pickle, PlainValuesComeBack) {
  Dict dict;
  dict.items.emplace_back(Value("text"), Value("é \n"));
  dict.items.emplace_back(Value(3), Value(Tuple{{Value(1), Value(2.5), Value(), Value(true)}}));
  dict.items.emplace_back(Value(Tuple{{Value(1), Value("x")}}), Value(List{Value(false)}));
  dict.items.emplace_back(Value("bytes"), Value(Bytes{"\x00\x7f\x80\xff"s}));
  dict.items.emplace_back(Value("set"), Value(Set{{Value(1), Value("a")}}));
  dict.items.emplace_back(Value("empty"),
                          Value(List{Value(List{}), Value(Dict{}), Value(Tuple{}), Value(Set{}), Value("")}));
  dict.items.emplace_back(Value("complex"), Value(Complex{1.5, -0.0}));
  dict.items.emplace_back(Value("dtype"), Value(DtypeName{"bfloat16"}));
  dict.items.emplace_back(Value("pairs"), Value(List{Value(Tuple{{Value(1)}}), Value(Tuple{{Value(1), Value(2)}}),
                                                     Value(Tuple{{Value(1), Value(2), Value(3)}})}));
  const Value value(std::move(dict));
  EXPECT_EQ(round_trip(value), value);
}

TEST(Pickle, IntegersOfEverySizeComeBack) {
  for (int64_t v :
       {int64_t{0}, int64_t{-1}, int64_t{255}, int64_t{256}, int64_t{65535}, int64_t{65536}, int64_t{INT32_MIN},
        int64_t{INT32_MAX}, int64_t{INT32_MAX} + 1, int64_t{INT32_MIN} - 1, INT64_MIN, INT64_MAX})
    EXPECT_EQ(round_trip(Value(v)), Value(v)) << v;
  for (const std::string digits : {"9223372036854775808", "-9223372036854775809", "18446744073709551616",
                                   "-340282366920938463463374607431768211456", "123456789012345678901234567890"})
    EXPECT_EQ(round_trip(Value(BigInt{digits})), Value(BigInt{digits})) << digits;
  const Value huge(BigInt{"-" + std::string(3000, '7')});  // more than torch's opcode holds: tagged
  EXPECT_EQ(round_trip(huge), huge);
}

TEST(Pickle, DoublesComeBackBitEqual) {
  for (double v : {0.0, -0.0, 1e-310, std::nan(""), std::numeric_limits<double>::infinity(), -1.25})
    EXPECT_EQ(round_trip(Value(v)), Value(v));
}

TEST(Pickle, WhatTorchRefusesIsTaggedAndComesBack) {
  Dict inner;
  inner.items.emplace_back(Value("__shardsmith__"), Value("object"));  // a user's own key of that name
  inner.items.emplace_back(Value("class"), Value("x"));
  inner.items.emplace_back(Value("state"), Value(List{}));
  const Value value(List{Value(Opaque{"pathlib.PosixPath", {Value("a"), Value(Opaque{"b.C", {}})}}),
                         Value(std::move(inner)), Value(Set{{Value(Opaque{"d.E", {}})}}), Value(DtypeName{"no_such"})});
  EXPECT_EQ(round_trip(value), value);
}

TEST(Pickle, TextThatIsNoUtf8IsRefusedByTheWriter) {
  EXPECT_EQ(thrown([] { write_pickle(Value("\xff"s), {}, {}, "w"); }).kind(), ErrorKind::kInvalidArgument);
}

TEST(Pickle, TensorsKeepStorageViewAndIdentity) {
  const std::vector<PickledStorage> storages{{"0", 48}, {"1", 6}, {"2", 8}};
  const std::vector<PickledTensor> tensors{{0, Dtype::kF32, 0, {3, 4}, {4, 1}, true},
                                           {0, Dtype::kF32, 2, {4, 2}, {1, 4}, false},
                                           {1, Dtype::kF8E4M3, 1, {5}, {1}, false},
                                           {2, Dtype::kI64, 0, {}, {}, false}};
  const Value value(
      List{Value(TensorRef{1}), Value(TensorRef{0}), Value(TensorRef{1}), Value(TensorRef{2}), Value(TensorRef{3})});
  std::vector<size_t> order;
  const Pickled back = read_pickle(write_pickle(value, tensors, storages, "w", &order), "r");
  EXPECT_EQ(order, (std::vector<size_t>{1, 0, 2, 3}));
  EXPECT_EQ(back.value, Value(List{Value(TensorRef{0}), Value(TensorRef{1}), Value(TensorRef{0}), Value(TensorRef{2}),
                                   Value(TensorRef{3})}));
  ASSERT_EQ(back.tensors.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const PickledTensor &found = back.tensors[i], &expected = tensors[order[i]];
    EXPECT_EQ(back.storages[found.storage].key, storages[expected.storage].key);
    EXPECT_EQ(back.storages[found.storage].bytes, storages[expected.storage].bytes);
    EXPECT_EQ(found.dtype, expected.dtype);
    EXPECT_EQ(found.offset, expected.offset);
    EXPECT_EQ(found.size, expected.size);
    EXPECT_EQ(found.strides, expected.strides);
    EXPECT_EQ(found.requires_grad, expected.requires_grad);
  }
}

TEST(Pickle, ViewsOfSeveralTypesUseAnUntypedStorage) {
  const std::vector<PickledStorage> storages{{"0", 16}};
  const std::vector<PickledTensor> tensors{{0, Dtype::kF32, 0, {4}, {1}, false}, {0, Dtype::kI32, 1, {3}, {1}, false}};
  const std::string bytes = write_pickle(Value(List{Value(TensorRef{0}), Value(TensorRef{1})}), tensors, storages, "w");
  EXPECT_THAT(bytes, HasSubstr("UntypedStorage"));
  const Pickled back = read_pickle(bytes, "r");
  EXPECT_EQ(back.tensors[0].dtype, Dtype::kF32);
  EXPECT_EQ(back.tensors[1].dtype, Dtype::kI32);
}

TEST(Pickle, ForbiddenNamesAreToldAndNothingRuns) {
  const struct {
    std::string pickle, name;
  } cases[] = {
      {"\x80\x02"
       "cos\nsystem\nX\x04\0\0\0true\x85R."s,
       "os.system"},
      {"\x80\x02"
       "cbuiltins\neval\nX\x01\0\0\0"
       "1\x85R."s,
       "builtins.eval"},
      {"\x80\x02"
       "c__builtin__\nexec\n."s,
       "__builtin__.exec"},
      {"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."s, "posix.system"},
      {"\x80\x04\x95\x0f\0\0\0\0\0\0\0\x8c\x02os\x94\x8c\x05popen\x94\x93."s, "os.popen"},
      {"\x80\x02(ios\nsystem\n."s, "os.system"},
      {"\x80\x02"
       "ctorch._utils\n_rebuild_tensor_v2.__globals__\n."s,
       "torch._utils._rebuild_tensor_v2.__globals__"},
      {"\x80\x02"
       "ctorch\nload\nX\x01\0\0\0x\x85R."s,
       "torch.load"},
      {"\x80\x02"
       "cnumpy.core.multiarray\n_reconstruct\n."s,
       "numpy.core.multiarray._reconstruct"},
      // nested: a call as the argument of an allowed one
      {"\x80\x02"
       "ccollections\nOrderedDict\ncsubprocess\nPopen\nX\x01\0\0\0x\x85R\x85R."s,
       "subprocess.Popen"},
  };
  for (const auto& c : cases) {
    const Error e = error_of(c.pickle);
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt) << c.name;
    EXPECT_THAT(e.what(), HasSubstr("'" + c.name + "'"));
    EXPECT_THAT(e.what(), HasSubstr("file.pt"));
    EXPECT_THAT(e.what(), HasSubstr("forbidden"));
  }
}

TEST(Pickle, CallsOfSomethingThatIsNoFunctionAreRefused) {
  // The result of an allowed call, a text, a dtype, a storage class, called again.
  for (const std::string& pickle : {"\x80\x02"
                                    "ccollections\nOrderedDict\n)R)R."s,
                                    "\x80\x02X\x01\0\0\0x)R."s,
                                    "\x80\x02"
                                    "ctorch\nfloat32\n)R."s,
                                    "\x80\x02"
                                    "ctorch\nFloatStorage\n)R."s,
                                    "\x80\x02"
                                    "ctorch\nTensor\n)\x81."s})
    EXPECT_EQ(error_of(pickle).kind(), ErrorKind::kCorrupt);
}

TEST(Pickle, TensorsWithoutDataAreNotHeld) {
  const Error e = error_of(
      "\x80\x02"
      "ctorch._utils\n_rebuild_meta_tensor_no_storage\n)R."s);
  EXPECT_EQ(e.kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(e.what(), HasSubstr("_rebuild_meta_tensor_no_storage"));
}

std::string tensor_pickle(const std::string& numel, const std::string& offset, const std::string& size,
                          const std::string& stride) {
  return "\x80\x02"
         "ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0"
         "0X\x03\0\0\0cpu"s +
         numel + "tQ" + offset + size + stride +
         "\x89"
         "ccollections\nOrderedDict\n)RtR."s;
}
std::string i8(int64_t v) {
  std::string out = "\x8a\x08";
  put_le(out, static_cast<uint64_t>(v));
  return out;
}

TEST(Pickle, TensorsThatLeaveTheirStorageAreRefused) {
  EXPECT_EQ(
      read_pickle(tensor_pickle(i8(6), i8(0), i8(2) + i8(3) + "\x86", i8(3) + i8(1) + "\x86"), "r").tensors.size(), 1u);
  const struct {
    int64_t numel, offset, rows, columns, stride;
  } cases[] = {{6, 1, 2, 3, 3},
               {5, 0, 2, 3, 3},
               {6, -1, 2, 3, 3},
               {6, 0, -2, 3, 3},
               {6, 0, 2, 3, -3},
               {-6, 0, 2, 3, 3},
               {6, 0, INT64_MAX, 3, 0},
               {6, INT64_MAX, 2, 3, 3},
               {6, 0, 2, 3, INT64_MAX},
               {INT64_MAX, 0, 2, 3, 3},
               {6, 0, 1 << 30, 1 << 30, 0},
               {6, 0, 2, 3, INT64_MAX / 2}};
  for (const auto& c : cases) {
    const Error e = error_of(
        tensor_pickle(i8(c.numel), i8(c.offset), i8(c.rows) + i8(c.columns) + "\x86", i8(c.stride) + i8(1) + "\x86"));
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt) << c.numel << " " << c.offset << " " << c.rows << " " << c.stride;
  }
}

TEST(Pickle, EveryPrefixAndEveryFlippedByteEndsInTime) {
  const std::vector<PickledStorage> storages{{"0", 24}};
  const std::vector<PickledTensor> tensors{{0, Dtype::kF32, 0, {2, 3}, {3, 1}, false}};
  Value value;
  value.set("weight", Value(TensorRef{0}));
  value.set("list", Value(List{Value(1), Value(2.0), Value(Bytes{"\xff"}), Value(Set{{Value(7)}})}));
  const std::string good = write_pickle(value, tensors, storages, "w");
  for (size_t n = 0; n < good.size(); ++n) EXPECT_EQ(error_of(good.substr(0, n)).kind(), ErrorKind::kCorrupt) << n;
  for (size_t at = 0; at < good.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bad = good;
      bad[at] = static_cast<char>(bad[at] ^ (1 << bit));
      try {
        read_pickle(bad, "r");
      } catch (const Error&) {  // either is right; a crash or another exception is not
      }
    }
  }
}

TEST(Pickle, RandomBytesEndInTime) {
  std::mt19937 random(9);
  const std::string opcodes =
      "(.012GJKMNQRTUXabcd}ehijl]qrst)uBC\x80\x81\x85\x86\x87\x88\x89\x8a\x8b\x8c\x8d\x8e\x8f\x90\x91\x92\x93\x94\x95\x96"s;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = "\x80\x02";
    const size_t n = random() % 60;
    for (size_t i = 0; i < n; ++i)
      bytes += random() % 4 ? opcodes[random() % opcodes.size()] : static_cast<char>(random() % 8);
    bytes += '.';
    try {
      read_pickle(bytes, "r", {10000, 50});
    } catch (const Error&) {
    }
  }
}

TEST(Pickle, BombsAreStopped) {
  const PickleLimits limits{100000, 200};
  // A list of two times the list before: 2^60 elements.
  std::string laughs = "\x80\x02]q\0"s;
  for (char i = 1; i < 60; ++i) laughs += "](h"s + static_cast<char>(i - 1) + "h" + static_cast<char>(i - 1) + "eq" + i;
  EXPECT_THAT(error_of(laughs + ".", limits).what(), HasSubstr("multiply"));
  // A list inside of itself.
  EXPECT_THAT(error_of("\x80\x02]q\0h\0a."s, limits).what(), HasSubstr("inside of itself"));
  // Depth.
  EXPECT_THAT(
      error_of("\x80\x02" + std::string(100000 / 2, ']') + std::string(100000 / 2 - 1, 'a') + ".", limits).what(),
      HasSubstr("nested"));
  // Many objects.
  EXPECT_THAT(error_of("\x80\x02(" + std::string(200000, ']') + "l.", limits).what(), HasSubstr("objects"));
  // A set made again and again from one large tuple.
  std::string copies = "\x80\x02(" + std::string(50000, 'N') +
                       "t\x85q\0"
                       "c__builtin__\nset\nq\1"s;
  for (int i = 0; i < 5000; ++i) copies += "h\1h\0R"s;
  EXPECT_THAT(error_of(copies + ".", limits).what(), HasSubstr("copies"));
  // Lengths that are not there.
  for (const std::string& op : {"X\xff\xff\xff\xff"s, "\x8d\xff\xff\xff\xff\xff\xff\xff\xff"s,
                                "\x8e\xff\xff\xff\xff\xff\xff\xff\x7f"s, "\x8b\xff\xff\xff\x7f"s, "B\xff\xff\xff\xff"s})
    EXPECT_THAT(error_of("\x80\x02" + op + "x.").what(), HasSubstr("truncated"));
}

TEST(Pickle, ProtocolFourAndFiveAreUnderstood) {
  // pickle.dumps({"a": (1, b"x", {2}, frozenset([3])), "b": b"yz" (5: a bytearray), "n": -2**70}, protocol)
  Value expected;
  expected.set("a", Value(Tuple{{Value(1), Value(Bytes{"x"}), Value(Set{{Value(2)}}), Value(Set{{Value(3)}})}}));
  expected.set("b", Value(Bytes{"yz"}));
  expected.set("n", Value(BigInt{"-1180591620717411303424"}));
  for (
      const std::string& pickle :
      {"\200\004\225\065\000\000\000\000\000\000\000\175\224\050\214\001\141\224\050\113\001\103\001\170\224\217\224\050\113\002\220\050\113\003\221\224\164\224\214\001\142\224\103\002\171\172\224\214\001\156\224\212\011\000\000\000\000\000\000\000\000\300\165\056"s,
       "\200\005\225\074\000\000\000\000\000\000\000\175\224\050\214\001\141\224\050\113\001\103\001\170\224\217\224\050\113\002\220\050\113\003\221\224\164\224\214\001\142\224\226\002\000\000\000\000\000\000\000\171\172\224\214\001\156\224\212\011\000\000\000\000\000\000\000\000\300\165\056"s})
    EXPECT_EQ(read_pickle(pickle, "r").value, expected);
}

TEST(Pickle, KeysThatStandTwiceAreRefused) {
  EXPECT_THAT(error_of("\x80\x02}(X\x01\0\0\0aK\x01X\x01\0\0\0aK\x02u."s).what(), HasSubstr("'a' stands twice"));
}

}  // namespace
}  // namespace shardsmith
