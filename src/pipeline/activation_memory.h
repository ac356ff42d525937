// Bytes of activations: what a microbatch keeps from its forward to its backward on one rank, and what is needed
// besides while either runs. Pure arithmetic that follows nn/ operation by operation (block.cc, transformer.cc,
// loss.cc): whoever changes what these keep changes it here, and a test compares the two. Left out are tables of a few
// bytes a position: norms' statistics, ids, masks of one sequence.
#pragma once

#include <cstdint>
#include <string>

#include "family/family.h"

namespace shardsmith {

// What parameters are in, and so activations and gradients. Narrow ones have masters in float32.
enum class Precision : uint8_t { kFp32, kBf16, kFp16 };
int64_t element_bytes(Precision precision);
// "fp32", "bf16" or "fp16". Throws kInvalidArgument for any other word.
Precision precision_of(const std::string& word);

// One microbatch, in training.
struct Workload {
  int64_t rows = 1;             // sequences
  int64_t sequence = 0;         // tokens of each
  int tp = 1;                   // tensor-parallel ranks; the first one, which has no less than the others, is counted
  bool split_sequence = false;  // each of them keeps its own positions between layers (optimize = "memory")
  Precision precision = Precision::kFp32;
};

// A value: free to use from any thread. All functions give bytes.
class ActivationMemory {
 public:
  // `model` is the whole one. Throws kInvalidArgument for a tensor-parallel degree that it doesn't admit.
  ActivationMemory(const FamilyModel& model, const Workload& work);

  // Hidden states of the positions that the rank keeps: what is between layers, and between stages.
  int64_t hidden() const { return own_; }
  // Kept by the embedding, and by one layer, its input included where keeps_input().
  int64_t embedding() const;
  int64_t layer() const;
  bool keeps_input() const;
  // At most, while a layer's backward runs, above what the layer had kept.
  int64_t layer_backward() const;
  // Kept by the final norm, the head and the loss, but for hidden(), their output, which stays to the step's end.
  int64_t head() const;
  // Above all that while the loss is computed: a chunk of logits and copies.
  int64_t loss() const;
  // cos and sin of all positions of the model, which are there from the start.
  int64_t rotary_tables() const;

 private:
  int64_t norm() const;
  int64_t mask() const;
  int64_t attention() const;
  int64_t feed_forward() const;
  bool has_language_head() const;

  ModelDescription m_;
  int64_t element_;               // of an activation
  int64_t own_, full_;            // hidden states of the rank's positions, of all positions
  int64_t queries_, keys_, mlp_;  // this rank's heads and its part of the feed-forward, all positions
  int64_t scores_, sums_;         // elements: this rank's attention matrices, their rows
  int64_t tokens_, vocabulary_;   // vocabulary: this rank's part
  bool wide_, split_, alone_;     // alone: one tensor-parallel rank
  bool has_kernels_;              // of the CPU's: norms, SiLU times up, the loss's softmax
  bool by_head_ = false;          // query, key and value are one product, by head
};

}  // namespace shardsmith
