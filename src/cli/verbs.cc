#include "cli/verbs.h"

namespace shardsmith::cli {

const std::vector<Verb>& all_verbs() {
  static const std::vector<Verb> verbs = {
      {"ls", "the checkpoints in a folder, newest first", run_ls,
       "  shardsmith ls out\n"
       "  shardsmith ls out --json"},
      {"inspect", "what a checkpoint or model holds: tensors, values, layout", run_inspect,
       "  shardsmith inspect out/step40_partial\n"
       "  shardsmith inspect model.safetensors --filter layers.3. --slices\n"
       "  shardsmith inspect out/step40_partial --html layout.html"},
      {"verify", "checks every byte that has a checksum, and the structure", run_verify,
       "  shardsmith verify out\n"
       "  shardsmith verify out/step40_partial --values"},
      {"diff", "what two checkpoints or models differ in", run_diff,
       "  shardsmith diff out/step20_partial out/step40_partial --exclude 'rng_*'\n"
       "  shardsmith diff out/step40_partial exported --rtol 1e-3 --atol 1e-5 --ignore-dtype"},
      {"merge", "the weights of a checkpoint as one file", run_merge,
       "  shardsmith merge out/step40_partial model.pt\n"
       "  shardsmith merge out/step40_partial model.safetensors --to safetensors"},
      {"reshard", "a checkpoint in another layout", run_reshard,
       "  shardsmith reshard out/step40_partial other/step40_partial --pipeline-parallel-degree 4"},
      {"convert", "a checkpoint or model in another format", run_convert,
       "  shardsmith convert pytorch_model.bin model.safetensors --to safetensors\n"
       "  shardsmith convert model half --to hf --dtype bfloat16 --max-shard-size 5GB"},
      {"export", "a checkpoint as a Hugging Face folder", run_export,
       "  shardsmith export out/step40_partial exported\n"
       "  shardsmith export out exported --dtype bfloat16"},
      {"prune", "removes old checkpoints of a folder", run_prune,
       "  shardsmith prune out --keep-last 3 --keep-every 1000 --dry-run\n"
       "  shardsmith prune out --keep-last 3 --keep step500 --yes"},
      {"plan", "what each rank would hold, from a config.json alone", run_plan,
       "  shardsmith plan --config model --pipeline-parallel-degree 4"},
      {"completion", "completions for bash, zsh or fish", run_completion,
       "  source <(shardsmith completion bash)\n"
       "  shardsmith completion zsh > \"${fpath[1]}/_shardsmith\"\n"
       "  shardsmith completion fish > ~/.config/fish/completions/shardsmith.fish"},
  };
  return verbs;
}

const Verb* find_verb(const std::string& name) {
  for (const Verb& verb : all_verbs()) {
    if (name == verb.name) return &verb;
  }
  return nullptr;
}

const char* external_summary(const std::string& verb) {
  return verb == "finetune" ? "fine-tunes a model over many processes" : "";
}

}  // namespace shardsmith::cli
