// The verbs that write a checkpoint or model as another: merge, convert, export and reshard.
#include <algorithm>
#include <iostream>

#include "base/error.h"
#include "checkpoint/load.h"
#include "cli/command_line.h"
#include "cli/conversion.h"
#include "cli/describe.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "cli/source.h"
#include "cli/staged_output.h"
#include "cli/verbs.h"
#include "format/detect.h"

namespace shardsmith::cli {
namespace {

// What the command line says, before it is understood.
struct Words {
  std::string in, out, out_option, to, dtype, family, config, memory_limit = "256MiB", max_shard_size, names;
};

class ConvertLine {
 public:
  ConvertLine(const std::string& verb, const std::string& description) : verb_(verb), line_(verb, description) {
    CLI::App& app = line_.app();
    app.add_option("IN", words.in,
                   "A checkpoint or model: a file, or its own folder (of a folder of checkpoints the newest)")
        ->required();
    auto* positional = app.add_option("OUT", words.out, "What to write");
    app.add_option("-o,--output", words.out_option, "What to write")->excludes(positional);
    app.add_flag("--overwrite", request.overwrite, "Replace what is there");
    app.add_option("--memory-limit", words.memory_limit, "Bytes of memory to work in")->capture_default_str();
    app.add_option("--threads", request.threads, "Threads that read")->capture_default_str()->check(CLI::Range(1, 256));
  }
  CLI::App& app() { return line_.app(); }
  const Output& output() const { return line_.output(); }

  void add_selection() {
    app().add_option("--dtype", words.dtype,
                     "Of floating-point weights: float32, float16, bfloat16, float64; default: as they are");
    app().add_option("--include", request.include, "Only tensors whose name matches this glob (may be repeated)");
    app().add_option("--exclude", request.exclude, "No tensors whose name matches this glob (may be repeated)");
    add_config();
  }
  void add_config() {
    app().add_option("--config", words.config, "A config.json (or its folder) for a source that has none");
    app().add_option("--family", words.family, "The model's family, where its shapes tell the rest (gpt2)");
  }
  void add_shard_size(const char* default_words) {
    app().add_option("--max-shard-size", words.max_shard_size,
                     str("Largest weight file (a larger tensor has one of its own); default: ", default_words));
  }
  void add_layout() {
    app().add_option("--pipeline-parallel-degree", request.pp, "Pipeline stages; default: as they are");
    app().add_option("--tensor-parallel-degree", request.tp, "Ranks that share each layer; default: as they are");
    app().add_option("--world-size", request.world_size, "Ranks in all; default: pipeline x tensor");
    app().add_option("--placement-strategy", request.placement, "cluster, spread or a permutation of DPT");
    app()
        .add_option("--memory-weight", request.memory_weight, "Balance memory (1) or computation (0) over the stages")
        ->check(CLI::Range(0.0, 1.0));
  }

  bool parse(const Arguments& arguments) {
    if (!line_.parse(arguments)) return false;
    request.from = choose_source(existing_path(local_storage(), words.in));
    const std::string to = words.out.empty() ? words.out_option : words.out;
    if (to.empty()) fail(ErrorKind::kInvalidArgument, verb_, ": where to? (shardsmith ", verb_, " IN OUT)");
    request.to = absolute_path(to);
    request.memory_limit = parse_size(words.memory_limit, "--memory-limit");
    if (!words.max_shard_size.empty()) request.max_shard_size = parse_size(words.max_shard_size, "--max-shard-size");
    if (!words.dtype.empty()) request.dtype = float_dtype(words.dtype);
    if (request.pp < 0 || request.tp < 0 || request.world_size < 0)
      fail(ErrorKind::kInvalidArgument, verb_, ": degrees and --world-size must be at least 1");
    read_config();
    request.progress = line_.output().progress();
    request.notice = [this](std::string_view text) { line_.output().notice(text); };
    return true;
  }

  int run() {
    catch_signals();
    print(convert(local_storage(), request));
    return 0;
  }

  Conversion request;
  Words words;

 private:
  Dtype float_dtype(const std::string& word) const {
    static const std::vector<std::string> known{"float32", "float16", "bfloat16", "float64"};
    if (std::find(known.begin(), known.end(), word) != known.end()) return *dtype_from_torch(word);
    const std::string near = nearest(word, known);
    fail(ErrorKind::kInvalidArgument, verb_, ": --dtype is '", word,
         "', it can be float32, float16, bfloat16 or float64",
         near.empty() ? std::string() : str("; did you mean ", near, "?"));
  }

  std::string choose_source(const std::string& from) const {
    Storage& storage = local_storage();
    const auto stat = storage.stat(from);
    if (!stat.exists) fail(ErrorKind::kNotFound, from, ": there is nothing");
    if (base_name(from) == kManifestName) return parent(absolute_path(from));
    if (!stat.is_directory) return absolute_path(from);
    if (storage.stat(join(from, kManifestName)).exists || !detect_format(storage, from).empty() ||
        !holds_checkpoints(storage, from))
      return absolute_path(from);
    std::vector<std::string> passed_over;
    const auto found = find_checkpoint(storage, from, "", &passed_over);
    if (!found)
      fail(ErrorKind::kCorrupt, from, ": no complete checkpoint", passed_over.empty() ? "" : ": " + passed_over[0]);
    for (const std::string& text : passed_over) output().notice(str("passed over ", text));
    return absolute_path(found->folder);
  }

