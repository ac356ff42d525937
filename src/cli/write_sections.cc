// partial and full: our own checkpoints, in which model, optimizer and what stands beside them have files of their own.
#include <deque>
#include <map>
#include <memory>
#include <set>

#include "base/error.h"
#include "checkpoint/full.h"
#include "checkpoint/save.h"
#include "cli/companions.h"
#include "cli/describe.h"
#include "cli/signals.h"
#include "cli/writers.h"
#include "family/tensor_parallel.h"
#include "layout/mesh.h"

namespace shardsmith::cli {
namespace {

constexpr const char* kSuffix = "_partial";

// What the manifest of the new checkpoint says: as the source's, in the layout that is asked for.
Manifest manifest_for(const Job& job) {
  const Conversion& request = job.request;
  Manifest manifest = job.content.manifest.value_or(Manifest{});
  const int old_pp = manifest.pp;
  const bool is_partial = job.result.from_format == "partial";
  manifest.pp = request.pp > 0 ? request.pp : is_partial ? manifest.pp : 1;
  manifest.tp = request.tp > 0 ? request.tp : is_partial ? manifest.tp : 1;
  if (!request.placement.empty()) manifest.placement = request.placement;
  const int one = manifest.pp * manifest.tp;
  manifest.world_size = request.world_size > 0 ? request.world_size : one;
  const Mesh mesh(manifest.world_size, manifest.pp, manifest.tp, manifest.placement);
  manifest.placement = mesh.placement();
  manifest.rdp = mesh.rdp_size();
  manifest.model_config = job.content.config;
  manifest.files.clear();
  if (!job.content.logical) {
    if (one > 1)
      fail(ErrorKind::kUnsupported, request.from,
           ": is of no known family, so nobody knows its layers: one stage and no ",
           "tensor parallelism; name its configuration with --config FILE");
    manifest.partition.first = {0, 0};
  } else {
    check_tensor_parallel(job.content.family->description, manifest.tp);
    const bool same = manifest.pp == old_pp && manifest.partition.stages() == manifest.pp &&
                      manifest.partition.first.back() == job.content.family->description.num_layers;
    if (!same)
      manifest.partition = make_partition(model_costs(*job.content.family, request.memory_weight).costs, manifest.pp);
  }
  return manifest;
}

// Logical name -> tensor, of a model whose names are ours.
std::map<std::string, size_t> tensors_by_name(const Value& model) {
  std::map<std::string, size_t> found;
  for (const NamedTensor& named : flat_names(model)) found.emplace(named.name, named.tensor);
  return found;
}

// The files of one stage's and slice's ranks: {rankinfo} is "{pp}_{tp}".
class SliceFiles {
 public:
  SliceFiles(Job& job, const Manifest& manifest)
      : job_(job), manifest_(manifest), names_(tensors_by_name(job.content.model)) {
    const Value* states = job.content.optimizer.find("state");
    const Dict* dict = states ? states->get_if<Dict>() : nullptr;
    for (size_t i = 0; dict && i < dict->items.size(); ++i) {
      if (const std::string* name = dict->items[i].first.get_if<std::string>()) states_[*name] = &dict->items[i].second;
    }
  }

  void add(int pp, int tp, std::deque<FileBuilder>& builders, std::vector<SaveFile>& files, uint64_t& bytes) {
    const FamilyModel& family = *job_.content.family;
    FileBuilder& model = builders.emplace_back(job_.feed, false);
    FileBuilder& optimizer = builders.emplace_back(job_.feed, false);
    FileBuilder& masters = builders.emplace_back(job_.feed, false);
    const bool has_masters = job_.content.optimizer.find("loss_scaler");
    Dict weights, states, masters_states, elsewhere;
    std::set<std::string> here;
    for (const size_t i : stage_tensors(family, manifest_.partition, pp)) {
      const FamilyTensor& tensor = family.tensors[i];
      const bool stored_by_first = tensor.also_last && pp > 0;
      for (const Piece& piece : tensor.pieces) {
        here.insert(piece.name);
        if (stored_by_first) continue;
        const auto found = names_.find(piece.name);
        if (found == names_.end()) continue;  // left out by --exclude
        const Box box = box_of(piece, tp);
        if (const int owner = owner_of(piece, tp); owner != tp) {
          elsewhere.items.emplace_back("model/" + piece.name, str("model_", pp, "_", owner, ".pt"));
          continue;
        }
        weights.items.emplace_back(piece.name, model.add(found->second, box, "model/" + piece.name));
        const auto state = states_.find(piece.name);
        if (state == states_.end()) continue;
        const auto is_master = [&](const std::string* kind) { return has_masters && kind && *kind == "master"; };
        const auto add = [&](Dict& to, FileBuilder& file, const auto& wanted) {
          Value kept = state_of(piece, box, only(*state->second, wanted), file);
          if (const Dict* dict = kept.get_if<Dict>(); !dict || !dict->items.empty())
            to.items.emplace_back(piece.name, std::move(kept));
        };
        add(states, optimizer, [&](const std::string* kind) { return !is_master(kind); });
        if (has_masters) add(masters_states, masters, is_master);
      }
    }
    Value listed;
    if (!elsewhere.items.empty()) listed.set("elsewhere", std::move(elsewhere));
    bytes += model.bytes();
    SaveFile file{str("model_", pp, "_", tp, ".pt"), model.finish(std::move(weights), true)};
    if (!listed.is_none()) file.content.extra = listed;
    files.push_back(std::move(file));
    if (job_.content.optimizer.is_none()) return;
    Value tree;
    if (const Value* name = job_.content.optimizer.find("class")) tree.set("class", *name);
    tree.set("state", std::move(states));
    tree.set("param_groups", groups_of(here));
    bytes += optimizer.bytes();
    files.push_back({str("optimizer_", pp, "_", tp, ".pt"), optimizer.finish(std::move(tree), true)});
    if (!has_masters) return;
    Value precision;
    for (const char* key : {"dtype", "loss_scaler"})
      if (const Value* value = job_.content.optimizer.find(key)) precision.set(key, masters.import(*value));
    precision.set("state", std::move(masters_states));
    bytes += masters.bytes();
    files.push_back({str("fp16_states_", pp, "_", tp, ".pt"), masters.finish(std::move(precision), true)});
  }

