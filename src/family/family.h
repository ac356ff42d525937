// Family: a view on an Index. Hugging Face names become ours and back, as boxes and strides;
// no bytes are touched. A new family is one file that fills a Family and is listed in family.cc.
//
// Our names (logical, unfused, nn.Linear orientation [out, in]):
//   word_embedding.weight [V, H]   position_embedding.weight [P, H]
//   transformer.seq_layers.{i}.attention.{query,key,value,dense}.{weight,bias}
//   transformer.seq_layers.{i}.attention.{pre_layernorm|layernorm}.{weight,bias}
//   transformer.seq_layers.{i}.output.{dense1,dense2 | gate,up,down}.{weight,bias}
//   transformer.seq_layers.{i}.output.{pre_layernorm|layernorm}.{weight,bias}
//   layernorm.{weight,bias}        lm_head.weight [V, H] (absent where tied)
// and of an encoder (post_layernorm blocks have `layernorm` where others have `pre_layernorm`, and no final one):
//   token_type_embedding.weight [T, H]   embedding_layernorm.{weight,bias}   pooler.{weight,bias} [H, H]
//   lm_head.transform.{weight,bias} [H, H]   lm_head.layernorm.{weight,bias}   lm_head.bias [V]
//   classifier.{weight,bias} [num_labels, H]
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "family/description.h"
#include "layout/index.h"
#include "layout/partition.h"

namespace shardsmith {

// The part of a Hugging Face tensor that is one logical tensor: logical dimension d is Hugging Face dimension
// permutation[d]; the piece begins at `offset` in the Hugging Face tensor. Where `run` isn't 0 its rows (logical
// dimension 0) don't lie together: each `run` rows begin `step` after the ones before, along permutation[0]. So with
// GPT-NeoX's [heads * 3 * d, H]: query's run is d, its step 3 * d. `run` divides shape[0].
struct Piece {
  std::string name;  // logical
  Shape shape;       // logical
  std::vector<int> permutation;
  Shape offset;
  int64_t run = 0;
  int64_t step = 0;

  int64_t runs() const { return run ? shape[0] / run : 1; }
  // Of run r: its box in the logical tensor, and in the Hugging Face tensor.
  Box logical_box(int64_t r) const;
  Box hf_box(int64_t r) const;
};

// Where a tensor belongs: -1 the embedding (stage 0), 0..L-1 a block, L the final norm and head (last stage).
struct FamilyTensor {
  std::string hf_name;
  Shape shape;                // as in the Hugging Face file
  std::vector<Piece> pieces;  // tile it
  int64_t row_unit() const;   // Hugging Face rows that can't be torn apart: 1, or a step of the pieces in runs
  int place = 0;
  bool also_last = false;  // a tied embedding: the last stage holds a copy too
  std::vector<std::string> aliases =
      {};  // other names, prefix included, that files have for it, beside hf_name or instead
};

struct FamilyModel {
  ModelDescription description;
  std::vector<FamilyTensor> tensors;          // in the order of the module tree
  std::vector<std::string> tied_names;        // other Hugging Face names of tied tensors ("lm_head.weight")
  std::vector<std::string> ignored_suffixes;  // known buffers: ".attn.bias", ".rotary_emb.inv_freq"
  std::string prefix;                         // "transformer." / "model.": files may lack it, or have it besides
  std::string architecture;                   // transformers' class for it: "GPT2LMHeadModel"
};

// From config.json's content. Throws kInvalidArgument that names the supported model types when model_type is none of
// them, kUnsupported for an option of a known family that we don't compute (activation, rope type, architecture),
// kCorrupt where a needed key is missing or no sensible number.
FamilyModel describe_model(const Value& hf_config);
std::vector<std::string> supported_model_types();

// A tensor of that shape (the parameter, or a moment of it) as its logical pieces. A piece in runs gets a slice for
// each.
std::vector<TensorEntry> logical_pieces(const TensorEntry& hf, const FamilyTensor& tensor);

// hf names (as found in files: with or without prefix, ties present or absent, known buffers) -> our names.
// Throws kCorrupt for a tensor that is missing or has another shape. Unknown tensors go to `unexpected`.
Index to_logical(const Index& hf, const FamilyModel& model, std::vector<std::string>* unexpected = nullptr);

// What became of the names.
struct NameReport {
  std::vector<std::string> missing;                          // Hugging Face names of the model that are not in the file
  std::vector<std::string> unexpected;                       // names in the file, in its order, that the model has not
  std::vector<std::pair<std::string, std::string>> renamed;  // (in the file, in the model), where they differ
};
// The same; a tensor that is missing is told instead of thrown.
Index to_logical(const Index& hf, const FamilyModel& model, NameReport& report);
// A name without what wrappers put before it: "module.", "_orig_mod.", any number of them.
std::string_view without_wrappers(std::string_view name);
// our names -> Hugging Face names, tied names once. Entries that aren't the model's are dropped.
Index to_hf(const Index& logical, const FamilyModel& model);

// Per place (embedding, blocks, head): parameters, and cost for make_partition: memory_weight * share of parameters +
// (1 - memory_weight) * share of multiply-adds per token at sequence length `sequence`.
struct ModelCosts {
  std::vector<int64_t>
      parameters;  // L + 2 entries: embedding, blocks, final norm + head (a tied head counted there too)
  PartitionCosts costs;
};
ModelCosts model_costs(const FamilyModel& model, double memory_weight, int64_t sequence = 1024);

// The places that stage `s` holds, as indices into model.tensors (a tied embedding on both ends).
std::vector<size_t> stage_tensors(const FamilyModel& model, const Partition& partition, int stage);

}  // namespace shardsmith
