#include "layout/plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <set>
#include <tuple>
#include <unordered_map>

#include "base/error.h"
#include "layout/box_tree.h"
#include "layout/cut.h"

namespace shardsmith {
namespace {

class Planner {
 public:
  Planner(const Index& index, const PlanOptions& options)
      : index_(index), options_(options), wanted_(index.tensors.size(), false) {}

  void add(const Want& want);
  Plan finish();

 private:
  // The entry that holds the elements: a tie is followed to the name that is stored.
  const TensorEntry* stored(const Want& want);
  void add_slice(const Want& want, const TensorEntry& tensor, const Slice& slice, const Box& both);

  using Record = std::tuple<uint32_t, uint64_t, uint64_t>;  // file, offset, stored bytes

  size_t number_of(const TensorEntry* tensor) const { return static_cast<size_t>(tensor - index_.tensors.data()); }

  const Index& index_;
  const PlanOptions& options_;
  Plan plan_;
  std::vector<bool> wanted_;                     // by the tensor's number
  std::set<std::string> missing_, cast_, tied_;  // said once each
  std::map<uint32_t, std::vector<Wish>> wishes_;
  std::map<Record, Read> deflated_;
  std::unordered_map<const TensorEntry*, std::unique_ptr<BoxTree>> trees_;
};

const TensorEntry* Planner::stored(const Want& want) {
  const TensorEntry* tensor = index_.find(want.name);
  for (size_t hops = 0; tensor && !tensor->alias_of.empty(); ++hops) {
    if (hops > index_.tensors.size()) {
      fail(ErrorKind::kCorrupt, index_.format, ": tensor '", want.name, "' is a second name of itself");
    }
    wanted_[number_of(tensor)] = true;
    if (tied_.insert(tensor->name).second) plan_.report.tied.push_back(tensor->name + " = " + tensor->alias_of);
    tensor = index_.find(tensor->alias_of);
  }
  return tensor;
}

void Planner::add(const Want& want) {
  const TensorEntry* tensor = stored(want);
  const auto miss = [&] {
    if (missing_.insert(want.name).second) plan_.report.missing.push_back(want.name);
  };
  if (!tensor) return miss();
  wanted_[number_of(tensor)] = true;
  const auto where = [&] { return tensor->slices.empty() ? index_.format : index_.files[tensor->slices[0].file].path; };
  if (tensor->shape != want.shape) {
    fail(ErrorKind::kCorrupt, where(), ": tensor '", want.name, "' has shape ", to_string(tensor->shape), ", expected ",
         to_string(want.shape));
  }
  if (!inside(want.box, want.shape) || want.strides.size() != want.shape.size()) {
    fail(ErrorKind::kInvalidArgument, "tensor '", want.name, "': box ", to_string(want.box), " is not part of ",
         to_string(want.shape));
  }
  if (tensor->dtype != want.dtype) {
    if (!is_floating(tensor->dtype) || !is_floating(want.dtype)) {
      fail(ErrorKind::kUnsupported, where(), ": tensor '", want.name, "' is ", to_string(tensor->dtype),
           " and is wanted as ", to_string(want.dtype), "; only floating-point types are cast");
    }
    if (cast_.insert(want.name).second) {
      plan_.report.cast.push_back(str(want.name, ": ", to_string(tensor->dtype), " -> ", to_string(want.dtype)));
    }
  }
  int64_t left = volume(want.box.extent);
  plan_.report.bytes_needed += static_cast<uint64_t>(left) * static_cast<uint64_t>(size_of(tensor->dtype));
  if (left == 0) return;

  const auto use = [&](size_t i) {
    const Slice& slice = tensor->slices[i];
    if (const auto both = intersect(slice.box, want.box)) {
      left -= volume(both->extent);
      add_slice(want, *tensor, slice, *both);
    }
    return true;
  };
  if (tensor->slices.size() <= 16) {
    for (size_t i = 0; i < tensor->slices.size(); ++i) use(i);
  } else {
    auto& tree = trees_[tensor];
    if (!tree) tree = std::make_unique<BoxTree>(tensor->slices);
    tree->find(want.box, use);
  }
  if (left < 0) fail(ErrorKind::kCorrupt, where(), ": slices of tensor '", tensor->name, "' overlap");
  if (left > 0) miss();
}

void Planner::add_slice(const Want& want, const TensorEntry& tensor, const Slice& slice, const Box& both) {
  const int64_t from = size_of(tensor.dtype), to = size_of(want.dtype);
  Wish wish;
  Copy& copy = wish.copy;
  copy.buffer = want.buffer;
  copy.offset = want.offset;
  copy.from = tensor.dtype, copy.to = want.dtype;
  copy.byte_swapped = slice.encoding == Encoding::kByteSwapped;
  copy.tensor = static_cast<uint32_t>(number_of(&tensor));
  copy.extent = both.extent;
  uint64_t source = 0;  // bytes into the slice
  for (size_t d = 0; d < both.extent.size(); ++d) {
    source += static_cast<uint64_t>((both.offset[d] - slice.box.offset[d]) * slice.strides[d] * from);
    copy.offset += static_cast<uint64_t>((both.offset[d] - want.box.offset[d]) * want.strides[d] * to);
    copy.source_step.push_back(slice.strides[d] * from);
    copy.destination_step.push_back(want.strides[d] * to);
  }
  normalise(copy);
  if (slice.encoding == Encoding::kDeflated) {
    // A deflated record is read as a whole, once, and inflated as far as anyone needs it.
    Read& read = deflated_[{slice.file, slice.offset, slice.stored}];
    read.file = slice.file, read.offset = slice.offset, read.length = slice.stored;
    copy.source = slice.inner + source;
    read.inflated = std::max(read.inflated, copy.source + span(copy));
    read.copies.push_back(std::move(copy));
    return;
  }
  wish.begin = slice.offset + source;
  wishes_[slice.file].push_back(std::move(wish));
}

Plan Planner::finish() {
  for (auto& [file, wishes] : wishes_) {
    std::vector<Read> reads = cut(std::move(wishes), file, options_);
    std::move(reads.begin(), reads.end(), std::back_inserter(plan_.reads));
  }
  for (auto& [record, read] : deflated_) plan_.reads.push_back(std::move(read));
  std::stable_sort(plan_.reads.begin(), plan_.reads.end(), [](const Read& a, const Read& b) {
    return a.file != b.file ? a.file < b.file : a.offset < b.offset;
  });
  for (const Read& read : plan_.reads) plan_.report.bytes_read += read.length;
  for (const TensorEntry& tensor : index_.tensors) {
    const TensorEntry* stored = tensor.alias_of.empty() ? nullptr : index_.find(tensor.alias_of);
    if (wanted_[number_of(&tensor)] || (stored && wanted_[number_of(stored)])) continue;
    plan_.report.unexpected.push_back(tensor.name);
  }
  return std::move(plan_);
}

}  // namespace

Plan make_plan(const Index& index, const Target& target, const PlanOptions& options) {
  Planner planner(index, options);
  for (const Want& want : target.wants) planner.add(want);
  return planner.finish();
}

void require_complete(const Plan& plan, std::string_view where) {
  const std::vector<std::string>& missing = plan.report.missing;
  if (missing.empty()) return;
  std::string names;
  for (size_t i = 0; i < missing.size() && i < 3; ++i) names += (i ? "', '" : "'") + missing[i];
  fail(ErrorKind::kCorrupt, where, ": ", missing.size(), missing.size() == 1 ? " tensor is" : " tensors are",
       " missing or not whole: ", names, missing.size() > 3 ? "', ..." : "'");
}

}  // namespace shardsmith
