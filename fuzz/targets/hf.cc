// A Hugging Face folder: config.json, an index, weights; or a folder of sharded safetensors without a config.
#include "format/hf.h"

#include "family/family.h"
#include "format/detect.h"
#include "support.h"

namespace shardsmith::fuzz {
namespace {

void run(std::string_view input) {
  Files files;
  unpack(input, "d/m", files);
  files.add("d/secret", "a file that no index may reach");
  errors_only([&] { detect_format(files, "d/m"); });
  Index index;
  const bool read = errors_only([&] { index = read_hf(files, "d/m"); }) ||
                    errors_only([&] { index = read_safetensors_folder(files, "d/m"); });
  if (!read) return;
  for (const FileEntry& file : index.files)
    require(parent(file.path) == "d/m" && !files.stat(file.path).is_link, "a file outside of the folder is read");
  read_everything(index, files);
  errors_only([&] {
    const FamilyModel model = describe_model(read_hf_config(files, "d/m"));
    model_costs(model, 0.5);
    const Index logical = to_logical(index, model);
    read_everything(logical, files);
    read_everything(to_hf(logical, model), files);
  });
}

const Registration registered("hf", run);

}  // namespace
}  // namespace shardsmith::fuzz
