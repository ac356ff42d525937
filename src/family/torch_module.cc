// A torch module of any kind: its tensors are its own, under their own names. The description is what Shardsmith writes
// of it, in place of a transformers configuration:
//   {"model_type": "torch_module", "class": "Net",
//    "tensors": [{"name": "body.0.weight", "shape": [8, 4], "axis": 0, "aliases": ["head.weight"]}, ...]}
// `axis`: the dimension of which each tensor-parallel rank holds a share; absent: all of it. `aliases`: other names
// that the module has for it.
#include <set>

#include "base/error.h"
#include "family/families.h"

namespace shardsmith {
namespace {

[[noreturn]] void fail_entry(const Value& entry) {
  fail(ErrorKind::kCorrupt, "config.json: this is no tensor of a torch_module: ", to_json(entry));
}

const std::string& name_of(const Value& entry) {
  const Value* found = entry.get_if<Dict>() ? entry.find("name") : nullptr;
  const std::string* name = found ? found->get_if<std::string>() : nullptr;
  if (!name || name->empty()) fail_entry(entry);
  return *name;
}

Shape shape_of(const Value& entry) {
  const Value* found = entry.find("shape");
  const List* sizes = found ? found->get_if<List>() : nullptr;
  if (!sizes) fail_entry(entry);
  Shape shape;
  for (const Value& item : *sizes) {
    const int64_t* size = item.get_if<int64_t>();
    if (!size || *size < 0) fail_entry(entry);
    shape.push_back(*size);
  }
  return shape;
}

}  // namespace

FamilyModel describe_torch_module(const Value& value) {
  FamilyModel model;
  ModelDescription& d = model.description;
  d.model_type = "torch_module";
  d.num_layers = 1;
  d.head = HeadKind::kNone;
  d.tied_head = false;
  model.architecture = Config(value).word("class", "Module");
  const Value* tensors = Config(value).find("tensors");
  const List* list = tensors ? tensors->get_if<List>() : nullptr;
  if (!list || list->empty()) fail(ErrorKind::kCorrupt, "config.json: a torch_module without a list of tensors");
  std::set<std::string> names;
  for (const Value& entry : *list) {
    FamilyTensor tensor{.hf_name = name_of(entry), .shape = shape_of(entry), .pieces = {}, .place = 0};
    Piece piece{tensor.hf_name, tensor.shape, {}, Shape(tensor.shape.size(), 0)};
    for (size_t i = 0; i < tensor.shape.size(); ++i) piece.permutation.push_back(static_cast<int>(i));
    tensor.pieces.push_back(std::move(piece));
    if (!names.insert(tensor.hf_name).second)
      fail(ErrorKind::kCorrupt, "config.json: a torch_module has tensor '", tensor.hf_name, "' twice");
    if (const Value* axis = entry.find("axis"); axis && !axis->get_if<None>()) {
      const int64_t* number = axis->get_if<int64_t>();
      if (!number || *number < 0 || *number >= static_cast<int64_t>(tensor.shape.size())) fail_entry(entry);
      d.split_axes[tensor.hf_name] = static_cast<int>(*number);
    }
    if (const Value* aliases = entry.find("aliases")) {
      const List* others = aliases->get_if<List>();
      if (!others) fail_entry(entry);
      for (const Value& alias : *others) {
        const std::string* name = alias.get_if<std::string>();
        if (!name) fail_entry(entry);
        tensor.aliases.push_back(*name);
      }
    }
    model.tensors.push_back(std::move(tensor));
  }
  return model;
}

}  // namespace shardsmith
