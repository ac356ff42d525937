// BERT: an encoder with its norms after the residual sums. `architectures` in config.json says what stands on it; a
// config.json without that is a bare BertModel. Files from before transformers 1.0 name the norms' weights gamma, beta.
#include <iterator>
#include <utility>

#include "base/error.h"
#include "family/families.h"

namespace shardsmith {
namespace {

HeadKind head_of(const Config& config) {
  const Value* found = config.find("architectures");
  const List* list = found ? found->get_if<List>() : nullptr;
  if (found && !list) fail(ErrorKind::kCorrupt, "config.json: architectures is no list: ", to_json(*found));
  if (!list || list->empty()) return HeadKind::kNone;
  const std::string* name = list->front().get_if<std::string>();
  if (name && *name == "BertModel") return HeadKind::kNone;
  if (name && *name == "BertForMaskedLM") return HeadKind::kMaskedLm;
  if (name && *name == "BertForSequenceClassification") return HeadKind::kClassification;
  fail(ErrorKind::kUnsupported, "config.json: architecture ", to_json(list->front()),
       " is not supported for model_type bert; BertModel, BertForMaskedLM and BertForSequenceClassification are");
}

ProblemKind problem_of(const Config& config) {
  const std::string word = config.word("problem_type", "");
  if (word.empty()) return ProblemKind::kByLabels;
  if (word == "regression") return ProblemKind::kRegression;
  if (word == "single_label_classification") return ProblemKind::kSingleLabel;
  if (word == "multi_label_classification") return ProblemKind::kMultiLabel;
  fail(ErrorKind::kCorrupt, "config.json: problem_type is '", word,
       "', expected regression, single_label_classification or multi_label_classification");
}

// transformers writes the labels' names and leaves num_labels out.
int64_t labels_of(const Config& config) {
  if (config.find("num_labels")) return config.size("num_labels");
  const Value* names = config.find("id2label");
  if (!names) return 2;
  const Dict* dict = names->get_if<Dict>();
  if (!dict || dict->items.empty())
    fail(ErrorKind::kCorrupt, "config.json: id2label names no label: ", to_json(*names));
  return static_cast<int64_t>(dict->items.size());
}

void refuse_options(const Config& config, const ModelDescription& d) {
  for (const char* option : {"is_decoder", "add_cross_attention"}) {
    if (config.flag(option, false))
      fail(ErrorKind::kUnsupported, "config.json: ", option, " is not supported for model_type bert");
  }
  const std::string position = config.word("position_embedding_type", "absolute");
  if (position != "absolute") {
    fail(ErrorKind::kUnsupported, "config.json: position_embedding_type '", position,
         "' is not supported; absolute is");
  }
  if (d.head == HeadKind::kMaskedLm && !config.flag("tie_word_embeddings", true)) {
    fail(ErrorKind::kUnsupported,
         "config.json: tie_word_embeddings false is not supported for BertForMaskedLM; its decoder is the embedding");
  }
}

ModelDescription read(const Config& config) {
  ModelDescription d;
  d.model_type = "bert";
  d.head = head_of(config);
  refuse_options(config, d);
  d.num_layers = config.size("num_hidden_layers");
  read_equal_heads(config, "hidden_size", "num_attention_heads", d);
  d.intermediate_size = config.size("intermediate_size");
  d.vocab_size = config.size("vocab_size");
  d.num_positions = config.size("max_position_embeddings", 512);
  d.num_token_types = config.size("type_vocab_size", 2);
  // A key that isn't there is transformers' default, row 0; null is none.
  d.padding_idx = config.find("pad_token_id") || config.is_null("pad_token_id") ? padding_row(config, d.vocab_size) : 0;
  d.layernorm_epsilon = config.number("layer_norm_eps", 1e-12);
  d.activation = activation_from(config.word("hidden_act", "gelu"));
  d.causal = false;
  d.post_layernorm = d.embedding_layernorm = true;
  d.tied_head = d.head_transform = d.head_bias = d.head == HeadKind::kMaskedLm;
  d.has_pooler = d.head != HeadKind::kMaskedLm;
  d.embedding_dropout = d.hidden_dropout = config.probability("hidden_dropout_prob", 0.1);
  d.attention_dropout = config.probability("attention_probs_dropout_prob", 0.1);
  if (d.head == HeadKind::kClassification) {
    d.num_labels = labels_of(config);
    d.problem = problem_of(config);
    d.classifier_dropout = config.probability("classifier_dropout", d.hidden_dropout);
  }
  d.initializer_range = config.number("initializer_range", 0.02);
  return d;
}

}  // namespace

FamilyModel describe_bert(const Value& value) {
  FamilyModel model;
  model.description = read(Config(value));
  const ModelDescription& d = model.description;
  // The bare model's own file has no prefix; where it stands below a head it has.
  model.prefix = d.head == HeadKind::kNone ? "" : "bert.";
  model.architecture = d.head == HeadKind::kNone       ? "BertModel"
                       : d.head == HeadKind::kMaskedLm ? "BertForMaskedLM"
                                                       : "BertForSequenceClassification";
  model.ignored_suffixes = {"embeddings.position_ids", "embeddings.token_type_ids"};
  const int64_t h = d.hidden_size, f = d.intermediate_size;
  const int last = static_cast<int>(d.num_layers);
  TensorList list(model);
  const auto norm = [&](int place, const std::string& hf, const std::string& ours) {
    list.layernorm(place, hf, ours);
    std::prev(model.tensors.end(), 2)->aliases = {model.prefix + hf + ".gamma"};
    model.tensors.back().aliases = {model.prefix + hf + ".beta"};
  };
  list.plain(-1, "embeddings.word_embeddings.weight", "word_embedding.weight", {d.vocab_size, h});
  list.plain(-1, "embeddings.position_embeddings.weight", "position_embedding.weight", {d.num_positions, h});
  list.plain(-1, "embeddings.token_type_embeddings.weight", "token_type_embedding.weight", {d.num_token_types, h});
  norm(-1, "embeddings.LayerNorm", "embedding_layernorm");
  for (int i = 0; i < last; ++i) {
    const std::string hf = str("encoder.layer.", i, "."), ours = block_name(i);
    for (const char* part : {"query", "key", "value"})
      list.linear(i, hf + "attention.self." + part, ours + "attention." + part, h, h);
    list.linear(i, hf + "attention.output.dense", ours + "attention.dense", h, h);
    norm(i, hf + "attention.output.LayerNorm", ours + "attention.layernorm");
    list.linear(i, hf + "intermediate.dense", ours + "output.dense1", f, h);
    list.linear(i, hf + "output.dense", ours + "output.dense2", h, f);
    norm(i, hf + "output.LayerNorm", ours + "output.layernorm");
  }
  if (d.has_pooler) list.linear(last, "pooler.dense", "pooler", h, h);

  // The heads stand beside the base model, without its prefix.
  const std::string prefix = std::exchange(model.prefix, "");
  if (d.head == HeadKind::kMaskedLm) {
    list.plain(last, "cls.predictions.bias", "lm_head.bias", {d.vocab_size});
    model.tensors.back().aliases = {"cls.predictions.decoder.bias"};
    list.linear(last, "cls.predictions.transform.dense", "lm_head.transform", h, h);
    norm(last, "cls.predictions.transform.LayerNorm", "lm_head.layernorm");
    list.head("cls.predictions.decoder.weight");
  }
  if (d.head == HeadKind::kClassification) list.linear(last, "classifier", "classifier", d.num_labels, h);
  model.prefix = d.head == HeadKind::kNone ? "bert." : prefix;
  return model;
}

}  // namespace shardsmith
