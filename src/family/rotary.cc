#include <cmath>

#include "base/error.h"
#include "family/families.h"

namespace shardsmith {
namespace {

// int(head size * share), as transformers has it.
int64_t rotated(double share, int64_t head_size) {
  if (!(share > 0 && share <= 1))
    fail(ErrorKind::kCorrupt, "config.json: the rotated share of a head is ", share,
         ", expected more than 0, at most 1");
  const auto dims = static_cast<int64_t>(static_cast<double>(head_size) * share);
  if (dims < 2 || dims % 2 != 0) {
    fail(ErrorKind::kCorrupt, "config.json: ", dims, " of a head's ", head_size,
         " dimensions would be rotated; rotary positions need pairs");
  }
  return dims == head_size ? 0 : dims;
}

}  // namespace

// transformers 5 keeps all of it in `rope_parameters`; before, theta and the rotated share stood alone and the rest in
// `rope_scaling`.
void read_rotary(const Config& config, const char* base, const char* share, double part, ModelDescription& d) {
  d.position = PositionKind::kRotary;
  d.rotary_theta = config.number(base, config.number("rope_theta", 10000));
  part = config.number(share, config.number("partial_rotary_factor", part));
  const Value* dict = config.find("rope_parameters");
  if (!dict) dict = config.find("rope_scaling");
  if (!dict) {
    d.rotary_dims = rotated(part, d.attention_head_size);
    return;
  }
  if (!dict->get_if<Dict>()) fail(ErrorKind::kCorrupt, "config.json: rope_parameters is no object: ", to_json(*dict));
  const Config rope(*dict);
  d.rotary_theta = rope.number("rope_theta", d.rotary_theta);
  d.rotary_dims = rotated(rope.number("partial_rotary_factor", part), d.attention_head_size);
  const std::string type = rope.word("rope_type", rope.word("type", "default"));
  if (type == "default") return;
  if (type != "llama3") {
    fail(ErrorKind::kUnsupported, "config.json: rope_type '", type, "' is not supported; default and llama3 are");
  }
  d.rotary_factor = rope.number("factor");
  d.rotary_low_freq_factor = rope.number("low_freq_factor");
  d.rotary_high_freq_factor = rope.number("high_freq_factor");
  d.rotary_original_positions = rope.size("original_max_position_embeddings");
  if (d.rotary_factor < 1 || d.rotary_low_freq_factor <= 0 || d.rotary_high_freq_factor <= d.rotary_low_freq_factor) {
    fail(ErrorKind::kCorrupt, "config.json: rope_parameters ", to_json(*dict),
         " make no sense: factor must be at least 1, and high_freq_factor above low_freq_factor");
  }
}

}  // namespace shardsmith
