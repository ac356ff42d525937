// Small models and ranks as threads, for the engine's tests.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "comm/group.h"
#include "comm/thread_world.h"
#include "family/family.h"
#include "family/local_model.h"
#include "family/tensor_parallel.h"
#include "layout/mesh.h"
#include "pipeline/stage.h"

namespace shardsmith::test {

inline const char* const kTinyLlama = R"({"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4,
  "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 61,
  "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
  "tie_word_embeddings": true})";
inline const char* const kTinyGpt2 =
    R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 32,
  "vocab_size": 61, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "resid_pdrop": 0.1,
  "embd_pdrop": 0.1, "attn_pdrop": 0.1})";

inline const char* const kTinyNeox = R"({"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 4,
  "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61, "max_position_embeddings": 32,
  "rotary_pct": 0.5, "hidden_act": "gelu", "use_parallel_residual": true, "hidden_dropout": 0.1,
  "attention_dropout": 0.1, "tie_word_embeddings": false})";
inline const char* const kTinyBert = R"({"model_type": "bert", "architectures": ["BertForMaskedLM"],
  "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 61,
  "max_position_embeddings": 32, "type_vocab_size": 2, "hidden_act": "gelu", "pad_token_id": 0})";

inline FamilyModel family(const char* config) { return describe_model(parse_json(config, "test")); }

using Tensors = std::map<std::string, at::Tensor>;

// The same values for every call with the same model.
inline Tensors initial_weights(const FamilyModel& model, at::ScalarType dtype = at::kFloat) {
  Tensors weights;
  auto generator = at::detail::createCPUGenerator(17);
  for (const FamilyTensor& tensor : model.tensors) {
    at::Tensor w = at::randn(tensor.shape, generator, at::TensorOptions().dtype(at::kDouble)).mul_(0.08);
    if (tensor.pieces[0].name.find("layernorm.weight") != std::string::npos) w.add_(1.0);
    weights[tensor.hf_name] = w.to(dtype);
  }
  return weights;
}

// A piece of a tensor, as its logical tensor: a view, [runs, run, ...] where its rows don't lie together.
inline at::Tensor piece_of(const at::Tensor& tensor, const Piece& piece) {
  std::vector<int64_t> sizes(piece.shape.begin(), piece.shape.end()), strides;
  int64_t offset = tensor.storage_offset();
  for (const int d : piece.permutation) strides.push_back(tensor.stride(d));
  for (size_t d = 0; d < piece.offset.size(); ++d) offset += piece.offset[d] * tensor.stride(static_cast<int64_t>(d));
  if (piece.run > 0) {
    sizes[0] = piece.run;
    sizes.insert(sizes.begin(), piece.runs());
    strides.insert(strides.begin(), strides[0] * piece.step);
  }
  return tensor.as_strided(sizes, strides, offset);
}

inline at::Tensor box_of(at::Tensor tensor, const Box& box) {
  for (size_t d = 0; d < box.offset.size(); ++d)
    tensor = tensor.narrow(static_cast<int64_t>(d), box.offset[d], box.extent[d]);
  return tensor;
}

// For each piece of tensor `i`: what the whole has of it in this rank's box, and what the rank has.
inline void for_each_piece(const FamilyModel& model, size_t i, const at::Tensor& whole, const at::Tensor& own, int tp,
                           int degree, const std::function<void(at::Tensor, at::Tensor)>& visit) {
  const FamilyModel local = local_model(model, tp, degree);
  for (size_t p = 0; p < model.tensors[i].pieces.size(); ++p) {
    const Piece& piece = model.tensors[i].pieces[p];
    const Box box = tensor_parallel_box(model.description, piece.name, piece.shape, tp, degree);
    const at::Tensor of_own = piece_of(own, local.tensors[i].pieces[p]);
    if (piece.run == 0) {
      visit(box_of(piece_of(whole, piece), box), of_own);
      continue;
    }
    const Box runs{{box.offset[0] / piece.run}, {box.extent[0] / piece.run}};  // heads are whole
    visit(box_of(piece_of(whole, piece), runs), of_own);
  }
}

// This rank's own copies, as leaves.
inline Tensors local_weights(const FamilyModel& model, const Tensors& all, const Partition& partition, int stage,
                             int tp = 0, int degree = 1) {
  Tensors own;
  const FamilyModel local = local_model(model, tp, degree);
  for (const size_t i : stage_tensors(model, partition, stage)) {
    const std::string& name = model.tensors[i].hf_name;
    at::Tensor tensor = at::empty(local.tensors[i].shape, all.at(name).options());
    for_each_piece(model, i, all.at(name), tensor, tp, degree,
                   [](const at::Tensor& from, at::Tensor to) { to.copy_(from); });
    own[name] = tensor.requires_grad_(true);
  }
  return own;
}

inline std::vector<Inputs> batch(int microbatches, int64_t rows, int64_t sequence, int64_t vocabulary, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  std::vector<Inputs> inputs;
  for (int i = 0; i < microbatches; ++i) {
    Inputs in;
    in.input_ids = at::randint(0, vocabulary, {rows, sequence}, generator, at::TensorOptions().dtype(at::kLong));
    in.labels = in.input_ids;
    inputs.push_back(in);
  }
  return inputs;
}

// Runs `body(rank)` on one thread a rank; afterwards throws the first rank's exception, if any threw.
inline void run_ranks(int size, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      try {
        body(r);
      } catch (...) {
        errors[static_cast<size_t>(r)] = std::current_exception();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors)
    if (error) std::rethrow_exception(error);
}

struct Outcome {
  std::vector<double> losses;  // by microbatch, of replica 0's last stage
  Tensors gradients;           // by Hugging Face name, of replica 0
  double norm = 0;
};

// Groups of ranks as threads, one world for each set of members.
struct Worlds {
  std::vector<ThreadWorld> worlds;
  std::map<std::vector<int>, size_t> known;
  Group group(const std::vector<int>& members, int rank, const char* name) {
    const auto [found, fresh] = known.emplace(members, worlds.size());
    if (fresh) worlds.push_back(make_thread_world(static_cast<int>(members.size())));
    const auto place = std::find(members.begin(), members.end(), rank) - members.begin();
    return Group(worlds[found->second].groups[static_cast<size_t>(place)], name, std::chrono::milliseconds(20000));
  }
};

inline double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace shardsmith::test