  void read_config() {
    Storage& storage = local_storage();
    if (!words.config.empty() && !words.family.empty())
      fail(ErrorKind::kInvalidArgument, verb_, ": --config says the family already; leave --family out");
    if (!words.config.empty()) {
      const std::string given = given_path(words.config);
      const std::string path = storage.stat(given).is_directory ? join(given, "config.json") : given;
      request.config = parse_json(read_text(storage, path), path);
    }
    request.family = words.family;
  }

  void print(const ConversionResult& result) const {
    for (const std::string& text : result.left_out) output().notice(str("left out ", text));
    for (const std::string& text : result.left_behind) output().notice(text);
    if (request.format == "hf" && !result.tokenizer)
      output().notice(str(request.to, ": has no tokenizer, there was none beside the checkpoint"));
    if (output().json) {
      Value object;
      object.set("source", request.from);
      object.set("source_format", result.from_format);
      if (result.manifest) {
        object.set("checkpoint", request.from);
        object.set("step", result.manifest->step);
      }
      object.set("output", request.to);
      object.set("format", result.format);
      object.set("tensors", static_cast<int64_t>(result.tensors));
      object.set("files", static_cast<int64_t>(result.files));
      object.set("bytes", static_cast<int64_t>(result.bytes));
      object.set("bytes_read", static_cast<int64_t>(result.bytes_read));
      if (request.format == "hf") object.set("tokenizer", result.tokenizer);
      object.set("left_out", to_value(result.left_out));
      object.set("left_behind", to_value(result.left_behind));
      output().print(object);
      return;
    }
    std::cout << printable(request.to) << ": ";
    if (result.manifest) std::cout << "step " << result.manifest->step << ", ";
    std::cout << result.format << ", " << result.tensors << (result.tensors == 1 ? " tensor, " : " tensors, ")
              << human_bytes(result.bytes) << " in " << result.files << (result.files == 1 ? " file" : " files")
              << (result.tokenizer ? ", with tokenizer" : "") << "\n";
  }

  std::string verb_;
  CommandLine line_;
};

}  // namespace

int run_merge(const Arguments& arguments) {
  ConvertLine line("merge",
                   "The weights of a checkpoint as one file, under the names that the model has in transformers where "
                   "its family is\n"
                   "known. --to full takes optimizer and user content along, as files beside it.");
  line.words.to = "pt";
  line.app().add_option("--to", line.words.to, "pt, safetensors or full")->capture_default_str();
  line.add_selection();
  if (!line.parse(arguments)) return 0;
  const std::string& to = line.words.to;
  check_choice("merge", "--to", to, {"pt", "safetensors", "full"});
  line.request.format = to;
  line.request.names = Names::kHuggingFace;
  line.request.weights_only = to != "full";
  return line.run();
}

int run_export(const Arguments& arguments) {
  ConvertLine line("export",
                   "A checkpoint as a Hugging Face folder: config.json, safetensors and tokenizer, for transformers.\n"
                   "OUT appears whole or not at all.");
  line.add_selection();
  line.add_shard_size("5GB");
  if (!line.parse(arguments)) return 0;
  line.request.format = "hf";
  line.request.names = Names::kHuggingFace;
  line.request.weights_only = true;
  return line.run();
}

int run_convert(const Arguments& arguments) {
  ConvertLine line(
      "convert",
      "A checkpoint or model in another format. What the target can hold is taken along: all values to pt, dcp\n"
      "and partial, tensors alone to safetensors and hf; what it can't hold is refused by name, or said.");
  line.app().add_option("--to", line.words.to, "pt, safetensors, hf, dcp, partial or full")->required();
  line.app().add_flag("--weights-only", line.request.weights_only, "Without optimizer state and what stands beside it");
  line.app().add_option("--names", line.words.names,
                        "hf: the names of transformers, logical: ours; default: as the target is used to");
  line.add_selection();
  line.add_shard_size("5GB for hf, none for safetensors");
  line.add_layout();
  if (!line.parse(arguments)) return 0;
  Conversion& request = line.request;
  request.format = line.words.to;
  const std::string& names = line.words.names;
  if (!names.empty()) check_choice("convert", "--names", names, {"hf", "logical"});
  const bool flat = request.format == "hf" || request.format == "safetensors";
  if (request.format == "partial")
    request.names = Names::kLogical;
  else if (names == "hf" || (names.empty() && (flat || request.format == "full")))
    request.names = Names::kHuggingFace;
  else if (names == "logical")
    request.names = Names::kLogical;
  return line.run();
}

int run_reshard(const Arguments& arguments) {
  ConvertLine line(
      "reshard",
      "A checkpoint in another layout, to go on with another number of devices: weights, masters and moments.");
  line.app().add_flag("--weights-only", line.request.weights_only, "Without optimizer state and what stands beside it");
  line.add_layout();
  line.add_config();
  if (!line.parse(arguments)) return 0;
  if (line.request.pp == 0 && line.request.tp == 0 && line.request.world_size == 0)
    fail(ErrorKind::kInvalidArgument,
         "reshard: to which layout? (--pipeline-parallel-degree, --tensor-parallel-degree)");
  line.request.format = "partial";
  line.request.names = Names::kLogical;
  return line.run();
}

}  // namespace shardsmith::cli
