// Inputs made to do harm: the fuzzers' kept corpus, inputs that once broke something among them, replayed; and attacks
// that are easiest to write down here. Files for the verbs: tests/hostile/make.py.
#include <gtest/gtest.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>

#include "format/pickle.h"
#include "support.h"

namespace shardsmith {
namespace {

namespace fs = std::filesystem;

TEST(Hostile, EveryInputOfTheFuzzersCorpusIsReadOrRefused) {
  const fs::path corpus = fs::path(SHARDSMITH_SOURCE_DIR) / "fuzz" / "corpus";
  size_t inputs = 0;
  std::set<std::string> names;
  for (const fuzz::Target& target : fuzz::targets()) {
    ASSERT_TRUE(names.insert(target.name).second);
    ASSERT_TRUE(fs::is_directory(corpus / target.name)) << target.name << " has no corpus";
    for (const auto& entry : fs::directory_iterator(corpus / target.name)) {
      SCOPED_TRACE(entry.path().string());
      std::ifstream in(entry.path(), std::ios::binary);
      const std::string bytes{std::istreambuf_iterator<char>(in), {}};
      target.run(bytes);  // ends the process where something is wrong
      ++inputs;
    }
  }
  EXPECT_GE(names.size(), 12u);
  EXPECT_GE(inputs, 100u);
  std::cout << inputs << " inputs of " << names.size() << " readers\n";
}

Error refused(const std::string& pickle, PickleNames names = PickleNames::kTorch) {
  try {
    read_pickle("\x80\x02" + pickle + ".", "f", {}, names);
  } catch (const Error& e) {
    return e;
  }
  return Error(ErrorKind::kInterrupted, "nothing was thrown");
}

TEST(Hostile, AFewBytesDontBecomeAGigabyte) {
  std::string laughs = "]";
  for (char i = 0; i < 60; ++i) {
    laughs += std::string("q") + i + "](";
    for (int k = 0; k < 10; ++k) laughs += std::string("h") + i;
    laughs += "e";
  }
  EXPECT_NE(std::string(refused(laughs).what()).find("multiply to more than 10"), std::string::npos);
}

std::string text(const std::string& words) {
  return "X" + std::string(1, static_cast<char>(words.size())) + std::string(3, '\0') + words;
}

TEST(Hostile, ALongListIsNotCopiedAgainAndAgain) {
  const std::string list = "](" + std::string(200'000, 'N') + "eq\x01";
  // BUILD with a state whose first part is that list, on a tensor.
  const std::string storage = "(" + text("storage") + "ctorch\nFloatStorage\n" + text("0") + text("cpu") + "K\x01tQ";
  std::string states = list + "ctorch._utils\n_rebuild_tensor\n(" + storage + std::string("K\0(K\x01t(K\x01ttR", 12);
  for (int i = 0; i < 40'000; ++i) states += "(h\x01NNNtb";
  // A call of that list, where only names are asked for.
  std::string calls = list + "0";
  for (int i = 0; i < 40'000; ++i) calls += "h\x01)R0";
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(read_pickle("\x80\x02" + states + ".", "f").tensors.size(), 1u);
  read_pickle("\x80\x02" + calls + "N.", "f", {}, PickleNames::kAny);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(Hostile, AnIntegerInMoreBytesThanItNeedsIsThatInteger) {
  const auto integer = [](const std::string& bytes) {
    return read_pickle(std::string("\x80\x02\x8a") + static_cast<char>(bytes.size()) + bytes + ".", "f").value;
  };
  EXPECT_EQ(integer(std::string("\x05") + std::string(20, '\0')), Value(5));
  EXPECT_EQ(integer(std::string("\xfe") + std::string(20, '\xff')), Value(-2));
  EXPECT_EQ(integer(std::string(21, '\0')), Value(0));
  EXPECT_EQ(integer(std::string(21, '\xff')), Value(-1));
  EXPECT_EQ(integer(std::string("\xff") + std::string(8, '\0')), Value(255));
  EXPECT_TRUE(integer(std::string(8, '\xff') + std::string(1, '\0')).get_if<BigInt>());
}

TEST(Hostile, StridesOfAnEmptyTensorDontOverflow) {
  const Strides strides = contiguous_strides({0, INT64_MAX, INT64_MAX});
  EXPECT_EQ(strides, (Strides{INT64_MAX, INT64_MAX, 1}));
}

TEST(Hostile, AShapeThatCantBeCountedIsSaidWithItsTensor) {
  Index index;
  index.files.push_back({"some.file", 8, nullptr});
  TensorEntry tensor;
  tensor.name = "big";
  tensor.shape = {int64_t{1} << 62, int64_t{1} << 62};
  tensor.slices.push_back({.box = {{0, 0}, {1, 1}}, .strides = {1, 1}});
  index.tensors.push_back(tensor);
  try {
    validate(index);
    FAIL();
  } catch (const Error& e) {
    const std::string text = e.what();
    EXPECT_NE(text.find("some.file"), std::string::npos) << text;
    EXPECT_NE(text.find("'big'"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace shardsmith
