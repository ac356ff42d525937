#include "family/family.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "base/error.h"
#include "layout/plan.h"
#include "reference_executor.h"

namespace shardsmith {
namespace {

Value fixtures() {
  const auto path = std::filesystem::path(__FILE__).parent_path() / "fixtures" / "families.json";
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return parse_json(text.str(), path.string());
}

Value config(const std::string& name) {
  const Value all = fixtures();
  for (const Value& item : *all.get_if<List>()) {
    if (*item.find("name")->get_if<std::string>() == name) return *item.find("config");
  }
  throw std::runtime_error("no fixture " + name);
}

std::string error_of(const Value& config, ErrorKind kind) {
  try {
    describe_model(config);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    return e.what();
  }
  return "no error";
}

// A file that holds all of the model's tensors one after the other, each element another float.
struct Stored {
  Index index;
  std::string bytes;
};
Stored store(const FamilyModel& model, const std::string& prefix_gone = "") {
  Stored stored;
  stored.index.files.push_back({"model.safetensors", 0, nullptr});
  float next = 1;
  for (const FamilyTensor& tensor : model.tensors) {
    std::string name = tensor.hf_name;
    if (!prefix_gone.empty() && name.starts_with(prefix_gone)) name.erase(0, prefix_gone.size());
    Slice slice{.box = whole(tensor.shape), .offset = stored.bytes.size(), .strides = contiguous_strides(tensor.shape)};
    stored.index.tensors.push_back({name, Dtype::kF32, tensor.shape, {slice}, ""});
    for (int64_t i = volume(tensor.shape); i > 0; --i, next += 1)
      stored.bytes.append(reinterpret_cast<char*>(&next), 4);
  }
  stored.index.files[0].size = stored.bytes.size();
  stored.index.reindex();
  return stored;
}

// All of one tensor, packed row-major.
std::vector<float> values(const Index& index, const std::string& bytes, const std::string& name) {
  const TensorEntry* tensor = index.find(name);
  if (!tensor) throw std::runtime_error("no " + name);
  const Plan plan = make_plan(
      index, {{{name, tensor->dtype, tensor->shape, whole(tensor->shape), 0, 0, contiguous_strides(tensor->shape)}}});
  require_complete(plan, name);
  std::vector<std::string> out{std::string(static_cast<size_t>(volume(tensor->shape)) * 4, 0)};
  reference_execute(plan, {bytes}, out);
  std::vector<float> result(out[0].size() / 4);
  std::memcpy(result.data(), out[0].data(), out[0].size());
  return result;
}

TEST(Family, TensorsAreThoseOfTransformersInModuleOrder) {
  const Value all = fixtures();
  ASSERT_GE(all.get_if<List>()->size(), 11u);
  for (const Value& item : *all.get_if<List>()) {
    SCOPED_TRACE(*item.find("name")->get_if<std::string>());
    const FamilyModel model = describe_model(*item.find("config"));
    const List& expected = *item.find("tensors")->get_if<List>();
    ASSERT_EQ(model.tensors.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      const List& pair = *expected[i].get_if<List>();
      EXPECT_EQ(model.tensors[i].hf_name, *pair[0].get_if<std::string>());
      Shape shape;
      for (const Value& n : *pair[1].get_if<List>()) shape.push_back(*n.get_if<int64_t>());
      EXPECT_EQ(model.tensors[i].shape, shape) << model.tensors[i].hf_name;
    }
    const std::string& made =
        *item.find("config")->find("architectures")->get_if<List>()->front().get_if<std::string>();
    EXPECT_EQ(model.architecture, made);
    const ModelDescription& d = model.description;
    const bool words = d.head == HeadKind::kCausalLm || d.head == HeadKind::kMaskedLm;
    const bool tied = words && std::get<bool>(item.find("config")->find("tie_word_embeddings")->variant());
    const std::string head = d.model_type == "gpt_neox" ? "embed_out.weight"
                             : d.model_type == "bert"   ? "cls.predictions.decoder.weight"
                                                        : "lm_head.weight";
    EXPECT_EQ(d.tied_head, tied);
    EXPECT_EQ(model.tied_names, tied ? std::vector<std::string>{head} : std::vector<std::string>{});
    EXPECT_EQ(model.tensors.front().also_last, tied);
  }
}

TEST(Family, PiecesTileTheirTensors) {
  const Value all = fixtures();
  for (const Value& item : *all.get_if<List>()) {
    const std::string& name = *item.find("name")->get_if<std::string>();
    SCOPED_TRACE(name);
    const FamilyModel model = describe_model(*item.find("config"));
    const Stored stored = store(model);
    const Index logical = to_logical(stored.index, model);
    EXPECT_NO_THROW(validate(logical));
    std::set<float> seen;
    for (const TensorEntry& tensor : logical.tensors) {
      for (float v : values(logical, stored.bytes, tensor.name)) EXPECT_TRUE(seen.insert(v).second) << tensor.name;
    }
    EXPECT_EQ(seen.size() * 4, stored.bytes.size());
    // And back: bit for bit the same file.
    const Index back = to_hf(logical, model);
    EXPECT_NO_THROW(validate(back));
    ASSERT_EQ(back.tensors.size(), stored.index.tensors.size());
    for (const TensorEntry& tensor : stored.index.tensors) {
      EXPECT_EQ(values(back, stored.bytes, tensor.name), values(stored.index, stored.bytes, tensor.name));
    }
  }
}

TEST(Family, Gpt2QueryKeyValueAreColumnsOfTheFusedMatrix) {
  const FamilyModel model = describe_model(config("gpt2"));
  const Stored stored = store(model, "transformer.");  // the hub's file has no prefix
  const Index logical = to_logical(stored.index, model);
  const std::vector<float> fused = values(stored.index, stored.bytes, "h.1.attn.c_attn.weight");
  const std::vector<float> bias = values(stored.index, stored.bytes, "h.1.attn.c_attn.bias");
  const size_t h = 12;
  const char* parts[] = {"query", "key", "value"};
  for (size_t p = 0; p < 3; ++p) {
    const std::string ours = std::string("transformer.seq_layers.1.attention.") + parts[p];
    const std::vector<float> weight = values(logical, stored.bytes, ours + ".weight");
    for (size_t o = 0; o < h; ++o) {
      for (size_t i = 0; i < h; ++i) ASSERT_EQ(weight[o * h + i], fused[i * 3 * h + p * h + o]);
    }
    EXPECT_EQ(
        values(logical, stored.bytes, ours + ".bias"),
        std::vector<float>(bias.begin() + static_cast<long>(p * h), bias.begin() + static_cast<long>((p + 1) * h)));
  }
  EXPECT_EQ(logical.find("transformer.seq_layers.0.output.dense1.weight")->shape, (Shape{48, 12}));
  EXPECT_NE(logical.find("transformer.seq_layers.0.attention.pre_layernorm.bias"), nullptr);
  EXPECT_NE(logical.find("layernorm.weight"), nullptr);
  EXPECT_EQ(logical.find("lm_head.weight"), nullptr);
}

// Each head's rows of query_key_value are its query's, its key's and its value's.
TEST(Family, NeoxQueryKeyValueAreFusedByHead) {
  const FamilyModel model = describe_model(config("gpt_neox"));
  const Stored stored = store(model);
  const Index logical = to_logical(stored.index, model);
  const std::string fused = "gpt_neox.layers.1.attention.query_key_value.";
  const std::vector<float> weight = values(stored.index, stored.bytes, fused + "weight");
  const std::vector<float> bias = values(stored.index, stored.bytes, fused + "bias");
  const size_t hidden = 24, head = 8;
  const char* parts[] = {"query", "key", "value"};
  for (size_t p = 0; p < 3; ++p) {
    const std::string ours = std::string("transformer.seq_layers.1.attention.") + parts[p];
    const std::vector<float> w = values(logical, stored.bytes, ours + ".weight");
    const std::vector<float> b = values(logical, stored.bytes, ours + ".bias");
    for (size_t row = 0; row < hidden; ++row) {
      const size_t from = (row / head * 3 + p) * head + row % head;
      ASSERT_EQ(b[row], bias[from]);
      for (size_t i = 0; i < hidden; ++i) ASSERT_EQ(w[row * hidden + i], weight[from * hidden + i]);
    }
  }
}

TEST(Family, NewerFamiliesAreDescribed) {
  const ModelDescription m = describe_model(config("mistral")).description;
  EXPECT_EQ(m.model_type, "mistral");
  EXPECT_EQ(m.num_positions, 24);  // the window
  EXPECT_EQ(m.attention_head_size, 4);
  EXPECT_FALSE(m.attention_bias || m.dense_bias || m.mlp_bias || m.tied_head);
  const ModelDescription q = describe_model(config("qwen2")).description;
  EXPECT_EQ(q.num_positions, 64);
  EXPECT_TRUE(q.attention_bias && q.tied_head);
  EXPECT_FALSE(q.dense_bias || q.mlp_bias);
  const ModelDescription n = describe_model(config("gpt_neox")).description;
  EXPECT_EQ(n.rotary_dims, 2);  // a quarter of 8
  EXPECT_EQ(n.activation, Activation::kGelu);
  EXPECT_TRUE(n.parallel_residual && n.attention_bias && n.dense_bias && n.causal);
  EXPECT_FALSE(n.tied_head || n.gated || n.post_layernorm);
  const ModelDescription p = describe_model(config("gpt_neox_plain")).description;
  EXPECT_EQ(p.rotary_dims, 6);
  EXPECT_DOUBLE_EQ(p.rotary_theta, 99);
  EXPECT_FALSE(p.parallel_residual || p.attention_bias || p.dense_bias);
  EXPECT_TRUE(p.mlp_bias && p.tied_head);
  EXPECT_DOUBLE_EQ(p.hidden_dropout, 0.25);
  EXPECT_DOUBLE_EQ(p.embedding_dropout, 0.25);
  const ModelDescription b = describe_model(config("bert")).description;
  EXPECT_EQ(b.head, HeadKind::kNone);
  EXPECT_TRUE(b.has_pooler && b.post_layernorm && b.embedding_layernorm);
  EXPECT_FALSE(b.causal || b.tied_head || b.head_bias || b.head_transform);
  EXPECT_EQ(b.num_token_types, 2);
  EXPECT_EQ(b.padding_idx, 0);
  EXPECT_DOUBLE_EQ(b.layernorm_epsilon, 1e-12);
  EXPECT_DOUBLE_EQ(b.hidden_dropout, 0.1);
  const ModelDescription w = describe_model(config("bert_masked")).description;
  EXPECT_EQ(w.head, HeadKind::kMaskedLm);
  EXPECT_TRUE(w.tied_head && w.head_bias && w.head_transform);
  EXPECT_FALSE(w.has_pooler);
  const ModelDescription c = describe_model(config("bert_classification")).description;
  EXPECT_EQ(c.head, HeadKind::kClassification);
  EXPECT_EQ(c.num_labels, 3);
  EXPECT_EQ(c.problem, ProblemKind::kSingleLabel);
  EXPECT_DOUBLE_EQ(c.classifier_dropout, 0.375);
}

TEST(Family, WindowsAndOlderKeysOfNewerFamiliesAreRead) {
  Value c = config("mistral");
  c.set("sliding_window", None{});
  EXPECT_EQ(describe_model(c).description.num_positions, 64);
  c.set("sliding_window", 4096);
  EXPECT_EQ(describe_model(c).description.num_positions, 64);
  c = config("qwen2");
  c.set("sliding_window", 24);
  EXPECT_EQ(describe_model(c).description.num_positions, 64);
  c.set("use_sliding_window", true);
  EXPECT_EQ(describe_model(c).description.num_positions, 24);
  c = config("gpt_neox");
  c.set("rope_parameters", None{});
  c.set("rotary_pct", 1.0);
  c.set("rotary_emb_base", 500);
  EXPECT_EQ(describe_model(c).description.rotary_dims, 0);
  EXPECT_DOUBLE_EQ(describe_model(c).description.rotary_theta, 500);
  c.set("rotary_pct", 0.4);  // 3 of 8
  EXPECT_NE(error_of(c, ErrorKind::kCorrupt).find("need pairs"), std::string::npos);
  c.set("rotary_pct", 1.5);
  EXPECT_NE(error_of(c, ErrorKind::kCorrupt).find("1.5"), std::string::npos);
}

TEST(Family, EncodersThatAreNotComputedAreRefused) {
  Value c = config("bert");
  c.set("architectures", List{Value("BertForQuestionAnswering")});
  EXPECT_NE(error_of(c, ErrorKind::kUnsupported).find("BertForQuestionAnswering"), std::string::npos);
  c.set("architectures", "BertModel");
  error_of(c, ErrorKind::kCorrupt);
  c = config("bert");
  c.set("position_embedding_type", "relative_key");
  EXPECT_NE(error_of(c, ErrorKind::kUnsupported).find("'relative_key'"), std::string::npos);
  c = config("bert");
  c.set("is_decoder", true);
  EXPECT_NE(error_of(c, ErrorKind::kUnsupported).find("is_decoder"), std::string::npos);
  c = config("bert_masked");
  c.set("tie_word_embeddings", false);
  EXPECT_NE(error_of(c, ErrorKind::kUnsupported).find("tie_word_embeddings"), std::string::npos);
  c = config("bert_classification");
  c.set("problem_type", "guess");
  EXPECT_NE(error_of(c, ErrorKind::kCorrupt).find("'guess'"), std::string::npos);
  c = config("bert_classification");
  c.set("id2label", Dict{});
  error_of(c, ErrorKind::kCorrupt);
}

// The prefix may be there or not; a head's bias may stand twice; old files say gamma and beta.
TEST(Family, EncodersAreFoundUnderTheirOtherNames) {
  const FamilyModel masked = describe_model(config("bert_masked"));
  const Stored without = store(masked, "bert.");
  EXPECT_EQ(to_logical(without.index, masked).tensors.size(), masked.tensors.size());
  Stored twice = store(masked);
  TensorEntry bias = *twice.index.find("cls.predictions.bias");
  bias.name = "cls.predictions.decoder.bias";
  twice.index.tensors.push_back(bias);
  twice.index.reindex();
  std::vector<std::string> unexpected;
  to_logical(twice.index, masked, &unexpected);
  EXPECT_TRUE(unexpected.empty());

  const FamilyModel bare = describe_model(config("bert"));
  EXPECT_EQ(bare.tensors.front().hf_name, "embeddings.word_embeddings.weight");
  Stored old = store(bare);
  for (TensorEntry& tensor : old.index.tensors) {
    tensor.name = "bert." + tensor.name;
    const size_t norm = tensor.name.find("LayerNorm.");
    if (norm != std::string::npos)
      tensor.name.replace(norm + 10, std::string::npos, tensor.name.ends_with("bias") ? "beta" : "gamma");
  }
  old.index.reindex();
  const Index logical = to_logical(old.index, bare, &unexpected);
  EXPECT_TRUE(unexpected.empty());
  EXPECT_EQ(logical.tensors.size(), bare.tensors.size());
  EXPECT_NE(logical.find("transformer.seq_layers.1.output.layernorm.bias"), nullptr);
  EXPECT_NE(logical.find("pooler.weight"), nullptr);
}

TEST(Family, DescriptionsSayWhatTheConfigurationSays) {
  const ModelDescription g = describe_model(config("gpt2")).description;
  EXPECT_EQ(g.intermediate_size, 48);  // n_inner is null
  EXPECT_EQ(g.activation, Activation::kGeluTanh);
  EXPECT_EQ(g.attention_head_size, 4);
  EXPECT_EQ(g.scale_attention, -1);
  EXPECT_DOUBLE_EQ(g.hidden_dropout, 0.1);
  const ModelDescription u = describe_model(config("gpt2_untied")).description;
  EXPECT_EQ(u.intermediate_size, 20);
  EXPECT_EQ(u.activation, Activation::kRelu);
  EXPECT_EQ(u.scale_attention, 1);
  EXPECT_TRUE(u.scale_by_inverse_layer);
  EXPECT_DOUBLE_EQ(u.embedding_dropout, 0.25);
  EXPECT_DOUBLE_EQ(u.attention_dropout, 0.5);
  EXPECT_DOUBLE_EQ(u.hidden_dropout, 0.0);
  const ModelDescription l = describe_model(config("llama")).description;
  EXPECT_EQ(l.num_key_value_heads, 3);
  EXPECT_DOUBLE_EQ(l.rotary_theta, 123);
  EXPECT_EQ(l.rotary_factor, 0);
  EXPECT_EQ(l.norm, NormKind::kRmsNorm);
  EXPECT_TRUE(l.gated);
  EXPECT_FALSE(l.attention_bias || l.dense_bias || l.mlp_bias);
  EXPECT_DOUBLE_EQ(l.layernorm_epsilon, 1e-6);
  const ModelDescription r = describe_model(config("llama_grouped")).description;
  EXPECT_EQ(r.num_key_value_heads, 2);
  EXPECT_EQ(r.attention_head_size, 6);
  EXPECT_DOUBLE_EQ(r.rotary_theta, 500000);
  EXPECT_DOUBLE_EQ(r.rotary_factor, 8);
  EXPECT_EQ(r.rotary_original_positions, 8192);
  EXPECT_TRUE(r.attention_bias && r.dense_bias && r.mlp_bias);
}

TEST(Family, RotarySettingsOfOlderConfigurationsAreRead) {
  Value old = config("llama");
  old.set("rope_parameters", None{});
  old.set("rope_theta", 100000);
  EXPECT_DOUBLE_EQ(describe_model(old).description.rotary_theta, 100000);
  old.set("rope_scaling", parse_json(R"({"type": "linear", "factor": 2.0})", "test"));
  EXPECT_NE(error_of(old, ErrorKind::kUnsupported).find("'linear'"), std::string::npos);
  old.set("rope_scaling", parse_json(R"({"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})",
                                     "test"));
  EXPECT_DOUBLE_EQ(describe_model(old).description.rotary_factor, 32);
  EXPECT_DOUBLE_EQ(describe_model(old).description.rotary_theta, 100000);
}

