// Files of torch before 1.6, made by hand: what today's torch no longer writes (views of storages) and damage. Files
// that today's torch writes with _use_new_zipfile_serialization=False: tests/python/test_formats_pt.py.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/bare_pickle.h"
#include "format/bytes.h"
#include "format/detect.h"
#include "format/pickle_emit.h"
#include "format/pt.h"
#include "test_files.h"

namespace shardsmith {
namespace {

using ::testing::HasSubstr;
using namespace std::string_literals;

constexpr std::string_view kMagic("\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15);
constexpr std::string_view kVersion("\x80\x02M\xe9\x03.", 6);

// ("storage", torch.FloatStorage, key, "cpu", numel, view)
void put_storage(PickleEmitter& out, const std::string& key, int64_t numel, std::string_view view_key = "",
                 int64_t offset = 0, int64_t count = 0) {
  out.put("(");
  out.put_text("storage");
  out.put_global("torch", "FloatStorage");
  out.put_text(key);
  out.put_text("cpu");
  out.put_integer(numel);
  if (view_key.empty()) {
    out.put("N");
  } else {
    out.put_text(std::string(view_key));
    out.put_integer(offset);
    out.put_integer(count);
    out.put("\x87");
  }
  out.put("tQ");
}

struct LegacyFile {
  LegacyFile() { object.put("\x80\x02}("); }

  void tensor(const std::string& name, int64_t count, int64_t first,
              const std::function<void(PickleEmitter&)>& storage) {
    object.put_text(name);
    object.put_global("torch._utils", "_rebuild_tensor_v2");
    object.put("(");
    storage(object);
    object.put_integer(first);
    object.put_integers({count});
    object.put_integers({1});
    object.put("\x89");
    object.put_global("collections", "OrderedDict");
    object.put(")RtR");
  }
  std::string bytes(const std::vector<std::pair<std::string, std::vector<float>>>& storages,
                    const std::string& info = "\x80\x02}.") const {
    std::string out = std::string(kMagic) + std::string(kVersion) + info + object.bytes() + "u.";
    PickleEmitter keys("keys");
    keys.put("\x80\x02](");
    for (const auto& [key, values] : storages) keys.put_text(key);
    keys.put("e.");
    out += keys.bytes();
    for (const auto& [key, values] : storages) {
      put_le<uint64_t>(out, values.size());
      out.append(reinterpret_cast<const char*>(values.data()), 4 * values.size());
    }
    return out;
  }

  PickleEmitter object{"object"};
};

class Legacy : public ::testing::Test {
 protected:
  Index read(const std::string& bytes) {
    put_file(path, bytes);
    return read_pt(local_storage(), path);
  }
  Error error(const std::string& bytes) {
    return thrown([&] { read(bytes); });
  }
  TestFolder folder;
  std::string path = folder / "m.pt";
};

TEST_F(Legacy, ViewsOfStoragesAreParts) {
  LegacyFile file;
  file.tensor("whole", 6, 0, [](auto& out) { put_storage(out, "94", 6); });
  file.tensor("part", 2, 1, [](auto& out) { put_storage(out, "94", 6, "95", 2, 3); });
  file.tensor("other", 1, 0, [](auto& out) { put_storage(out, "17", 1); });
  const Index index = read(file.bytes({{"17", {9}}, {"94", counted<float>(6)}}));
  EXPECT_EQ(index.format, "pt");
  EXPECT_EQ(read_tensor<float>(index, "whole"), counted<float>(6));
  EXPECT_EQ(read_tensor<float>(index, "part"), (std::vector<float>{4, 5}));
  EXPECT_EQ(read_tensor<float>(index, "other"), (std::vector<float>{9}));
  EXPECT_EQ(detect_format(local_storage(), path), "pt");
}

TEST_F(Legacy, ViewsThatLeaveTheirStorageAreRefused) {
  const std::vector<std::pair<std::string, std::vector<float>>> storages = {{"94", counted<float>(6)}};
  for (const auto& [offset, count, tensor] : std::vector<std::tuple<int64_t, int64_t, int64_t>>{
           {4, 3, 1}, {-1, 3, 1}, {2, -1, 0}, {2, 3, 4}, {INT64_MAX, 2, 1}, {2, INT64_MAX, 1}}) {
    LegacyFile file;
    file.tensor("part", tensor, 0, [&, o = offset, c = count](auto& out) { put_storage(out, "94", 6, "95", o, c); });
    EXPECT_EQ(error(file.bytes(storages)).kind(), ErrorKind::kCorrupt) << offset << " " << count;
  }
}

TEST_F(Legacy, TheDictAboutTheMachineChangesNothing) {
  // torch converts to little-endian when it writes, and doesn't look at this when it reads.
  LegacyFile file;
  file.tensor("w", 3, 0, [](auto& out) { put_storage(out, "1", 3); });
  PickleEmitter info("info");
  info.put("\x80\x02}");
  info.put_text("little_endian");
  info.put("\x89s.");
  const Index index = read(file.bytes({{"1", {1, 2, 3}}}, info.bytes()));
  EXPECT_EQ(read_tensor<float>(index, "w"), (std::vector<float>{1, 2, 3}));
}

TEST_F(Legacy, StoragesMustBeThereOnceAndAsLargeAsDeclared) {
  LegacyFile file;
  file.tensor("w", 3, 0, [](auto& out) { put_storage(out, "1", 3); });
  EXPECT_THAT(error(file.bytes({})).what(), HasSubstr("storage '1' is missing"));
  EXPECT_THAT(error(file.bytes({{"2", {1, 2, 3}}})).what(), HasSubstr("'2'"));
  EXPECT_THAT(error(file.bytes({{"1", {1, 2, 3}}, {"1", {1, 2, 3}}})).what(), HasSubstr("twice"));
  EXPECT_THAT(error(file.bytes({{"1", {1, 2}}})).what(), HasSubstr("2 elements"));
}

TEST_F(Legacy, EveryPrefixIsAnError) {
  LegacyFile file;
  file.tensor("w", 3, 0, [](auto& out) { put_storage(out, "1", 3); });
  const std::string all = file.bytes({{"1", {1, 2, 3}}});
  for (size_t n = 0; n < all.size(); ++n) EXPECT_EQ(error(all.substr(0, n)).kind(), ErrorKind::kCorrupt) << n;
}

TEST_F(Legacy, LongPicklesAreReadToTheirEnd) {
  LegacyFile file;
  file.object.put_text("text");
  file.object.put_text(std::string(3'000'000, 'x'));
  file.tensor("w", 2, 0, [](auto& out) { put_storage(out, "1", 2); });
  const Index index = read(file.bytes({{"1", {5, 6}}}));
  EXPECT_EQ(read_tensor<float>(index, "w"), (std::vector<float>{5, 6}));
  EXPECT_EQ(index.values.find("text")->get_if<std::string>()->size(), 3'000'000u);
}

TEST_F(Legacy, OtherVersionsAreSaid) {
  std::string bytes = LegacyFile().bytes({});
  bytes[kMagic.size() + 3] = '\xea';
  EXPECT_EQ(error(bytes).kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(error(bytes).what(), HasSubstr("1002"));
}

TEST_F(Legacy, TheTarOfTheFirstYearIsNamed) {
  std::string tar(1024, '\0');
  tar.replace(0, 8, "sys_info");
  tar.replace(257, 5, "ustar");
  EXPECT_EQ(error(tar).kind(), ErrorKind::kUnsupported);
  EXPECT_THAT(error(tar).what(), HasSubstr("tar archive"));
  EXPECT_EQ(detect_format(local_storage(), path), "pt");
  tar.replace(0, 8, "any_file");
  error(tar);
  EXPECT_EQ(detect_format(local_storage(), path), "");
}

// class Foo: a=1 ; pickle.dumps({"x": Foo(), "call": os.system("true")}, 2), in spirit
const std::string kBare =
    "\x80\x02}(X\x01\0\0\0xc__main__\nFoo\n)\x81}X\x01\0\0\0aK\x01sbX\x04\0\0\0"
    "callcposix\nsystem\nX\x04\0\0\0true\x85Ru."s;

TEST(BarePickle, ItsNamesAreTold) {
  TestFolder folder;
  put_file(folder / "p", kBare);
  EXPECT_EQ(detect_format(local_storage(), folder / "p"), "pickle");
  Value attributes, expected;
  attributes.set("a", Value(1));
  expected.set("x", Value(Opaque{"__main__.Foo", {attributes}}));
  expected.set("call", Value(Opaque{"posix.system", {Value("true")}}));
  EXPECT_EQ(read_bare_pickle_names(local_storage(), folder / "p"), expected);
}

TEST(BarePickle, EveryPrefixAndFlippedByteEndsInTime) {
  TestFolder folder;
  for (size_t n = 0; n < kBare.size(); ++n) {
    put_file(folder / "p", kBare.substr(0, n));
    EXPECT_EQ(thrown([&] { read_bare_pickle_names(local_storage(), folder / "p"); }).kind(), ErrorKind::kCorrupt) << n;
  }
  for (size_t at = 0; at < kBare.size(); ++at) {
    std::string bad = kBare;
    for (int bit = 0; bit < 8; ++bit) {
      bad[at] = static_cast<char>(kBare[at] ^ (1 << bit));
      put_file(folder / "p", bad);
      try {
        read_bare_pickle_names(local_storage(), folder / "p");
      } catch (const Error&) {  // either is right; a crash or another exception is not
      }
    }
  }
}

}  // namespace
}  // namespace shardsmith
