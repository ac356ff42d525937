#include "cli/diff.h"

#include <fnmatch.h>

#include <algorithm>
#include <map>

#include "base/error.h"
#include "cli/diff_sides.h"
#include "cli/source.h"
#include "cli/values_stream.h"
#include "storage/numbers.h"

namespace shardsmith::cli {
namespace {

bool matches(const std::vector<std::string>& globs, const std::string& name) {
  return std::any_of(globs.begin(), globs.end(),
                     [&](const std::string& glob) { return fnmatch(glob.c_str(), name.c_str(), 0) == 0; });
}

// The elements' places: number `n` of a box, in its tensor's coordinates.
Shape place_in(const Box& box, int64_t n) {
  Shape place(box.offset.size());
  for (size_t d = place.size(); d-- > 0;) {
    place[d] = box.offset[d] + n % box.extent[d];
    n /= box.extent[d];
  }
  return place;
}

class Diff {
 public:
  Diff(Storage& storage, Sides sides, const DiffOptions& options)
      : storage_(storage), sides_(std::move(sides)), options_(options) {}

  DiffResult run() {
    result_.notices = std::move(sides_.notices);
    collect();
    compare_elements();
    for (auto& tensor : all_) {
      if (tensor.different(options_.ignore_dtype)) result_.tensors.push_back(std::move(tensor));
    }
    if (sides_.values) {
      const std::function<bool(const std::string&)> wanted = [this](const std::string& path) {
        return this->wanted(path);
      };
      result_.values = compare_values(sides_.a_values, sides_.b_values, options_.tolerance, wanted);
    }
    return std::move(result_);
  }

 private:
  bool wanted(const std::string& name) const {
    return (options_.include.empty() || matches(options_.include, name)) && !matches(options_.exclude, name);
  }

  // A name that only one side has says nothing where it is a second one of what both have.
  bool left_out_tie(const TensorEntry& tensor, const Index& here, const Index& there) {
    if (!sides_.ties_may_be_left_out || tensor.alias_of.empty()) return false;
    const TensorEntry* stored = stored_entry(here, tensor);
    return stored && there.find(stored->name) != nullptr;
  }

  // All names, those of A first, in the order in which they stand.
  void collect() {
    size_t ties = 0;
    for (const auto& tensor : sides_.a.tensors) {
      if (!wanted(tensor.name)) continue;
      ++result_.all_tensors;
      const TensorEntry* other = sides_.b.find(tensor.name);
      if (other) {
        add_pair(tensor, *other);
      } else if (left_out_tie(tensor, sides_.a, sides_.b)) {
        ++ties;
      } else {
        all_.push_back({.name = tensor.name, .a = TensorSide{tensor.dtype, tensor.shape}});
      }
    }
    for (const auto& tensor : sides_.b.tensors) {
      if (!wanted(tensor.name) || sides_.a.find(tensor.name)) continue;
      ++result_.all_tensors;
      if (left_out_tie(tensor, sides_.b, sides_.a)) {
        ++ties;
      } else {
        all_.push_back({.name = tensor.name, .b = TensorSide{tensor.dtype, tensor.shape}});
      }
    }
    if (ties > 0) {
      result_.notices.push_back(str(ties, ties == 1 ? " tied name stands" : " tied names stand",
                                    " on one side only: second names of tensors that both have"));
    }
  }

  void add_pair(const TensorEntry& a, const TensorEntry& b) {
    const TensorEntry *left = stored_entry(sides_.a, a), *right = stored_entry(sides_.b, b);
    all_.push_back({.name = a.name, .a = TensorSide{a.dtype, a.shape}, .b = TensorSide{b.dtype, b.shape}});
    if (!left || !right) {
      fail(ErrorKind::kCorrupt, left ? sides_.b.format : sides_.a.format, ": tensor '", a.name,
           "' is a second name of one that is not there");
    }
    if (a.shape != b.shape || left->shape != a.shape || right->shape != b.shape) return;
    all_.back().elements = volume(a.shape);
    ++result_.tensors_compared;
    result_.elements += all_.back().elements;
    // Two names of the same two tensors are one comparison.
    const auto [known, is_new] = pairs_.emplace(std::pair(left, right), streamed_.size());
    if (!is_new) return;
    streamed_.push_back({{left, right}});
    names_.push_back(all_.size() - 1);
  }

  void compare_elements() {
    // In the order of A's files, so that at least these are read from front to back.
    std::vector<size_t> order(streamed_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](size_t x, size_t y) {
      return file_place(*streamed_[x].sides[0]) < file_place(*streamed_[y].sides[0]);
    });
    std::vector<StreamedTensor> tensors;
    for (const size_t i : order) tensors.push_back(streamed_[i]);

    StreamOptions stream;
    stream.memory = options_.memory;
    stream.threads = options_.threads;
    stream.what = "compare";
    stream.progress = options_.progress;
    stream.notice = options_.notice;
    stream_values({&sides_.a, &sides_.b}, tensors, storage_, stream, [&](const StreamedBox& box) {
      add_box(all_[names_[order[box.tensor]]], *tensors[box.tensor].sides[0], *tensors[box.tensor].sides[1], box);
    });
  }

  void add_box(TensorDifference& tensor, const TensorEntry& a, const TensorEntry& b, const StreamedBox& box) const {
    ElementComparison comparison(a.dtype, b.dtype, options_.tolerance);
    comparison.add(box.sides[0].data(), box.sides[1].data(), volume(box.box.extent), 0, box.repeats);
    if (comparison.differing() == 0) return;
    if (tensor.differing == 0 || comparison.largest() > tensor.largest) {
      tensor.largest = comparison.largest();
      tensor.where = place_in(box.box, comparison.where());
      tensor.a_element = element_text(a.dtype, comparison.a());
      tensor.b_element = element_text(b.dtype, comparison.b());
    }
    tensor.differing += comparison.differing();
  }

  Storage& storage_;
  Sides sides_;
  const DiffOptions& options_;
  DiffResult result_;
  std::vector<TensorDifference> all_;
  std::vector<StreamedTensor> streamed_;
  std::vector<size_t> names_;  // streamed_[i] is all_[names_[i]]
  std::map<std::pair<const TensorEntry*, const TensorEntry*>, size_t> pairs_;
};

}  // namespace

bool TensorDifference::different(bool ignore_dtype) const {
  if (!a || !b || a->shape != b->shape || differing > 0) return true;
  return a->dtype != b->dtype && !ignore_dtype;
}

DiffResult diff(Storage& storage, const std::string& a, const std::string& b, const DiffOptions& options) {
  const Source left = open_source(storage, a), right = open_source(storage, b);
  return Diff(storage, make_sides(left, right, options.weights_only), options).run();
}

}  // namespace shardsmith::cli
