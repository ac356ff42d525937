#include "cli/resume.h"

#include <algorithm>
#include <charconv>
#include <unordered_map>

#include "base/error.h"
#include "cli/content.h"

namespace shardsmith::cli {
namespace {

constexpr const char* kModelWords[] = {"model", "model_state_dict", "state_dict"};
constexpr const char* kOptimizerWords[] = {"optimizer", "optimizer_state_dict", "optim"};

bool is_section(const Value& value) { return value.get_if<Dict>() != nullptr; }

// Renames an entry of the dict at the top and the tensors below it.
void rename_section(Index& index, const std::string& from, const std::string& to) {
  for (auto& [key, item] : index.values.get_if<Dict>()->items) {
    if (const std::string* name = key.get_if<std::string>(); name && *name == from) key = Value(to);
  }
  const std::string before = path_join("", from) + "/", after = path_join("", to) + "/";
  for (TensorEntry& tensor : index.tensors) {
    for (std::string* name : {&tensor.name, &tensor.alias_of})
      if (name->starts_with(before)) *name = after + name->substr(before.size());
  }
  index.reindex();
}

// {"app": {"model": ...}}: what stands alone at the top is taken off.
void take_off_wrapper(Index& index) {
  const Dict* top = index.values.get_if<Dict>();
  if (!top || top->items.size() != 1) return;
  const std::string* name = top->items[0].first.get_if<std::string>();
  const auto has_model = [&](const char* word) { return top->items[0].second.find(word) != nullptr; };
  if (!name || std::none_of(std::begin(kModelWords), std::end(kModelWords), has_model)) return;
  for (const char* word : kModelWords)
    if (*name == word) return;
  const std::string before = path_join("", *name) + "/";
  for (TensorEntry& tensor : index.tensors) {
    for (std::string* text : {&tensor.name, &tensor.alias_of})
      if (text->starts_with(before)) text->erase(0, before.size());
  }
  Value inner = top->items[0].second;
  index.values = std::move(inner);
  index.reindex();
}

void use_our_words(Index& index) {
  take_off_wrapper(index);
  if (!index.values.get_if<Dict>()) return;
  for (const auto& words : {kModelWords, kOptimizerWords}) {
    if (index.values.find(words[0])) continue;
    for (int i = 1; i < 3; ++i) {
      const Value* found = index.values.find(words[i]);
      if (!found || !is_section(*found)) continue;
      rename_section(index, words[i], words[0]);
      break;
    }
  }
}

// 3 and "3" (torch's distributed checkpoints make keys texts); -1 for anything else.
int64_t position_of(const Value& key) {
  if (const int64_t* number = key.get_if<int64_t>()) return *number;
  const std::string* text = key.get_if<std::string>();
  int64_t number = -1;
  if (!text || text->empty()) return -1;
  const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), number);
  return error == std::errc() && end == text->data() + text->size() ? number : -1;
}

const List* list_in(const Value& value, const char* key) {
  const Value* found = value.find(key);
  return found ? found->get_if<List>() : nullptr;
}

// An optimizer's state by position, as torch's state_dict() has it, becomes state by name.
class Positions {
 public:
  Positions(const std::string& path, const Index& index, const FamilyModel& model) : path_(path), index_(index) {
    for (const FamilyTensor& tensor : model.tensors) shapes_.emplace(tensor.hf_name, &tensor.shape);
  }

  // False where nobody knows the names.
  bool name(Value& optimizer, const std::vector<std::string>& parameters) {
    const Dict* states = optimizer.find("state") ? optimizer.find("state")->get_if<Dict>() : nullptr;
    const List* groups = list_in(optimizer, "param_groups");
    if (!states || !groups) return true;
    if (std::none_of(states->items.begin(), states->items.end(),
                     [](const auto& item) { return position_of(item.first) >= 0; }))
      return true;
    if (!collect(*groups, parameters)) return false;
    Dict named;
    for (const auto& [key, entries] : states->items) {
      const auto found = names_.find(position_of(key));
      if (found == names_.end())
        fail(ErrorKind::kCorrupt, path_, ": optimizer state of number ", to_json(key), ", which no group has");
      check_shapes(to_json(key), entries, found->second);
      named.items.emplace_back(found->second, entries);
    }
    List renamed;
    for (Value group : *groups) {
      List members;
      for (const Value& member : *list_in(group, "params")) members.emplace_back(names_.at(position_of(member)));
      group.set("params", std::move(members));
      renamed.push_back(std::move(group));
    }
    optimizer.set("state", std::move(named));
    optimizer.set("param_groups", std::move(renamed));
    return true;
  }

