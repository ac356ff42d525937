// Modules of no family: their description, and what tensor-parallel ranks hold of them.
#include <gtest/gtest.h>

#include "base/error.h"
#include "family/family.h"
#include "family/local_model.h"
#include "family/tensor_parallel.h"

namespace shardsmith {
namespace {

FamilyModel describe(const std::string& tensors) {
  return describe_model(
      parse_json(R"({"model_type": "torch_module", "class": "Net", "tensors": )" + tensors + "}", "test"));
}

TEST(TorchModule, TensorsHaveTheirOwnNamesAndShapes) {
  const FamilyModel model = describe(R"([
      {"name": "words.weight", "shape": [10, 4], "axis": 1, "aliases": ["head.weight"]},
      {"name": "scale", "shape": []}, {"name": "none", "shape": [0, 3]}])");
  EXPECT_EQ(model.architecture, "Net");
  ASSERT_EQ(model.tensors.size(), 3u);
  EXPECT_EQ(model.tensors[0].aliases, std::vector<std::string>{"head.weight"});
  EXPECT_EQ(model.tensors[0].pieces[0].name, "words.weight");
  EXPECT_EQ(stage_tensors(model, Partition{{0, 1}}, 0).size(), 3u);

  const FamilyModel local = local_model(model, 1, 2);
  EXPECT_EQ(local.tensors[0].shape, (Shape{10, 2}));
  EXPECT_EQ(local.tensors[1].shape, Shape{});
  EXPECT_EQ(local.tensors[2].shape, (Shape{0, 3}));
  EXPECT_EQ(tensor_parallel_box(model.description, "words.weight", {10, 4}, 1, 2).offset, (Shape{0, 2}));
  EXPECT_EQ(tensor_parallel_copies(model.description, "words.weight", {10, 4}, 2), 1);
  EXPECT_EQ(tensor_parallel_copies(model.description, "other", {10, 4}, 2), 2);
}

TEST(TorchModule, ATiedTensorMayStandUnderEitherName) {
  const FamilyModel model = describe(R"([{"name": "a", "shape": [2], "aliases": ["b"]}])");
  for (const char* name : {"a", "b", "module.b"}) {
    Index index;
    index.tensors.push_back({.name = name, .dtype = Dtype::kF32, .shape = {2}, .slices = {}, .alias_of = {}});
    index.reindex();
    NameReport report;
    EXPECT_EQ(to_logical(index, model, report).tensors.at(0).name, "a") << name;
    EXPECT_TRUE(report.missing.empty() && report.unexpected.empty()) << name;
  }
}

TEST(TorchModule, NonsenseIsNamed) {
  for (const char* tensors :
       {"[]", "3", "[3]", R"([{"name": "a"}])", R"([{"name": "", "shape": [1]}])", R"([{"name": "a", "shape": [-1]}])",
        R"([{"name": "a", "shape": [1], "axis": 1}])", R"([{"name": "a", "shape": [1], "aliases": 2}])",
        R"([{"name": "a", "shape": [1]}, {"name": "a", "shape": [1]}])",
        R"([{"name": "a", "shape": [9223372036854775807, 9]}])"}) {
    try {
      describe(tensors);
      FAIL() << tensors;
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kCorrupt) << tensors << ": " << error.what();
    }
  }
  EXPECT_THROW(describe_model(parse_json(R"({"model_type": "torch_module"})", "test")), Error);
}

}  // namespace
}  // namespace shardsmith
