#include "checkpoint/save_full.h"

#include <algorithm>
#include <deque>
#include <optional>

#include "base/error.h"
#include "checkpoint/commit.h"
#include "checkpoint/full.h"
#include "checkpoint/full_layout.h"
#include "checkpoint/full_publication.h"
#include "checkpoint/gather.h"
#include "checkpoint/load.h"
#include "checkpoint/outcome.h"
#include "checkpoint/save_steps.h"
#include "checkpoint/written_shares.h"
#include "format/pt_file.h"

namespace shardsmith {
namespace {

constexpr uint64_t kBlock = StreamWriter::kBlock;

// One of the files that all write together.
struct Joint {
  std::string name;
  FullFile file;
  std::unique_ptr<PtFile> layout;
  std::vector<Share> shares;
  std::unique_ptr<Gather> gather;
  std::unique_ptr<PtRanges> ranges;
  std::unique_ptr<WriteFile> out;
};

void check_request(const FullRequest& request) {
  check_place(request.path, request.tag);
  const std::string& tag = request.tag;
  for (const char* kind : {"user_content_", "optimizer_"}) {
    if (tag.starts_with(kind))
      fail(ErrorKind::kInvalidArgument, "tag '", tag, "' would be taken for another checkpoint's companion (", kind,
           "...); use another one");
  }
  if (tag == kNewestName || tag == "hf" || tag.ends_with("_partial"))
    fail(ErrorKind::kInvalidArgument, "tag '", tag, "' can't be a full checkpoint's: the name is needed otherwise");
}

std::string user_content_name(const FullRequest& request) { return "user_content_" + request.tag; }

Value announcement(const FullRequest& request, bool is_first) {
  check_request(request);
  Value value;
  value.set("essentials", essentials("a full checkpoint", request.path, request.tag, request.manifest));
  value.set("translate", request.translate);
  value.set("host", request.host.empty() ? host_identity() : request.host);
  if (request.weights) value.set("weights", announce_full(*request.weights, "model/", request.tag));
  if (request.optimizer)
    value.set("optimizer", announce_full(*request.optimizer, "optimizer/", "optimizer_" + request.tag));
  if (!is_first) return value;
  const std::string save_id = make_save_id();
  value.set("save_id", save_id);
  value.set("time", seconds_now());
  if (request.user_content) {
    const PtFile layout(with_save_id(*request.user_content, save_id), user_content_name(request));
    value.set("user_content", static_cast<int64_t>(layout.size()));
  }
  return value;
}

std::vector<Value> parts_of(const std::vector<Value>& announcements, const char* kind) {
  std::vector<Value> parts;
  for (const Value& announcement : announcements) {
    const Value* part = announcement.find(kind);
    parts.push_back(part ? *part : Value());
  }
  return parts;
}

// Processes of one machine may write one file; of several only where the storage says so.
std::vector<int> writers_of(const std::vector<Value>& announcements, const Storage& storage) {
  std::vector<int> writers;
  for (size_t rank = 0; rank < announcements.size(); ++rank)
    if (storage.is_shared_by_hosts() || *announcements[rank].find("host") == *announcements[0].find("host"))
      writers.push_back(static_cast<int>(rank));
  return writers;
}

std::optional<FamilyModel> family_of(const FullRequest& request) {
  if (!request.translate || request.manifest.model_config.is_none()) return std::nullopt;
  try {
    return describe_model(request.manifest.model_config);
  } catch (const Error& e) {
    // A model that is none of our families keeps its own names.
    if (e.kind() == ErrorKind::kInvalidArgument || e.kind() == ErrorKind::kUnsupported) return std::nullopt;
    throw;
  }
}

// A save by all ranks, step by step. Its state is the same on all ranks but for what each holds.
class FullSave {
 public:
  FullSave(Storage& storage, Peers& peers, Transport* transport, const FullRequest& request)
      : storage_(storage), peers_(peers), transport_(transport), request_(request), manifest_(request.manifest) {}

  SaveResult run();

 private:
  std::vector<Value> each(const std::function<Value()>& work) { return all_do(peers_, request_.deadline, work); }
  bool is_first() const { return peers_.rank() == 0; }
  bool is_last_of(const Joint& joint) const { return joint.shares.back().rank == peers_.rank(); }

  void lay_out(const std::vector<Value>& announcements);
  void add_joint(const std::vector<Value>& parts, const PtContent* own, const std::string& name,
                 const FamilyModel* family, const std::vector<int>& writers);
  void make_ready(Joint& joint);
  void prepare();
  Value write();
  void write_blocks(Joint& joint, std::exception_ptr& error);
  void take_checksums(const std::vector<Value>& written);
  void write_rest();
  Value commit();

