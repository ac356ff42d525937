#include "family/tensor_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "family/local_model.h"
#include "layout/index.h"

namespace shardsmith {
namespace {

FamilyModel llama(int heads, int kv, int vocab) {
  Value config;
  config.set("model_type", "llama");
  config.set("vocab_size", vocab);
  config.set("hidden_size", heads * 8);
  config.set("intermediate_size", 98);  // 4, 6 and 12 don't divide it
  config.set("num_hidden_layers", 2);
  config.set("num_attention_heads", heads);
  config.set("num_key_value_heads", kv);
  config.set("max_position_embeddings", 64);
  config.set("tie_word_embeddings", false);
  return describe_model(config);
}

// Each element belongs to a rank, and to several only where the whole box is shared.
TEST(TensorParallel, RanksTogetherHoldEveryElement) {
  for (const auto& [kv, degree] : std::vector<std::pair<int, int>>{{12, 1}, {12, 4}, {6, 2}, {2, 4}, {1, 6}, {3, 12}}) {
    const FamilyModel model = llama(12, kv, 101);
    check_tensor_parallel(model.description, degree);
    for (const FamilyTensor& tensor : model.tensors) {
      for (const Piece& piece : tensor.pieces) {
        std::vector<Box> boxes;
        for (int rank = 0; rank < degree; ++rank) {
          const Box box = tensor_parallel_box(model.description, piece.name, piece.shape, rank, degree);
          EXPECT_TRUE(inside(box, piece.shape)) << piece.name;
          if (std::find(boxes.begin(), boxes.end(), box) == boxes.end()) boxes.push_back(box);
        }
        int64_t held = 0;
        for (size_t i = 0; i < boxes.size(); ++i) {
          held += volume(boxes[i].extent);
          for (size_t k = 0; k < i; ++k) EXPECT_FALSE(intersect(boxes[i], boxes[k])) << piece.name;
        }
        EXPECT_EQ(held, volume(piece.shape)) << piece.name << " on " << degree;
      }
    }
  }
}

FamilyModel neox(int heads) {
  Value config;
  config.set("model_type", "gpt_neox");
  config.set("vocab_size", 101);
  config.set("hidden_size", heads * 8);
  config.set("intermediate_size", 96);
  config.set("num_hidden_layers", 2);
  config.set("num_attention_heads", heads);
  return describe_model(config);
}

// A rank's fused tensor is its heads' part of the whole, each head still query, key, value.
TEST(TensorParallel, TensorsFusedByHeadStayFused) {
  const FamilyModel model = neox(4), local = local_model(model, 1, 2);
  const auto at = [](const FamilyModel& m, const std::string& name) -> const FamilyTensor& {
    for (const FamilyTensor& tensor : m.tensors)
      if (tensor.hf_name == name) return tensor;
    throw std::runtime_error("no " + name);
  };
  const FamilyTensor& fused = at(local, "gpt_neox.layers.1.attention.query_key_value.weight");
  EXPECT_EQ(fused.shape, (Shape{48, 32}));
  ASSERT_EQ(fused.pieces.size(), 3u);
  for (int64_t p = 0; p < 3; ++p) {
    const Piece& piece = fused.pieces[static_cast<size_t>(p)];
    EXPECT_EQ(piece.shape, (Shape{16, 32}));
    ASSERT_EQ(piece.runs(), 2);
    EXPECT_EQ(piece.hf_box(1), (Box{{24 + 8 * p, 0}, {8, 32}}));
    EXPECT_EQ(piece.logical_box(1), (Box{{8, 0}, {8, 32}}));
  }
  EXPECT_EQ(at(local, "gpt_neox.layers.1.attention.query_key_value.bias").shape, (Shape{48}));
}

TEST(TensorParallel, AHeadsBiasGoesWithItsRowsTheRestOfAnEncodersEndsIsWhole) {
  const ModelDescription d = neox(4).description;
  EXPECT_EQ(tensor_parallel_box(d, "lm_head.bias", {101}, 1, 2), (Box{{51}, {50}}));
  EXPECT_EQ(tensor_parallel_box(d, "lm_head.weight", {101, 32}, 1, 2), (Box{{51, 0}, {50, 32}}));
  for (const char* name :
       {"lm_head.transform.weight", "pooler.weight", "classifier.weight", "token_type_embedding.weight"})
    EXPECT_EQ(tensor_parallel_box(d, name, {32, 32}, 1, 2), whole({32, 32})) << name;
  EXPECT_EQ(tensor_parallel_box(d, "lm_head.layernorm.bias", {32}, 1, 2), whole({32}));
}

TEST(TensorParallel, HeadsStayWhole) {
  const FamilyModel model = llama(12, 3, 101);
  const Shape query{96, 96}, key{24, 96};
  EXPECT_EQ(tensor_parallel_box(model.description, "transformer.seq_layers.0.attention.query.weight", query, 1, 3),
            (Box{{32, 0}, {32, 96}}));
  EXPECT_EQ(tensor_parallel_box(model.description, "transformer.seq_layers.0.attention.key.weight", key, 5, 6),
            (Box{{16, 0}, {8, 96}}));
  EXPECT_EQ(tensor_parallel_box(model.description, "transformer.seq_layers.0.attention.dense.weight", query, 1, 3),
            (Box{{0, 32}, {96, 32}}));
}

TEST(TensorParallel, ADegreeThatCannotWorkNamesThoseThatDo) {
  const FamilyModel model = llama(12, 3, 101);
  try {
    check_tensor_parallel(model.description, 5);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(e.what()).find("degrees that work: 1, 3, 6, 12"), std::string::npos) << e.what();
  }
}

}  // namespace
}  // namespace shardsmith
