// Errors, values, JSON, checksums, peers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cmath>
#include <limits>
#include <random>
#include <thread>

#include "base/checksum.h"
#include "base/error.h"
#include "base/peers.h"
#include "base/utf8.h"
#include "base/value.h"

namespace shardsmith {
namespace {

using ::testing::HasSubstr;

template <typename Call>
Error error_of(const Call& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  return Error(ErrorKind::kInterrupted, "nothing was thrown");
}

TEST(ErrorKinds, HaveTheBlueprintsExitCodes) {
  EXPECT_EQ(exit_code(ErrorKind::kIo), 1);
  EXPECT_EQ(exit_code(ErrorKind::kPeer), 1);
  EXPECT_EQ(exit_code(ErrorKind::kNotFound), 2);
  EXPECT_EQ(exit_code(ErrorKind::kUnsupported), 2);
  EXPECT_EQ(exit_code(ErrorKind::kNoSpace), 3);
  EXPECT_EQ(exit_code(ErrorKind::kMismatch), 4);
  EXPECT_EQ(exit_code(ErrorKind::kCorrupt), 5);
  EXPECT_EQ(exit_code(ErrorKind::kInterrupted), 130);
  EXPECT_EQ(to_string(ErrorKind::kNoSpace), "no_space");
}

TEST(Nearest, FindsATypoAndNothingWhereAllIsFar) {
  const std::vector<std::string> options{"--max-steps", "--save-steps", "--seed"};
  EXPECT_EQ(nearest("--max-setps", options), "--max-steps");
  EXPECT_EQ(nearest("--sede", options), "--seed");
  EXPECT_EQ(nearest("--learning-rate", options), "");
}

TEST(Checksum, EqualsZlibsAndJoins) {
  std::mt19937 random(7);
  for (size_t size : {0, 1, 3, 15, 16, 63, 4096, 70001}) {
    std::vector<std::byte> bytes(size);
    for (auto& b : bytes) b = static_cast<std::byte>(random());
    const auto zlib = static_cast<uint32_t>(::crc32(0, reinterpret_cast<const Bytef*>(bytes.data()), size));
    EXPECT_EQ(crc32(bytes), zlib);
    const size_t cut = size / 3;
    const std::span<const std::byte> all(bytes);
    const uint32_t a = crc32(all.first(cut)), b = crc32(all.subspan(cut));
    EXPECT_EQ(crc32_combine(a, b, size - cut), zlib);
    EXPECT_EQ(crc32(all.subspan(cut), a), zlib);
  }
}

TEST(Checksum, JoinsLengthsBeyondFourGiB) {
  const uint64_t length = (uint64_t{1} << 33) + 12345;
  EXPECT_EQ(crc32_combine(0x12345678, 0x9abcdef0, length),
            static_cast<uint32_t>(::crc32_combine(0x12345678, 0x9abcdef0, static_cast<z_off_t>(length))));
}

TEST(Value, EqualityTellsKindsApart) {
  EXPECT_EQ(Value(1), Value(int64_t{1}));
  EXPECT_FALSE(Value(1) == Value(1.0));
  EXPECT_FALSE(Value(true) == Value(1));
  EXPECT_EQ(Value(std::nan("")), Value(std::nan("")));
  EXPECT_FALSE(Value(0.0) == Value(-0.0));
  EXPECT_EQ(Value(Set{{Value(1), Value(2)}}), Value(Set{{Value(2), Value(1)}}));
  EXPECT_FALSE(Value(List{Value(1)}) == Value(Tuple{{Value(1)}}));
}

TEST(Value, SetReplacesAndFindFinds) {
  Value v;
  v.set("a", Value(1));
  v.set("b", Value(2));
  v.set("a", Value("new"));
  EXPECT_EQ(*v.find("a"), Value("new"));
  EXPECT_EQ(v.find("c"), nullptr);
  EXPECT_EQ(to_json(v), R"({"a":"new","b":2})");
}

TEST(Path, EscapesWhatWouldBeAmbiguous) {
  EXPECT_EQ(path_join(path_join("", "a"), "b"), "a/b");
  EXPECT_EQ(path_join("", "a/b"), "a~1b");
  EXPECT_EQ(path_join("", "a.b"), "a.b");
  EXPECT_EQ(path_join("x", int64_t{3}), "x/#3");
  EXPECT_EQ(path_join("x", "#3"), "x/~23");
  EXPECT_EQ(path_join("", "~1"), "~01");
}

TEST(Json, RoundTripsWhatItCanHold) {
  const std::string text =
      R"({"a":[1,-2,1.5,1e+300,true,null,"x\"\\\n\u0001é"],"big":123456789012345678901234567890,"u":18446744073709551615,"e":{},"l":[],"f":2.0})";
  const Value value = parse_json(text, "test");
  EXPECT_EQ(to_json(value), text);
  EXPECT_EQ(parse_json(to_json(value, 2), "test"), value);
  EXPECT_EQ(*value.find("big"), Value(BigInt{"123456789012345678901234567890"}));
  EXPECT_TRUE(value.find("f")->get_if<double>());
}

