// What the files of the families share. A new family: one file that defines describe_*(), a line here, a line in
// family.cc.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "family/family.h"

namespace shardsmith {

FamilyModel describe_gpt2(const Value& config);
FamilyModel describe_llama(const Value& config);  // and mistral, qwen2
FamilyModel describe_gpt_neox(const Value& config);
FamilyModel describe_bert(const Value& config);
FamilyModel describe_torch_module(const Value& config);

// Reads a config.json key by key. A key that is null counts as absent. Errors are kCorrupt and name the key.
class Config {
 public:
  explicit Config(const Value& value) : value_(value) {}
  int64_t size(const char* key) const;  // needed, at least 1 and at most 2^31
  int64_t size(const char* key, int64_t otherwise) const;
  double number(const char* key) const;  // needed, finite
  double number(const char* key, double otherwise) const;
  double probability(const char* key, double otherwise) const;  // 0 <= p < 1
  bool flag(const char* key, bool otherwise) const;
  std::string word(const char* key, const std::string& otherwise) const;
  const Value* find(const char* key) const;  // nullptr if absent or null
  bool is_null(const char* key) const;       // there, but null

 private:
  const Value& value_;
};

// transformers' word for it; kUnsupported where we don't compute it.
Activation activation_from(const std::string& word);

// hidden_size and as many KV heads as heads, each an equal part of it, from the keys that the family has for them.
void read_equal_heads(const Config& config, const char* hidden, const char* heads, ModelDescription& d);

// Rotary positions from rope_parameters, rope_scaling or the older keys. `base` is the older key of theta, `share` that
// of the rotated part of a head; `part` is the part where nothing says it. Needs attention_head_size. kUnsupported for
// a rope type other than default and llama3.
void read_rotary(const Config& config, const char* base, const char* share, double part, ModelDescription& d);

// transformers gives pad_token_id to the embedding as its padding_idx; a negative one counts from the end.
// -1 where there is none.
int64_t padding_row(const Config& config, int64_t vocab_size);

// Collects a model's tensors. Names are without the family's prefix.
class TensorList {
 public:
  explicit TensorList(FamilyModel& model) : model_(model) {}
  // Same shape on both sides.
  void plain(int place, const std::string& hf, const std::string& ours, Shape shape);
  // Hugging Face [in, out] (Conv1D), ours [out, in].
  void transposed(int place, const std::string& hf, const std::string& ours, int64_t out, int64_t in);
  // Weight and bias, as Hugging Face has them: [out, in] and [out]; of a norm [hidden_size] each.
  void linear(int place, const std::string& hf, const std::string& ours, int64_t out, int64_t in, bool bias = true);
  void layernorm(int place, const std::string& hf, const std::string& ours);
  void add(FamilyTensor tensor);  // hf_name without prefix
  // The head: a second name of the first tensor where it is tied, else a tensor of its own.
  void head(const std::string& hf, const std::string& ours = "lm_head.weight");

 private:
  FamilyModel& model_;
};

// "transformer.seq_layers.{i}."
std::string block_name(int64_t i);

}  // namespace shardsmith
