#include "cli/content.h"

#include <fnmatch.h>

#include <algorithm>
#include <set>
#include <unordered_set>

#include "base/error.h"
#include "cli/weights.h"

namespace shardsmith::cli {
namespace {

constexpr size_t kNone = ~size_t{0};

bool holds_tensors(const Value& value) {
  if (value.get_if<TensorRef>()) return true;
  const auto any = [](const List& items) { return std::any_of(items.begin(), items.end(), holds_tensors); };
  if (const List* list = value.get_if<List>()) return any(*list);
  if (const Tuple* tuple = value.get_if<Tuple>()) return any(tuple->items);
  if (const Opaque* opaque = value.get_if<Opaque>()) return any(opaque->state);
  if (const Dict* dict = value.get_if<Dict>())
    return std::any_of(dict->items.begin(), dict->items.end(),
                       [](const auto& item) { return holds_tensors(item.second); });
  return false;
}

// Moves what is asked for from a source's index into a content's, each stored tensor once.
class Builder {
 public:
  Builder(const Index& source, Content& content) : source_(source), content_(content) {
    content_.index.format = source.format;
    content_.index.files = source.files;
  }

  TensorRef add(TensorEntry entry) {
    while (!names_.insert(entry.name).second) entry.name += '\'';  // names are for looking up and for messages
    content_.index.tensors.push_back(std::move(entry));
    return {content_.index.tensors.size() - 1};
  }

  // The value with its tensors taken over, each under `path` and its place below.
  Value import(Value value, const std::string& path) {
    for_each_tensor(value, path,
                    [&](TensorRef& reference, const std::string& place) { reference = take(reference.index, place); });
    return value;
  }

  // All tensors of an index whose slices count in the same files, by name; ties are one number.
  Value import_names(const Index& index) {
    std::vector<size_t> moved(index.tensors.size(), kNone);
    Dict dict;
    for (size_t i = 0; i < index.tensors.size(); ++i) {
      const size_t stored = stored_in(index, i);
      if (moved[stored] == kNone) {
        TensorEntry entry = index.tensors[stored];
        entry.name = index.tensors[i].name;
        moved[stored] = add(std::move(entry)).index;
      }
      dict.items.emplace_back(index.tensors[i].name, TensorRef{moved[stored]});
    }
    return dict;
  }

 private:
  static size_t stored_in(const Index& index, size_t i) {
    const TensorEntry* stored = stored_entry(index, index.tensors[i]);
    if (!stored)
      fail(ErrorKind::kCorrupt, index.format, ": tensor '", index.tensors[i].name, "' is a second name of '",
           index.tensors[i].alias_of, "', which is not there");
    return static_cast<size_t>(stored - index.tensors.data());
  }

  TensorRef take(size_t i, const std::string& path) {
    const size_t stored = stored_in(source_, i);
    if (moved_.empty()) moved_.assign(source_.tensors.size(), kNone);
    if (moved_[stored] == kNone) {
      TensorEntry entry = source_.tensors[stored];
      entry.name = path.empty() ? "tensor" : path;
      moved_[stored] = add(std::move(entry)).index;
    }
    return {moved_[stored]};
  }

