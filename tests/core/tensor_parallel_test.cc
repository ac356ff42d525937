#include "family/tensor_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/error.h"
#include "layout/index.h"

namespace shardsmith {
namespace {

FamilyModel llama(int heads, int kv, int vocab) {
  Value config;
  config.set("model_type", "llama");
  config.set("vocab_size", vocab);
  config.set("hidden_size", heads * 8);
  config.set("intermediate_size", 96);
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