TEST(Family, BadConfigurationsAreNamed) {
  Value c = config("gpt2");
  c.set("model_type", "t5");
  EXPECT_NE(error_of(c, ErrorKind::kInvalidArgument).find("supported are gpt2, llama, mistral, qwen2, gpt_neox, bert"),
            std::string::npos);
  c = config("gpt2");
  c.set("n_embd", None{});
  EXPECT_NE(error_of(c, ErrorKind::kCorrupt).find("n_embd is missing"), std::string::npos);
  c.set("n_embd", "many");
  EXPECT_NE(error_of(c, ErrorKind::kCorrupt).find("n_embd is \"many\""), std::string::npos);
  c.set("n_embd", -12);
  EXPECT_NE(error_of(c, ErrorKind::kCorrupt).find("n_embd"), std::string::npos);
  c.set("n_embd", 13);
  EXPECT_NE(error_of(c, ErrorKind::kCorrupt).find("multiple of n_head"), std::string::npos);
  c = config("gpt2");
  c.set("activation_function", "mish");
  EXPECT_NE(error_of(c, ErrorKind::kUnsupported).find("'mish'"), std::string::npos);
  c = config("llama");
  c.set("num_hidden_layers", int64_t{1} << 30);
  EXPECT_NE(error_of(c, ErrorKind::kCorrupt).find("num_hidden_layers"), std::string::npos);
  c = config("llama");
  c.set("quantization_config", Dict{});
  error_of(c, ErrorKind::kUnsupported);
  error_of(Value(List{}), ErrorKind::kCorrupt);
}