  const Index& source_;
  Content& content_;
  std::vector<size_t> moved_;
  std::unordered_set<std::string> names_;
};

// Adds one file's state of a parameter to what other files say of it: masters stand in a file of their own.
void add_state(Dict& states, std::unordered_map<std::string, size_t>& places, const Value& key, const Value& item) {
  const std::string* name = key.get_if<std::string>();
  const auto [place, is_new] = places.emplace(name ? *name : to_json(key), states.items.size());
  if (is_new) {
    states.items.emplace_back(key, item);
    return;
  }
  const Dict* more = item.get_if<Dict>();
  Value& known = states.items[place->second].second;
  for (size_t i = 0; more && known.get_if<Dict>() && i < more->items.size(); ++i) {
    const std::string* kind = more->items[i].first.get_if<std::string>();
    if (kind && !known.find(*kind)) known.set(*kind, more->items[i].second);
  }
}

// The optimizer's values of several files as one: each file has the parameters of its stage and slice.
Value merged_optimizer(const List& files) {
  Value merged;
  Dict state;
  std::unordered_map<std::string, size_t> known;
  List groups;
  std::vector<std::set<std::string>> members;
  for (const Value& file : files) {
    for (const char* once : {"class", "dtype", "loss_scaler"})
      if (const Value* said = file.find(once); said && !merged.find(once)) merged.set(once, *said);
    const Value* states = file.find("state");
    if (const Dict* dict = states ? states->get_if<Dict>() : nullptr) {
      for (const auto& [key, item] : dict->items) add_state(state, known, key, item);
    }
    const Value* list = file.find("param_groups");
    const List* theirs = list ? list->get_if<List>() : nullptr;
    for (size_t g = 0; theirs && g < theirs->size(); ++g) {
      if (g == groups.size()) {
        groups.push_back((*theirs)[g]);
        groups[g].set("params", List{});
        members.emplace_back();
      }
      const Value* params = (*theirs)[g].find("params");
      const List* names = params ? params->get_if<List>() : nullptr;
      if (!names) continue;
      List all = *groups[g].find("params")->get_if<List>();
      for (const Value& name : *names) {
        const std::string* text = name.get_if<std::string>();
        if (text && members[g].insert(*text).second) all.push_back(name);
      }
      groups[g].set("params", std::move(all));
    }
  }
  merged.set("state", std::move(state));
  merged.set("param_groups", std::move(groups));
  return merged;
}

// Optimizer state under Hugging Face's names -> ours: what has its parameter's shape is cut like it, all else (a step
// counter) goes to each piece.
class StateRenamer {
 public:
  StateRenamer(const FamilyModel& model, Builder& builder, Content& content)
      : builder_(builder), content_(content), model_(model) {
    for (const FamilyTensor& tensor : model.tensors) {
      tensors_.emplace(bare(tensor.hf_name), &tensor);
      for (const Piece& piece : tensor.pieces) logical_.insert(piece.name);
    }
  }

  Value operator()(const Value& optimizer) {
    Value result = optimizer;
    const Dict* states = optimizer.find("state") ? optimizer.find("state")->get_if<Dict>() : nullptr;
    if (!states) return result;
    Dict renamed;
    for (const auto& [key, entries] : states->items) {
      const std::string* name = key.get_if<std::string>();
      if (name && logical_.count(*name)) {  // a full checkpoint keeps it so
        renamed.items.emplace_back(key, entries);
        continue;
      }
      const FamilyTensor* tensor = name ? find(*name) : nullptr;
      const Dict* dict = entries.get_if<Dict>();
      if (!tensor || !dict) {
        content_.left_out.push_back(
            str("optimizer state of ", name ? *name : to_json(key), ": no parameter of the model"));
        continue;
      }
      std::vector<Dict> pieces(tensor->pieces.size());
      for (const auto& [kind, value] : dict->items) add(*tensor, kind, value, pieces);
      for (size_t i = 0; i < pieces.size(); ++i)
        renamed.items.emplace_back(tensor->pieces[i].name, std::move(pieces[i]));
    }
    result.set("state", std::move(renamed));
    if (const Value* groups = optimizer.find("param_groups")) result.set("param_groups", rename_groups(*groups));
    return result;
  }

 private:
  std::string_view bare(std::string_view name) const {
    name = without_wrappers(name);
    return name.starts_with(model_.prefix) ? name.substr(model_.prefix.size()) : name;
  }
  const FamilyTensor* find(std::string_view name) const {
    const auto found = tensors_.find(bare(name));
    return found == tensors_.end() ? nullptr : found->second;
  }

  void add(const FamilyTensor& tensor, const Value& kind, const Value& value, std::vector<Dict>& pieces) {
    const TensorRef* ref = value.get_if<TensorRef>();
    const std::string* word = kind.get_if<std::string>();
    if (ref && content_.index.tensors[ref->index].shape == tensor.shape) {
      std::vector<TensorEntry> entries = logical_pieces(content_.index.tensors[ref->index], tensor);
      for (size_t i = 0; i < entries.size(); ++i) {
        entries[i].name = str("optimizer/state/", tensor.pieces[i].name, "/", word ? *word : to_json(kind));
        pieces[i].items.emplace_back(kind, builder_.add(std::move(entries[i])));
      }
      return;
    }
    for (Dict& piece : pieces) piece.items.emplace_back(kind, value);
  }