 private:
  // The file's own names, else those of the optimizer that is to have the state.
  bool collect(const List& groups, const std::vector<std::string>& parameters) {
    size_t count = 0;
    bool all_named = true;
    for (const Value& group : groups) {
      const List *members = list_in(group, "params"), *names = list_in(group, "param_names");
      if (!members) fail(ErrorKind::kCorrupt, path_, ": a parameter group of the optimizer has no 'params'");
      count += members->size();
      all_named = all_named && names && names->size() == members->size() &&
                  std::all_of(names->begin(), names->end(), [](const Value& v) { return v.get_if<std::string>(); });
    }
    if (!all_named && parameters.empty()) return false;
    if (!all_named && count != parameters.size())
      fail(ErrorKind::kInvalidArgument, path_, ": holds the state of an optimizer of ", count,
           " parameters, by position, and this one has ", parameters.size(),
           ": build it as before, or use load_optimizer=False to begin anew");
    size_t next = 0;
    for (const Value& group : groups) {
      const List *members = list_in(group, "params"), *names = list_in(group, "param_names");
      for (size_t i = 0; i < members->size(); ++i, ++next) {
        const int64_t position = position_of((*members)[i]);
        if (position < 0 || names_.count(position))
          fail(ErrorKind::kCorrupt, path_, ": 'params' of the optimizer's groups are no positions, each once");
        names_[position] = all_named ? *(*names)[i].get_if<std::string>() : parameters[next];
      }
    }
    return true;
  }

  // A position is right if what is like a parameter has that parameter's shape.
  void check_shapes(const std::string& position, const Value& entries, const std::string& name) const {
    const auto found = shapes_.find(name);
    const Dict* dict = entries.get_if<Dict>();
    if (found == shapes_.end() || !dict) return;
    const Shape* other = nullptr;
    for (const auto& [kind, value] : dict->items) {
      const TensorRef* ref = value.get_if<TensorRef>();
      if (!ref || index_.tensors[ref->index].shape.empty()) continue;
      if (index_.tensors[ref->index].shape == *found->second) return;
      other = &index_.tensors[ref->index].shape;
    }
    if (!other || volume(*other) == 1) return;
    fail(ErrorKind::kInvalidArgument, path_, ": optimizer state number ", position, " has shape ", to_string(*other),
         ", but that parameter of this optimizer is ", name, " ", to_string(*found->second),
         ": its groups were built otherwise; build them as before, or use load_optimizer=False to begin anew");
  }

  const std::string& path_;
  const Index& index_;
  std::unordered_map<std::string_view, const Shape*> shapes_;
  std::unordered_map<int64_t, std::string> names_;
};

// What takes the state relies on it.
void check_groups(const std::string& path, const Value& optimizer) {
  const Value* states = optimizer.find("state");
  const List* groups = list_in(optimizer, "param_groups");
  bool good = groups && states && states->get_if<Dict>();
  for (size_t g = 0; good && g < groups->size(); ++g) {
    const List* members = list_in((*groups)[g], "params");
    good = members && std::all_of(members->begin(), members->end(),
                                  [](const Value& member) { return member.get_if<std::string>() != nullptr; });
  }
  if (good) {
    const List& items = *groups;
    good = !items.empty() || states->get_if<Dict>()->items.empty();
    for (const auto& [key, entries] : states->get_if<Dict>()->items)
      good = good && key.get_if<std::string>() && entries.get_if<Dict>();
  }
  if (!good)
    fail(ErrorKind::kCorrupt, path, ": 'optimizer' is none that torch or we save: 'state' by parameter, and ",
         "'param_groups' with 'params' each; use load_optimizer=False to leave it out");
}