  Storage& storage_;
  Peers& peers_;
  Transport* transport_;
  const FullRequest& request_;
  Manifest manifest_;  // of the weights' record; files are the companions
  bool has_user_content_ = false;
  std::deque<Joint> joints_;  // the optimizer, where there is one; the weights
  std::vector<PtFile::Tail> tails_;
  std::vector<std::string> left_out_;
  std::string folder_;  // temporary
  uint64_t bytes_ = 0, done_ = 0, total_ = 0;
};

void FullSave::add_joint(const std::vector<Value>& parts, const PtContent* own, const std::string& name,
                         const FamilyModel* family, const std::vector<int>& writers) {
  std::vector<uint64_t> load(static_cast<size_t>(peers_.size()), 0);
  for (const Joint& before : joints_)
    for (const Share& share : before.shares) load[static_cast<size_t>(share.rank)] += share.end - share.begin;
  Joint& joint = joints_.emplace_back();
  joint.name = name;
  joint.file = merge_full(parts, peers_.rank(), own, family, name);
  for (const std::string& tensor : joint.file.left_out)
    left_out_.push_back(str(tensor, " is left out of ", name, ": the model's family has no such tensor"));
  if (joint.file.content.value.is_none()) joint.file.content.value = Dict{};
  joint.file.content.extra = name == request_.tag ? full_extra(manifest_) : Value();
  if (name != request_.tag) joint.file.content.extra.set("save_id", manifest_.save_id);
  joint.layout = std::make_unique<PtFile>(joint.file.content, name);
  joint.shares = share_out(stretches_of(joint.file, *joint.layout, writers), load);
  bytes_ += joint.layout->size();
}

// Every rank comes to the same layout, or to the same error.
void FullSave::lay_out(const std::vector<Value>& announcements) {
  check_essentials(announcements);
  for (size_t rank = 0; rank < announcements.size(); ++rank)
    if (*announcements[rank].find("translate") != *announcements[0].find("translate"))
      fail_differing(rank, str("rank ", rank, " saves with another translate_if_full than rank 0"));
  manifest_.tag = request_.tag;
  manifest_.save_id = *announcements[0].find("save_id")->get_if<std::string>();
  manifest_.time = *announcements[0].find("time")->get_if<double>();
  manifest_.files.clear();
  folder_ = temporary_folder(request_.path, request_.tag, manifest_.save_id);
  const std::string no_digest(8, '0');  // for now: as long as it will be
  const Value* user_content = announcements[0].find("user_content");
  has_user_content_ = user_content != nullptr;
  if (user_content) {
    const auto size = static_cast<uint64_t>(*user_content->get_if<int64_t>());
    manifest_.files.push_back({user_content_name(request_), size, no_digest, no_digest});
    bytes_ += size;
  }
  const std::vector<int> writers = writers_of(announcements, storage_);
  const auto own = [](const std::optional<PtContent>& content) { return content ? &*content : nullptr; };
  const std::vector<Value> optimizers = parts_of(announcements, "optimizer");
  if (std::any_of(optimizers.begin(), optimizers.end(), [](const Value& v) { return !v.is_none(); })) {
    add_joint(optimizers, own(request_.optimizer), "optimizer_" + request_.tag, nullptr, writers);
    manifest_.files.push_back({joints_[0].name, joints_[0].layout->size(), no_digest, no_digest});
  }
  const std::optional<FamilyModel> family = family_of(request_);
  add_joint(parts_of(announcements, "weights"), own(request_.weights), request_.tag, family ? &*family : nullptr,
            writers);
}

void FullSave::make_ready(Joint& joint) {
  joint.gather = std::make_unique<Gather>(joint.file, *joint.layout, joint.shares, peers_.rank(), peers_.size(),
                                          transport_, request_.deadline);
  joint.ranges = std::make_unique<PtRanges>(*joint.layout);
  for_each_section(*joint.layout, joint.shares, peers_.rank(),
                   [&](const PtFile::Section& section) { total_ += section.length; });
}

// Rank 0, before anything is written: sweeps what a dead save left, looks for room, makes the folder and its files.
void FullSave::prepare() {
  make_durable_directory(storage_, request_.path);
  recover(storage_, request_.path);
  for (const std::string& file : full_files(join(request_.path, request_.tag))) {
    const Stat there = storage_.stat(file);
    if (there.exists && (there.is_directory || there.is_link))
      fail(ErrorKind::kInvalidArgument, file, " is there but is no file; move it away or use another tag");
  }
  check_room(storage_, request_.path, bytes_);
  storage_.make_directory(folder_);
  try {
    for (const Joint& joint : joints_)
      storage_.create(join(folder_, joint.name), Access::kDirect, joint.layout->size())->close();
  } catch (...) {
    remove_quietly(storage_, folder_);
    throw;
  }
}

// This rank's blocks of a file. Whatever fails here, the rounds go on, as the others need this rank's bytes.
void FullSave::write_blocks(Joint& joint, std::exception_ptr& error) {
  const auto attempt = [&](const auto& work) {
    if (error) return;
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
  };
  const uint64_t blocks = blocks_of(joint.shares, peers_.rank());
  std::optional<StreamWriter> stream;
  if (blocks > 0) {
    attempt([&] {
      joint.out = storage_.open_write(join(folder_, joint.name), Access::kDirect);
      stream.emplace(*joint.out, blocks * kBlock);
    });
  }
  for (size_t round = 0; round < joint.gather->rounds(); ++round) {
    try {
      joint.gather->move(round);
    } catch (...) {  // nothing can be moved any more
      if (!error) error = std::current_exception();
      return;
    }
    attempt([&] {
      for (const Gather::Range& range : joint.gather->window(round)) {
        joint.ranges->write(*stream, range.begin, range.end, *joint.gather);
        done_ += range.end - range.begin;
        if (request_.progress) request_.progress({"write", std::min(done_, total_), total_, "bytes"});
      }
    });
  }
  if (stream) attempt([&] { stream->finish(); });
}

// Returns the checksums of this rank's sections, and what rank 0 has written alone.
Value FullSave::write() {
  std::exception_ptr error;
  Value result;
  for (Joint& joint : joints_) {
    write_blocks(joint, error);
    result.set(joint.name, checksums_of(*joint.layout, joint.shares, peers_.rank(), *joint.ranges));
  }
  if (error) std::rethrow_exception(error);
  if (is_first() && has_user_content_) {
    const std::string path = join(folder_, user_content_name(request_));
    const Written written = write_pt(storage_, path, with_save_id(*request_.user_content, manifest_.save_id));
    result.set("user_content", List{written.digest, written.tail});
  }
  return result;
}

// Every rank: all checksums, and with them the files' tails.
void FullSave::take_checksums(const std::vector<Value>& written) {
  size_t companion = 0;
  if (has_user_content_) {
    const List& digests = *written[0].find("user_content")->get_if<List>();
    manifest_.files[companion].digest = *digests[0].get_if<std::string>();
    manifest_.files[companion++].tail = *digests[1].get_if<std::string>();
  }
  for (Joint& joint : joints_) {
    shardsmith::take_checksums(*joint.layout, joint.shares, written, joint.name, *joint.ranges);
    const bool is_weights = joint.name == request_.tag;
    tails_.push_back(
        joint.layout->finish(joint.ranges->crcs(), is_weights ? full_extra(manifest_) : joint.file.content.extra));
    if (is_weights) continue;
    manifest_.files[companion].digest = tails_.back().digest;
    manifest_.files[companion++].tail = tails_.back().tail_digest;
  }
}

void FullSave::write_rest() {
  for (size_t i = 0; i < joints_.size(); ++i) {
    Joint& joint = joints_[i];
    if (!joint.out) continue;
    joint.ranges->write_rest(*joint.out);
    if (is_last_of(joint)) joint.out->write(joint.layout->covered(), std::as_bytes(std::span(tails_[i].bytes)));
    joint.out->sync();
    joint.out->close();
    joint.out.reset();
  }
}

// Steps 2 to 4 of full.h, with `newest`; rank 0.
Value FullSave::commit() {
  const std::string& path = request_.path;
  const std::string newest = read_newest(storage_, path);
  storage_.sync_directory(folder_);
  std::vector<std::string> names;
  for (const ManifestFile& file : manifest_.files) names.push_back(file.name);
  names.push_back(request_.tag);
  FullPublication publication(storage_, join(path, request_.tag), folder_, names);
  try {
    write_newest(storage_, path, request_.tag);
  } catch (...) {
    publication.undo();
    set_back_newest(storage_, path, newest);
    throw;
  }
  std::vector<std::string> warnings = publication.finish(), pruned;
  try {
    pruned = prune(storage_, path, request_.num_kept_partial_checkpoints.value_or(-1), request_.tag);
  } catch (const Error& e) {
    warnings.push_back(str("the checkpoint is saved, but tidying up failed: ", e.what()));
  }
  Value value;
  value.set("pruned", list_of(pruned));
  value.set("warnings", list_of(warnings));
  return value;
}

SaveResult FullSave::run() {
  lay_out(each([&] { return announcement(request_, is_first()); }));
  each([&]() -> Value {
    for (Joint& joint : joints_) make_ready(joint);
    return None{};
  });
  each([&]() -> Value {
    if (is_first()) prepare();
    return None{};
  });
  bool answered = false;  // all have stopped writing: the folder can be removed
  try {
    take_checksums(each([&] { return write(); }));
    each([&]() -> Value {
      write_rest();
      return None{};
    });
    answered = true;
    const std::vector<Value> committed = each([&]() -> Value { return is_first() ? commit() : None{}; });
    SaveResult result{.folder = join(request_.path, request_.tag), .bytes = bytes_};
    result.pruned = texts(*committed[0].find("pruned"));
    result.warnings = texts(*committed[0].find("warnings"));
    result.warnings.insert(result.warnings.begin(), left_out_.begin(), left_out_.end());
    return result;
  } catch (const Error& e) {
    // A rank that gave no answer may still be writing; then the next save sweeps.
    const bool silent = e.kind() == ErrorKind::kTimeout || e.kind() == ErrorKind::kPeer;
    joints_.clear();
    if (is_first() && (answered || !silent)) remove_quietly(storage_, folder_);
    throw;
  }
}

}  // namespace

SaveResult save_full(Storage& storage, Peers& peers, Transport* transport, const FullRequest& request) {
  return FullSave(storage, peers, transport, request).run();
}

}  // namespace shardsmith