  Value rename_groups(const Value& groups) const {
    const List* list = groups.get_if<List>();
    if (!list) return groups;
    List out;
    for (Value group : *list) {
      const List* names = group.find("params") ? group.find("params")->get_if<List>() : nullptr;
      List renamed;
      for (size_t i = 0; names && i < names->size(); ++i) {
        const std::string* name = (*names)[i].get_if<std::string>();
        if (name && logical_.count(*name)) renamed.push_back((*names)[i]);
        const FamilyTensor* tensor = name ? find(*name) : nullptr;
        if (!tensor || logical_.count(*name)) continue;
        for (const Piece& piece : tensor->pieces) renamed.emplace_back(piece.name);
      }
      if (names) group.set("params", std::move(renamed));
      out.push_back(std::move(group));
    }
    return out;
  }

  Builder& builder_;
  Content& content_;
  const FamilyModel& model_;
  std::map<std::string_view, const FamilyTensor*> tensors_;
  std::set<std::string_view> logical_;
};

// The tree without the tensors that `keep` refuses by their path.
template <typename Keep>
Value filtered(const Value& value, const std::string& path, const Keep& keep) {
  const Dict* dict = value.get_if<Dict>();
  if (!dict) return value;
  Dict out;
  for (const std::pair<Value, Value>& entry : dict->items) {
    const Value &key = entry.first, &item = entry.second;
    const std::string* name = key.get_if<std::string>();
    const std::string below = path_join(path, name ? *name : to_json(key));
    if (item.get_if<TensorRef>() && !keep(below)) continue;
    Value rest = filtered(item, below, keep);
    const Dict* inner = rest.get_if<Dict>();
    if (inner && inner->items.empty() && holds_tensors(item)) continue;
    out.items.emplace_back(key, std::move(rest));
  }
  return out;
}

void apply_globs(Content& content, const ContentOptions& options) {
  if (options.include.empty() && options.exclude.empty()) return;
  const auto keep = [&](const std::string& name) {
    return (options.include.empty() || matches(options.include, name)) && !matches(options.exclude, name);
  };
  content.model = filtered(content.model, "", keep);
  if (!holds_tensors(content.model))
    fail(ErrorKind::kInvalidArgument, "--include and --exclude leave no tensor; names look like '",
         content.index.tensors.empty() ? std::string() : content.index.tensors[0].name, "'");
  const Value* state = content.optimizer.find("state");
  const Dict* states = state ? state->get_if<Dict>() : nullptr;
  if (!states) return;
  Dict kept;
  for (const auto& [key, item] : states->items) {
    const std::string* name = key.get_if<std::string>();
    if (!name || keep(*name)) kept.items.emplace_back(key, item);
  }
  content.optimizer.set("state", std::move(kept));
}

// Every name that the model's state_dict has, those of ties among them.
void add_tied_names(Content& content) {
  Dict* dict = content.model.get_if<Dict>();
  if (!dict || !content.family || content.logical) return;
  for (const FamilyTensor& tensor : content.family->tensors) {
    const Value* stored = tensor.also_last ? content.model.find(tensor.hf_name) : nullptr;
    if (!stored) continue;
    const Value ref = *stored;
    for (const std::string& name : content.family->tied_names) {
      if (!content.model.find(name)) content.model.set(name, ref);
    }
  }
}

}  // namespace

Content content_of(Storage& storage, const std::string& path, Source source, const ContentOptions& options) {
  Content content;
  Builder builder(source.index, content);
  const Value& values = source.index.values;
  const bool ours = source.format == "partial" || source.format == "full";
  const bool tree = ours || source.format == "pt" || source.format == "dcp";
  const Value* model = tree ? values.find("model") : nullptr;
  const bool has_model = model && holds_tensors(*model);
  content.sections = ours || has_model;
  content.manifest = source.manifest;

  Weights weights = weights_of(source, options.config);
  if (options.family) {
    weights.family = *options.family;
    weights.logical = has_logical_names(weights.index, *options.family);
  }
  const bool was_logical = weights.logical;
  content.config = weights.config;
  content.family = weights.family;
  if (options.names == Names::kHuggingFace) weights = with_hf_names(std::move(weights));
  if (options.names == Names::kLogical) {
    NameReport report;
    weights = options.report ? with_logical_names(std::move(weights), *options.report)
                             : with_logical_names(std::move(weights), &report.unexpected);
    for (const std::string& name : report.unexpected) content.left_out.push_back(name + ": no parameter of the model");
  }
  content.logical = weights.logical;
  const bool renamed = weights.logical != was_logical;
  if (renamed || !tree) {
    content.model = builder.import_names(weights.index);
  } else {
    content.model = builder.import(has_model ? *model : values, "");
  }
  if (options.names == Names::kHuggingFace && was_logical) add_tied_names(content);

  if (!options.weights_only && content.sections) {
    if (const Value* optimizer = values.find("optimizer")) {
      const List* files = ours ? optimizer->get_if<List>() : nullptr;
      content.optimizer = builder.import(files ? merged_optimizer(*files) : *optimizer, "optimizer");
      if (options.names == Names::kLogical && renamed)
        content.optimizer = StateRenamer(*content.family, builder, content)(content.optimizer);
    }
    for (const auto& [key, item] : values.get_if<Dict>()->items) {
      const std::string* name = key.get_if<std::string>();
      if (name && (*name == "model" || *name == "optimizer")) continue;
      content.beside.items.emplace_back(name ? *name : to_json(key), builder.import(item, name ? *name : to_json(key)));
    }
  } else if (content.sections) {
    for (const auto& [key, item] : values.get_if<Dict>()->items) {
      const std::string* name = key.get_if<std::string>();
      if (!name || *name != "model")
        content.left_out.push_back(str(name ? *name : to_json(key), ": only weights were asked for"));
    }
  }
  if (source.format == "hf") content.companions = path;
  if (content.manifest && !content.manifest->hf.empty()) {
    if (!is_bare_name(content.manifest->hf))
      fail(ErrorKind::kCorrupt, path, ": its manifest names '", content.manifest->hf,
           "' for config and tokenizer, no plain name");
    const std::string folder = join(parent(path), content.manifest->hf);
    if (storage.stat(folder).is_directory) content.companions = folder;
  }
  content.index.reindex();
  apply_globs(content, options);
  return content;
}

std::vector<NamedTensor> flat_names(const Value& tree, size_t* plain, std::string* first_plain) {
  std::vector<NamedTensor> names;
  const auto walk = [&](const auto& self, const Value& value, const std::string& path, const std::string* key) -> void {
    if (const TensorRef* ref = value.get_if<TensorRef>()) {
      names.push_back({key ? *key : path.empty() ? "tensor" : path, ref->index});
      return;
    }
    const auto all = [&](const List& items) {
      for (size_t i = 0; i < items.size(); ++i) self(self, items[i], path_join(path, static_cast<int64_t>(i)), nullptr);
    };
    const bool holds = holds_tensors(value);
    if (const Opaque* opaque = value.get_if<Opaque>(); opaque && holds) {
      fail(ErrorKind::kUnsupported, "tensor '", path, "' is of kind ", opaque->class_name,
           ", which the target can't hold; leave it out with --exclude '", path, "*'");
    }
    if (const List* list = value.get_if<List>(); list && holds) return all(*list);
    if (const Tuple* tuple = value.get_if<Tuple>(); tuple && holds) return all(tuple->items);
    const Dict* dict = value.get_if<Dict>();
    if (dict && (holds || dict->items.empty())) {
      for (const std::pair<Value, Value>& entry : dict->items) {
        const Value &k = entry.first, &item = entry.second;
        const std::string* name = k.get_if<std::string>();
        const int64_t* number = k.get_if<int64_t>();
        // A name in a plain dict stays itself, slashes and all.
        self(self, item, number ? path_join(path, *number) : path_join(path, name ? *name : to_json(k)),
             path.empty() ? name : nullptr);
      }
      return;
    }
    if (plain && ++*plain == 1 && first_plain) *first_plain = path;
  };
  walk(walk, tree, "", nullptr);
  return names;
}

bool matches(const std::vector<std::string>& globs, const std::string& name) {
  return std::any_of(globs.begin(), globs.end(),
                     [&](const std::string& glob) { return fnmatch(glob.c_str(), name.c_str(), 0) == 0; });
}

}  // namespace shardsmith::cli