TEST(Family, MissingWrongTwiceAndUnexpectedTensorsAreNamed) {
  const FamilyModel model = describe_model(config("gpt2"));
  Index index = store(model).index;
  const auto add = [&](const std::string& name, Shape shape) {
    index.tensors.push_back({name, Dtype::kF32, shape, {}, ""});
    index.reindex();
  };
  add("transformer.h.0.attn.bias", {1, 1, 16, 16});  // a known buffer
  add("lm_head.weight", {19, 12});                   // a tie
  add("score.weight", {2, 12});
  std::vector<std::string> unexpected;
  to_logical(index, model, &unexpected);
  EXPECT_EQ(unexpected, std::vector<std::string>{"score.weight"});

  add("h.0.ln_1.weight", {12});
  EXPECT_THROW(to_logical(index, model), Error);
  index = store(model).index;
  index.tensors[4].shape = {12, 35};
  try {
    to_logical(index, model);
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(
        std::string(e.what()).find("model.safetensors: tensor 'transformer.h.0.attn.c_attn.weight' has shape [12, 35]"),
        std::string::npos)
        << e.what();
  }
  index = store(model).index;
  index.tensors.erase(index.tensors.begin() + 4);
  index.reindex();
  try {
    to_logical(index, model);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt);
    EXPECT_NE(std::string(e.what()).find("'transformer.h.0.attn.c_attn.weight'"), std::string::npos) << e.what();
  }
}

