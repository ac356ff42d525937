#include <cmath>

#include "base/error.h"
#include "family/families.h"

namespace shardsmith {
namespace {

std::optional<double> as_number(const Value& value) {
  if (const int64_t* i = value.get_if<int64_t>()) return static_cast<double>(*i);
  if (const double* d = value.get_if<double>()) return *d;
  return std::nullopt;
}

[[noreturn]] void wrong(const char* key, const Value& found, const char* expected) {
  fail(ErrorKind::kCorrupt, "config.json: ", key, " is ", to_json(found), ", expected ", expected);
}

}  // namespace

const Value* Config::find(const char* key) const {
  const Value* found = value_.find(key);
  return found && found->is_none() ? nullptr : found;
}

bool Config::is_null(const char* key) const {
  const Value* found = value_.find(key);
  return found && found->is_none();
}

int64_t Config::size(const char* key) const {
  const Value* found = find(key);
  if (!found) fail(ErrorKind::kCorrupt, "config.json: ", key, " is missing");
  const int64_t* number = found->get_if<int64_t>();
  if (!number || *number < 1 || *number > (int64_t{1} << 31)) wrong(key, *found, "a whole number of at least 1");
  return *number;
}

int64_t Config::size(const char* key, int64_t otherwise) const { return find(key) ? size(key) : otherwise; }

double Config::number(const char* key) const {
  const Value* found = find(key);
  if (!found) fail(ErrorKind::kCorrupt, "config.json: ", key, " is missing");
  const auto value = as_number(*found);
  if (!value || !std::isfinite(*value)) wrong(key, *found, "a number");
  return *value;
}

double Config::number(const char* key, double otherwise) const { return find(key) ? number(key) : otherwise; }

double Config::probability(const char* key, double otherwise) const {
  const double p = number(key, otherwise);
  if (p < 0 || p >= 1) wrong(key, *find(key), "a probability");
  return p;
}

bool Config::flag(const char* key, bool otherwise) const {
  const Value* found = find(key);
  if (!found) return otherwise;
  const bool* flag = found->get_if<bool>();
  if (!flag) wrong(key, *found, "true or false");
  return *flag;
}

std::string Config::word(const char* key, const std::string& otherwise) const {
  const Value* found = find(key);
  if (!found) return otherwise;
  const std::string* word = found->get_if<std::string>();
  if (!word) wrong(key, *found, "a word");
  return *word;
}

Activation activation_from(const std::string& word) {
  if (word == "gelu_new" || word == "gelu_pytorch_tanh") return Activation::kGeluTanh;
  if (word == "gelu") return Activation::kGelu;
  if (word == "relu") return Activation::kRelu;
  if (word == "silu" || word == "swish") return Activation::kSilu;
  fail(ErrorKind::kUnsupported, "config.json: activation '", word,
       "' is not supported; gelu_new, gelu_pytorch_tanh, gelu, relu and silu are");
}

int64_t padding_row(const Config& config, int64_t vocab_size) {
  const double none = 0.5;
  const double given = config.number("pad_token_id", none);
  if (given == none) return -1;
  const bool in_range = given >= -9e15 && given <= 9e15;  // otherwise the cast is undefined
  const auto row = in_range ? static_cast<int64_t>(given) : 0;
  if (!in_range || static_cast<double>(row) != given || row < -vocab_size || row >= vocab_size) {
    fail(ErrorKind::kCorrupt, "config.json: pad_token_id ", given, " is no row of a vocabulary of ", vocab_size);
  }
  return row < 0 ? row + vocab_size : row;
}

void read_equal_heads(const Config& config, const char* hidden, const char* heads, ModelDescription& d) {
  d.hidden_size = config.size(hidden);
  d.num_attention_heads = d.num_key_value_heads = config.size(heads);
  if (d.hidden_size % d.num_attention_heads != 0) {
    fail(ErrorKind::kCorrupt, "config.json: ", hidden, " ", d.hidden_size, " is not a multiple of ", heads, " ",
         d.num_attention_heads);
  }
  d.attention_head_size = d.hidden_size / d.num_attention_heads;
}

std::string block_name(int64_t i) { return str("transformer.seq_layers.", i, "."); }

void TensorList::add(FamilyTensor tensor) {
  tensor.hf_name = model_.prefix + tensor.hf_name;
  model_.tensors.push_back(std::move(tensor));
}

void TensorList::plain(int place, const std::string& hf, const std::string& ours, Shape shape) {
  Piece piece{.name = ours, .shape = shape, .permutation = {}, .offset = Shape(shape.size(), 0)};
  for (size_t d = 0; d < shape.size(); ++d) piece.permutation.push_back(static_cast<int>(d));
  add({.hf_name = hf, .shape = std::move(shape), .pieces = {std::move(piece)}, .place = place});
}

void TensorList::transposed(int place, const std::string& hf, const std::string& ours, int64_t out, int64_t in) {
  add({.hf_name = hf, .shape = {in, out}, .pieces = {{ours, {out, in}, {1, 0}, {0, 0}}}, .place = place});
}

void TensorList::linear(int place, const std::string& hf, const std::string& ours, int64_t out, int64_t in, bool bias) {
  plain(place, hf + ".weight", ours + ".weight", {out, in});
  if (bias) plain(place, hf + ".bias", ours + ".bias", {out});
}

void TensorList::layernorm(int place, const std::string& hf, const std::string& ours) {
  for (const char* part : {".weight", ".bias"}) plain(place, hf + part, ours + part, {model_.description.hidden_size});
}

void TensorList::head(const std::string& hf, const std::string& ours) {
  const ModelDescription& d = model_.description;
  if (d.tied_head) {
    model_.tensors.front().also_last = true;
    model_.tied_names.push_back(hf);
    return;
  }
  plain(static_cast<int>(d.num_layers), hf, ours, {d.vocab_size, d.hidden_size});
  model_.tensors.back().hf_name = hf;  // beside the base model, not in it
}

}  // namespace shardsmith