 private:
  // A parameter's state without what isn't wanted.
  static Value only(const Value& state, const std::function<bool(const std::string*)>& wanted) {
    const Dict* dict = state.get_if<Dict>();
    if (!dict) return wanted(nullptr) ? state : Value(Dict{});
    Dict kept;
    for (const auto& [key, value] : dict->items)
      if (wanted(key.get_if<std::string>())) kept.items.emplace_back(key, value);
    return kept;
  }
  Box box_of(const Piece& piece, int tp) const {
    return tensor_parallel_box(job_.content.family->description, piece.name, piece.shape, tp, manifest_.tp);
  }
  // The first rank that holds the same part: it alone stores it.
  int owner_of(const Piece& piece, int tp) const {
    const Box box = box_of(piece, tp);
    int owner = 0;
    while (owner < tp && !(box_of(piece, owner) == box)) ++owner;
    return owner;
  }

  Value state_of(const Piece& piece, const Box& box, const Value& state, FileBuilder& file) const {
    const Dict* dict = state.get_if<Dict>();
    if (!dict) return state;
    Dict out;
    for (const auto& [key, value] : dict->items) {
      const TensorRef* ref = value.get_if<TensorRef>();
      const std::string* kind = key.get_if<std::string>();
      if (!ref || !kind) {
        out.items.emplace_back(key, file.import(value));
        continue;
      }
      const Shape& shape = job_.content.index.tensors[ref->index].shape;
      const std::string name = str("optimizer/state/", piece.name, "/", *kind);
      if (shape == piece.shape) {
        out.items.emplace_back(key, file.add(ref->index, box, name));
      } else if (volume(shape) == 1 || manifest_.tp == 1) {
        out.items.emplace_back(key, file.add(ref->index, whole(shape), name));
      } else {
        fail(ErrorKind::kUnsupported, name, " has shape ", to_string(shape), ", not that of its parameter ",
             to_string(piece.shape), ": it can't be cut for tensor parallelism (--weights-only leaves it out)");
      }
    }
    return out;
  }

  // The optimizer's groups as this stage's ranks have them.
  Value groups_of(const std::set<std::string>& here) const {
    const Value* groups = job_.content.optimizer.find("param_groups");
    const List* list = groups ? groups->get_if<List>() : nullptr;
    if (!list) return groups ? *groups : Value(List{});
    List out;
    for (Value group : *list) {
      const Value* params = group.find("params");
      List kept;
      if (const List* names = params ? params->get_if<List>() : nullptr) {
        for (const Value& name : *names) {
          const std::string* text = name.get_if<std::string>();
          if (text && here.count(*text)) kept.push_back(name);
        }
        group.set("params", std::move(kept));
      }
      out.push_back(std::move(group));
    }
    return out;
  }

