#include "cli/export.h"

#include <iostream>

#include "base/error.h"
#include "cli/command_line.h"
#include "cli/signals.h"
#include "cli/source.h"
#include "cli/verbs.h"

namespace shardsmith::cli {

int run_export(const Arguments& arguments) {
  CommandLine line(
      "export",
      "A partial checkpoint as a Hugging Face folder: config.json, safetensors and tokenizer, for transformers.\n"
      "OUT appears whole or not at all.");
  ExportOptions options;
  std::string out, out_option, shard_size = "5GB", dtype;
  auto& app = line.app();
  app.add_option("IN", options.from, "A partial checkpoint, or a folder of them (its newest)")->required();
  auto* positional = app.add_option("OUT", out, "The folder to write");
  app.add_option("-o,--output", out_option, "The folder to write")->excludes(positional);
  app.add_option("--max-shard-size", shard_size, "Largest weight file (a larger tensor has one of its own)")
      ->capture_default_str();
  app.add_option("--dtype", dtype, "float32, float16 or bfloat16; default: as saved");
  app.add_flag("--overwrite", options.overwrite, "Replace a folder that is not empty");
  if (!line.parse(arguments)) return 0;

  options.from = given_path(options.from);
  options.to = out.empty() ? out_option : out;
  if (options.to.empty()) fail(ErrorKind::kInvalidArgument, "export: where to? (shardsmith export IN OUT)");
  options.max_shard_size = parse_size(shard_size, "--max-shard-size");
  if (!dtype.empty()) {
    if (dtype != "float32" && dtype != "float16" && dtype != "bfloat16") {
      fail(ErrorKind::kInvalidArgument, "export: --dtype is '", dtype, "', it can be float32, float16 or bfloat16");
    }
    options.dtype = dtype_from_torch(dtype);
  }
  options.progress = line.output().progress();

  catch_signals();
  const ExportResult result = export_checkpoint(local_storage(), options);
  if (!result.tokenizer)
    line.output().notice(str(options.to, ": has no tokenizer, there was none beside the checkpoint"));
  if (line.output().json) {
    Value object;
    object.set("checkpoint", result.checkpoint);
    object.set("step", result.step);
    object.set("output", options.to);
    object.set("tensors", static_cast<int64_t>(result.tensors));
    object.set("files", static_cast<int64_t>(result.files));
    object.set("bytes", static_cast<int64_t>(result.bytes));
    object.set("tokenizer", result.tokenizer);
    line.output().print(object);
  } else {
    std::cout << printable(options.to) << ": step " << result.step << ", " << result.tensors << " tensors, "
              << human_bytes(result.bytes) << " in " << result.files << (result.files == 1 ? " file" : " files")
              << (result.tokenizer ? ", with tokenizer" : "") << "\n";
  }
  return 0;
}

}  // namespace shardsmith::cli
