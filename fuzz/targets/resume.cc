// What a training run goes on from, whatever wrote it: a file, a folder, or a checkpoint of ours.
#include "cli/resume.h"

#include <algorithm>

#include "family/family.h"
#include "support.h"

namespace shardsmith::fuzz {
namespace {

constexpr const char* kFolder = "d/c";

const FamilyModel& model() {
  static const FamilyModel tiny = describe_model(
      parse_json(R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 2, "n_head": 1, "n_positions": 2, "vocab_size": 5})",
                 "config.json"));
  return tiny;
}

// In the order of the optimizer's groups, as the training script has them.
const std::vector<std::string>& parameters() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> all;
    for (const FamilyTensor& tensor : model().tensors) all.push_back(tensor.hf_name);
    return all;
  }();
  return names;
}

void check_names(const Index& index) {
  for (const TensorEntry& tensor : index.tensors) {
    const bool known = tensor.name.starts_with("model/") || tensor.name.starts_with("optimizer/state/") ||
                       tensor.name.starts_with("values/");
    require(known, "a tensor that is neither the model's nor the optimizer's nor a value");
  }
  // What goes into a parameter has its shape.
  for (const FamilyTensor& tensor : model().tensors) {
    for (const Piece& piece : tensor.pieces) {
      const TensorEntry* found = index.find("model/" + piece.name);
      require(!found || found->shape == piece.shape, "a tensor of another shape than the model's");
    }
  }
}

void check_values(const cli::ResumeSource& source) {
  require(source.index.values.find("content") != nullptr, "no content");
  for (const char* section : {"optimizer", "content"}) {
    const Value* found = source.index.values.find(section);
    if (!found) continue;
    Value copy = *found;
    for_each_tensor(copy, [&](TensorRef& ref) {
      require(ref.index < source.index.tensors.size(), "a value is a tensor that isn't there");
    });
  }
}

// The first byte: whether there is an optimizer. The rest: files of a folder, of which "f" is what to resume from if it
// is there; else the bytes of that file.
void run(std::string_view input) {
  if (input.empty()) return;
  Files files;
  const std::string_view rest = input.substr(1);
  if (is_packed(rest)) {
    unpack(rest, kFolder, files);
  } else {
    std::string bytes(rest);
    forget_checksums(bytes);
    files.add(join(kFolder, "f"), std::move(bytes));
  }
  files.add("d/secret", "a file that nothing may reach");
  const std::string file = join(kFolder, "f");
  const std::string path = files.stat(file).exists ? file : std::string(kFolder);
  cli::ResumeSource source;
  const std::vector<std::string> none;
  if (!errors_only([&] { source = cli::open_for_resume(files, path, model(), input[0] & 1 ? parameters() : none); }))
    return;
  for (const FileEntry& entry : source.index.files)
    require(parent(entry.path) == kFolder, "a file outside of the folder is read");
  check_names(source.index);
  check_values(source);
  read_everything(source.index, files);
}

const Registration registered("resume", run);

}  // namespace
}  // namespace shardsmith::fuzz