  Job& job_;
  const Manifest& manifest_;
  std::map<std::string, size_t> names_;
  std::map<std::string, const Value*> states_;
};

// A model of no known family: one file, names and values as they are.
void add_plain_model(Job& job, std::deque<FileBuilder>& builders, std::vector<SaveFile>& files, uint64_t& bytes) {
  FileBuilder& model = builders.emplace_back(job.feed, false);
  Value tree = model.import_listed(job.content.model, "model");
  bytes += model.bytes();
  files.push_back({"model_0_0.pt", model.finish(std::move(tree), true)});
  if (job.content.optimizer.is_none()) return;
  FileBuilder& optimizer = builders.emplace_back(job.feed, false);
  Value state = optimizer.import_listed(job.content.optimizer, "optimizer");
  bytes += optimizer.bytes();
  files.push_back({"optimizer_0_0.pt", optimizer.finish(std::move(state), true)});
}

// The rank of "rng_3"; -1 for another name.
int rng_rank(const std::string& name) {
  if (!name.starts_with("rng_")) return -1;
  const std::string number = name.substr(4);
  const bool is_number =
      !number.empty() && number.size() < 9 && number.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? std::stoi(number) : -1;
}

// What stands beside model and optimizer, as files of a checkpoint: ours as they are; another tool's values are user
// content, all together.
Dict files_beside(const Content& content) {
  const auto is_file = [](const std::string& name) { return name == "user_content" || rng_rank(name) >= 0; };
  bool ours = true;
  for (const auto& [key, item] : content.beside.items) ours = ours && is_file(*key.get_if<std::string>());
  if (ours) return content.beside;
  Dict files;
  files.items.emplace_back("user_content", content.beside);
  return files;
}

}  // namespace

void write_partial_target(Job& job) {
  Manifest manifest = manifest_for(job);
  std::string tag = base_name(job.request.to);
  if (tag.ends_with(kSuffix) && tag.size() > std::string(kSuffix).size())
    tag.resize(tag.size() - std::string(kSuffix).size());
  manifest.tag = tag;
  if (job.storage.stat(job.request.to).is_directory && !job.storage.stat(join(job.request.to, kManifestName)).exists &&
      holds_checkpoints(job.storage, job.request.to))
    fail(ErrorKind::kInvalidArgument, job.request.to, ": holds checkpoints; name the new one's own folder");

  std::deque<FileBuilder> builders;  // files refer to them
  std::vector<SaveFile> files;
  uint64_t bytes = 0;
  if (job.content.logical) {
    SliceFiles slices(job, manifest);
    for (int pp = 0; pp < manifest.pp; ++pp)
      for (int tp = 0; tp < manifest.tp; ++tp) slices.add(pp, tp, builders, files, bytes);
  } else {
    add_plain_model(job, builders, files, bytes);
  }
  const Dict beside = files_beside(job.content);
  for (const auto& [key, item] : beside.items) {
    const std::string& name = *key.get_if<std::string>();
    if (rng_rank(name) >= manifest.world_size) {
      job.result.left_out.push_back(name + ": no such rank in the new layout");
      continue;
    }
    FileBuilder& file = builders.emplace_back(job.feed, false);
    Value value = file.import(item);
    bytes += file.bytes();
    files.push_back({name + ".pt", file.finish(std::move(value), false)});
    files.back().content.with_slices = true;  // for the checksums
  }
  for (const SaveFile& file : files) job.result.tensors += file.content.tensors.size();

  // Config and tokenizer lie once beside the checkpoints; where they are beside another folder, they are copied there.
  manifest.hf.clear();
  StagedOutput out(job.storage, job.request.to, job.request.overwrite);
  job.announce(bytes, files.size());
  const Content& content = job.content;
  if (!content.companions.empty())
    manifest.hf = companions_name(job.storage, content.companions, content.config, job.request.to);
  out.make_folder();
  write_partial(job.storage, out.temporary(), manifest, files);
  job.finish();
  std::unique_ptr<StagedOutput> companions;  // before the checkpoint, which names them, and gone if it doesn't come
  if (!manifest.hf.empty())
    companions =
        keep_companions(job.storage, content.companions, content.config, join(parent(job.request.to), manifest.hf));
  try {
    job.publish(out);
  } catch (...) {
    if (companions && !out.published()) companions->withdraw();
    throw;
  }
}

void write_full_target(Job& job) {
  Manifest manifest = job.content.manifest.value_or(Manifest{});
  manifest.tag = base_name(job.request.to);
  manifest.world_size = manifest.pp = manifest.tp = manifest.rdp = 1;
  manifest.partition.first = {0, 0};
  manifest.model_config = job.content.config;
  manifest.hf.clear();
  if (!job.request.overwrite) {
    for (const std::string& file : full_files(job.request.to))
      if (job.storage.stat(file).exists)
        fail(ErrorKind::kInvalidArgument, file, ": is there already (--overwrite replaces it)");
  }
  uint64_t bytes = 0;
  size_t files = 1;
  std::deque<FileBuilder> builders;
  FullContent content;
  const auto make = [&](const Value& value) {
    FileBuilder& file = builders.emplace_back(job.feed, false);
    Value tree = file.import(value);
    bytes += file.bytes();
    return file.finish(std::move(tree), true);
  };
  content.weights = make(job.content.model);
  if (!job.content.optimizer.is_none()) content.optimizer = make(job.content.optimizer), ++files;
  const Dict beside = files_beside(job.content);
  for (const auto& [key, item] : beside.items) {
    const std::string& name = *key.get_if<std::string>();
    if (name == "user_content")
      content.user_content = make(item), ++files;
    else
      job.result.left_out.push_back(name + ": a full checkpoint has no place for it");
  }
  job.result.tensors = content.weights.tensors.size() + (content.optimizer ? content.optimizer->tensors.size() : 0);
  job.announce(bytes, files);
  write_full(
      job.storage, job.request.to, manifest, content, [&] { job.finish(); }, &job.result.left_behind);
}

}  // namespace shardsmith::cli