TEST(Family, ATiedTensorMayStandUnderItsOtherNameOnly) {
  const FamilyModel model = describe_model(config("gpt2"));
  Stored stored = store(model);
  stored.index.tensors[0].name = "lm_head.weight";
  stored.index.reindex();
  EXPECT_EQ(values(to_logical(stored.index, model), stored.bytes, "word_embedding.weight")[0], 1);
}

TEST(Family, CostsCountEmbeddingAndHead) {
  const FamilyModel model = describe_model(config("gpt2"));
  const ModelCosts by_memory = model_costs(model, 1.0), by_work = model_costs(model, 0.0, 1);
  const int64_t block = 2 * 2 * 12 + (12 * 36 + 36) + (12 * 12 + 12) + (12 * 48 + 48) + (48 * 12 + 12);
  EXPECT_EQ(by_memory.parameters, (std::vector<int64_t>{19 * 12 + 16 * 12, block, block, 24 + 19 * 12}));
  const double all = static_cast<double>(19 * 12 + 16 * 12 + 2 * block + 24 + 19 * 12);
  EXPECT_DOUBLE_EQ(by_memory.costs.blocks[0], static_cast<double>(block) / all);
  // Matrices of a block, attention to one position, and the head's matrix.
  const double work = 12 * 36 + 12 * 12 + 2 * 12 * 48 + 2 * 12, head = 19 * 12;
  EXPECT_EQ(by_work.costs.embedding, 0);
  EXPECT_DOUBLE_EQ(by_work.costs.blocks[1], work / (2 * work + head));
  EXPECT_DOUBLE_EQ(by_work.costs.head, head / (2 * work + head));
  EXPECT_GT(model_costs(model, 0.0, 4096).costs.blocks[0], by_work.costs.blocks[0]);
  EXPECT_THROW(model_costs(model, 1.5), Error);
  const ModelCosts untied = model_costs(describe_model(config("gpt2_untied")), 0.8);
  EXPECT_EQ(untied.parameters.back(), 16 + 19 * 8);
}