// A content's tensors under a checkpoint's names.
class Naming {
 public:
  explicit Naming(const Content& content) : content_(content) {
    index_.format = content.index.format;
    index_.files = content.index.files;
  }

  void model(const Value& model) {
    const Dict* dict = model.get_if<Dict>();
    if (!dict) return;
    for (const auto& [key, item] : dict->items) {
      const std::string* name = key.get_if<std::string>();
      if (const TensorRef* ref = item.get_if<TensorRef>(); name && ref) add(*ref, str("model/", *name));
    }
  }

  Value optimizer(Value value) {
    const Dict* states = value.find("state") ? value.find("state")->get_if<Dict>() : nullptr;
    if (states) {
      Dict named = *states;
      for (auto& [key, entries] : named.items) {
        const std::string* name = key.get_if<std::string>();
        Dict* dict = entries.get_if<Dict>();
        if (!name || !dict) continue;
        for (auto& [kind, item] : dict->items) {
          const std::string* word = kind.get_if<std::string>();
          if (const TensorRef* ref = item.get_if<TensorRef>(); word && ref)
            item = add(*ref, str("optimizer/state/", *name, "/", *word));
        }
      }
      value.set("state", None{});
      value = rest(std::move(value));
      value.set("state", std::move(named));
      return value;
    }
    return rest(std::move(value));
  }

  Value rest(Value value) {
    for_each_tensor(value, [&](TensorRef& ref) {
      const auto [place, is_new] = moved_.emplace(ref.index, index_.tensors.size());
      ref = is_new ? add(ref, "values/" + content_.index.tensors[ref.index].name) : TensorRef{place->second};
    });
    return value;
  }

  Index take(Value values) {
    index_.values = std::move(values);
    index_.reindex();
    return std::move(index_);
  }

 private:
  TensorRef add(TensorRef ref, std::string name) {
    TensorEntry entry = content_.index.tensors[ref.index];
    entry.name = std::move(name);
    index_.tensors.push_back(std::move(entry));
    return {index_.tensors.size() - 1};
  }

  const Content& content_;
  Index index_;
  std::unordered_map<size_t, size_t> moved_;
};

}  // namespace

ResumeSource open_for_resume(Storage& storage, const std::string& path, const FamilyModel& model,
                             const std::vector<std::string>& parameters) {
  Source source = open_source(storage, path);
  validate(source.index);
  ResumeSource result;
  result.format = source.format;
  const std::optional<Manifest> manifest = source.manifest;
  const bool ours = source.format == "full" || source.format == "partial";
  if (source.format == "pt" || source.format == "dcp") use_our_words(source.index);
  bool has_optimizer = source.index.values.find("optimizer") != nullptr;
  if (has_optimizer && !ours && source.format != "hf") {
    Value optimizer = *source.index.values.find("optimizer");
    has_optimizer = Positions(path, source.index, model).name(optimizer, parameters);
    source.index.values.set("optimizer", has_optimizer ? std::move(optimizer) : Value());
    if (!has_optimizer)
      result.left_out.push_back(
          "the optimizer's state is by position, and there is no optimizer yet: resume after smp.DistributedOptimizer");
  }
  ContentOptions options;
  options.names = Names::kLogical;
  options.family = &model;
  options.report = &result.names;
  const Content content = content_of(storage, path, std::move(source), options);
  for (const std::string& line : content.left_out) result.left_out.push_back(line);

  if (has_optimizer && content.optimizer.find("param_groups")) check_groups(path, content.optimizer);
  Naming naming(content);
  naming.model(content.model);
  Value values = Dict{};
  if (has_optimizer && content.optimizer.find("param_groups"))
    values.set("optimizer", List{naming.optimizer(content.optimizer)});
  Value rest = Dict{};
  for (const auto& [key, item] : content.beside.items) rest.get_if<Dict>()->items.emplace_back(key, naming.rest(item));
  const Value* own = rest.find("user_content");  // of ours; the other entries of other files are as good as that
  values.set("content", !ours ? rest : own ? *own : Value());
  if (manifest) values.set("step", manifest->step);
  result.index = naming.take(std::move(values));
  return result;
}

}  // namespace shardsmith::cli