TEST(Json, KindsComeBack) {
  Value v;
  v.set("nan", Value(std::nan("")));
  v.set("inf", Value(-std::numeric_limits<double>::infinity()));
  v.set("bytes", Value(Bytes{std::string("\x00\xff", 2)}));
  v.set("complex", Value(Complex{1, -2}));
  v.set("dtype", Value(DtypeName{"bfloat16"}));
  v.set("tensor", Value(TensorRef{3}));
  v.set("object", Value(Opaque{"a.B", {Value(1), Value("x")}}));
  EXPECT_EQ(restore_kinds(parse_json(to_json(v), "test")), v);
}

TEST(Json, DoublesComeBackBitEqual) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 2000; ++i) {
    const double d = std::bit_cast<double>(random());
    if (!std::isfinite(d)) continue;
    EXPECT_EQ(parse_json(to_json(Value(d)), "test"), Value(d));
  }
}

TEST(Json, MistakesNameTheirPlace) {
  for (const char* text : {"", "{", "[1,", "{\"a\" 1}", "nul", "[1]x", "\"\xff\"", "{\"a\":1,}"}) {
    const Error e = error_of([&] { parse_json(text, "file.json"); });
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt) << text;
    EXPECT_THAT(e.what(), HasSubstr("file.json")) << text;
  }
  EXPECT_THAT(error_of([] { parse_json(R"({"a":1,"a":2})", "f"); }).what(), HasSubstr("'a' stands twice"));
}

TEST(Json, DepthIsLimited) {
  const auto nested = [](size_t n) { return std::string(n, '[') + std::string(n, ']'); };
  EXPECT_NO_THROW(parse_json(nested(256), "f"));
  EXPECT_EQ(error_of([&] { parse_json(nested(257), "f"); }).kind(), ErrorKind::kCorrupt);
  EXPECT_EQ(error_of([&] { parse_json(std::string(1000000, '['), "f"); }).kind(), ErrorKind::kCorrupt);
}

TEST(Json, InvalidTextIsReplacedNotWritten) {
  EXPECT_EQ(to_json(Value(std::string("a\xff\xc3"))), "\"a\\ufffd\\ufffd\"");
}

TEST(Utf8, RefusesOverlongFormsAndSurrogates) {
  EXPECT_TRUE(is_utf8("aé€𝄞"));
  EXPECT_FALSE(is_utf8("\xc0\xaf"));
  EXPECT_FALSE(is_utf8("\xe0\x80\x80"));
  EXPECT_FALSE(is_utf8("\xed\xa0\x80"));
  EXPECT_FALSE(is_utf8("\xf4\x90\x80\x80"));
  EXPECT_FALSE(is_utf8("\xe2\x82"));
}

TEST(ThreadPeers, ExchangeInRankOrder) {
  auto peers = make_thread_peers(4);
  std::vector<std::vector<std::string>> got(4);
  std::vector<std::thread> threads;
  for (int r = 0; r < 4; ++r)
    threads.emplace_back([&, r] {
      for (int i = 0; i < 50; ++i) got[r] = peers[r]->exchange(str(r, ":", i), std::chrono::seconds(10));
    });
  for (auto& t : threads) t.join();
  for (int r = 0; r < 4; ++r) EXPECT_EQ(got[r], (std::vector<std::string>{"0:49", "1:49", "2:49", "3:49"}));
}

TEST(ThreadPeers, ALateRankIsNamedInTime) {
  auto peers = make_thread_peers(3);
  std::thread second([&] {
    EXPECT_EQ(error_of([&] { peers[1]->exchange("b", std::chrono::milliseconds(500)); }).kind(), ErrorKind::kTimeout);
  });
  const Error e = error_of([&] { peers[0]->exchange("a", std::chrono::milliseconds(500)); });
  second.join();
  EXPECT_EQ(e.kind(), ErrorKind::kTimeout);
  EXPECT_THAT(e.what(), HasSubstr("rank 2"));
}

TEST(ThreadPeers, ADeadRankIsNamedAtOnce) {
  auto peers = make_thread_peers(2);
  peers[1].reset();
  const Error e = error_of([&] { peers[0]->exchange("a", std::chrono::hours(1)); });
  EXPECT_EQ(e.kind(), ErrorKind::kPeer);
  EXPECT_THAT(e.what(), HasSubstr("rank 1"));
}

}  // namespace
}  // namespace shardsmith