TEST(Family, CostsCountAnEncodersHeads) {
  const int64_t embedding = (19 + 16 + 2) * 12 + 24;
  const auto ends = [&](const char* name) {
    const std::vector<int64_t> all = model_costs(describe_model(config(name)), 0.5).parameters;
    return std::pair(all.front(), all.back());
  };
  EXPECT_EQ(ends("bert"), std::pair(embedding, int64_t{12 * 12 + 12}));
  EXPECT_EQ(ends("bert_masked"), std::pair(embedding, int64_t{19 + 12 * 12 + 12 + 24 + 19 * 12}));
  EXPECT_EQ(ends("bert_classification"), std::pair(embedding, int64_t{12 * 12 + 12 + 3 * 12 + 3}));
  EXPECT_EQ(ends("gpt_neox"), std::pair(int64_t{19 * 24}, int64_t{48 + 19 * 24}));
  // The pooler sees one position of a sequence.
  const ModelCosts costs = model_costs(describe_model(config("bert")), 0.0, 4);
  const double block = 4 * 12 * 12 + 2 * 12 * 20 + 2 * 12 * 4, head = 12.0 * 12 / 4;
  EXPECT_DOUBLE_EQ(costs.costs.head, head / (2 * block + head));
}

TEST(Family, EachTensorIsOnOneStageATiedEmbeddingOnBothEnds) {
  for (const char* name : {"gpt2", "llama", "gpt_neox", "bert", "bert_masked"}) {
    const FamilyModel model = describe_model(config(name));
    std::vector<size_t> all;
    const Partition partition{{0, 1, 2}};
    for (int s = 0; s < 2; ++s) {
      const std::vector<size_t> stage = stage_tensors(model, partition, s);
      EXPECT_TRUE(std::is_sorted(stage.begin(), stage.end()));
      all.insert(all.end(), stage.begin(), stage.end());
    }
    std::sort(all.begin(), all.end());
    EXPECT_EQ(all.size(), model.tensors.size() + (model.description.tied_head ? 1 : 0));
    all.erase(std::unique(all.begin(), all.end()), all.end());
    EXPECT_EQ(all.size(), model.tensors.size());
    EXPECT_EQ(stage_tensors(model, {{0, 2}}, 0).size(), model.tensors.size());
    EXPECT_THROW(stage_tensors(model, {{0, 3}}, 0), Error);
  }
}

TEST(Family, WhatBecameOfTheNamesIsToldInsteadOfThrown) {
  const FamilyModel model = describe_model(config("gpt2"));
  Index index = store(model).index;
  index.tensors[0].name = "_orig_mod.module.transformer.wte.weight";
  index.tensors[1].name = "wpe.weight";
  index.tensors.erase(index.tensors.begin() + 4);
  index.tensors.push_back({"score.weight", Dtype::kF32, {2, 12}, {}, ""});
  index.reindex();
  NameReport report;
  const Index logical = to_logical(index, model, report);
  EXPECT_EQ(report.missing, std::vector<std::string>{"transformer.h.0.attn.c_attn.weight"});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"score.weight"});
  const std::vector<std::pair<std::string, std::string>> renamed = {
      {"_orig_mod.module.transformer.wte.weight", "transformer.wte.weight"}, {"wpe.weight", "transformer.wpe.weight"}};
  EXPECT_EQ(report.renamed, renamed);
  EXPECT_EQ(logical.find("transformer.seq_layers.0.attention.query.weight"), nullptr);
  EXPECT_NE(logical.find("position_embedding.weight"), nullptr);
}

}  // namespace
}  // namespace shardsmith
