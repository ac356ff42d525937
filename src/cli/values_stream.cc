#include "cli/values_stream.h"

#include <algorithm>
#include <future>
#include <optional>
#include <unordered_map>

#include "base/error.h"
#include "cli/output.h"
#include "layout/plan.h"
#include "storage/transfer.h"

namespace shardsmith::cli {
namespace {

constexpr uint64_t kAlign = 64;                 // of a box in its window
constexpr uint64_t kLargestWindow = 64 << 20;   // larger ones only take longer to fill
constexpr uint64_t kLargestBuffers = 32 << 20;  // of the readers
constexpr size_t kManySlices = 16;
constexpr uint64_t kLarge = 1'000'000'000;  // takes a moment
// No deflated record holds more bytes for one of its own.
constexpr uint64_t kMostRepeated = 1100;

uint64_t aligned(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// A tensor as it is cut.
struct Job {
  size_t tensor = 0;
  Shape shape;  // without repetitions
  int64_t repeats = 1;
  uint64_t element = 0;  // bytes of one element on all sides
};

struct Piece {
  StreamedBox box;                // its spans point into the window
  std::vector<uint64_t> offsets;  // of each side in the window
};

struct Window {
  std::vector<Piece> pieces;
  uint64_t used = 0;
};

bool repeats_along(const StreamedTensor& tensor, size_t d) {
  return std::all_of(tensor.sides.begin(), tensor.sides.end(), [&](const TensorEntry* side) {
    return side->slices.size() == 1 && side->slices[0].strides[d] == 0 && side->slices[0].box.extent == side->shape;
  });
}

// Part of an entry: slices that have nothing to do with `box` are left out where there are many.
TensorEntry part_of(const TensorEntry& entry, const Box& box) {
  if (entry.slices.size() <= kManySlices) return entry;
  TensorEntry part{entry.name, entry.dtype, entry.shape, {}, ""};
  for (const Slice& slice : entry.slices) {
    if (intersect(slice.box, box)) part.slices.push_back(slice);
  }
  return part;
}

class Streamer {
 public:
  Streamer(const std::vector<const Index*>& indexes, const std::vector<StreamedTensor>& tensors, Storage& storage,
           const StreamOptions& options, const std::function<void(const StreamedBox&)>& visit)
      : indexes_(indexes), tensors_(tensors), storage_(storage), options_(options), visit_(visit) {}

  void run() {
    if (options_.memory < kLeastStreamMemory) {
      fail(ErrorKind::kInvalidArgument, "--memory-limit: at least ", kLeastStreamMemory, " bytes (32MiB) are needed");
    }
    for (const Index* index : indexes_) {
      in_files_.push_back(0);
      for (const FileEntry& file : index->files) in_files_.back() += file.size;
    }
    for (size_t i = 0; i < tensors_.size(); ++i) add(i);
    transfer_.budget = std::min(kLargestBuffers, options_.memory / 4);
    transfer_.threads = options_.threads;
    transfer_.check = options_.check;
    transfer_.buffers = &buffers_;
    room_ = std::min((options_.memory - transfer_.budget) / 2, kLargestWindow);
    room_ = aligned(std::min(room_, std::max<uint64_t>(total_ + jobs_.size() * indexes_.size() * kAlign, 4096)));

    if (options_.notice && total_ >= kLarge) {
      options_.notice(str(options_.what, ": ", human_bytes(total_), " to read, within ", human_bytes(options_.memory),
                          " of memory"));
    }
    memory_[0].emplace(static_cast<size_t>(room_));
    Window window = load(0);
    for (size_t next = 1; !window.pieces.empty(); next = 1 - next) {
      if (!memory_[next]) memory_[next].emplace(static_cast<size_t>(room_));
      auto coming = std::async(std::launch::async, [this, next] { return load(next); });
      for (const Piece& piece : window.pieces) {
        visit_(piece.box);
        for (const auto& side : piece.box.sides) done_ += side.size();
      }
      if (options_.progress) options_.progress({options_.what, done_, total_, "bytes"});
      window = coming.get();
    }
  }

 private:
  void add(size_t i) {
    const StreamedTensor& tensor = tensors_[i];
    Job job{i, tensor.sides[0]->shape, 1, 0};
    for (size_t d = 0; d < job.shape.size(); ++d) {
      if (job.shape[d] < 2 || !repeats_along(tensor, d)) continue;
      job.repeats *= job.shape[d];
      job.shape[d] = 1;
    }
    const int64_t elements = volume(job.shape);
    if (elements == 0) return;
    for (size_t side = 0; side < tensor.sides.size(); ++side) {
      const TensorEntry& entry = *tensor.sides[side];
      uint64_t bytes = 0;
      if (__builtin_mul_overflow(static_cast<uint64_t>(elements), static_cast<uint64_t>(size_of(entry.dtype)),
                                 &bytes) ||
          bytes / kMostRepeated > in_files_[side]) {
        fail(ErrorKind::kUnsupported,
             entry.slices.empty() ? indexes_[side]->format : indexes_[side]->files[entry.slices[0].file].path,
             ": tensor '", entry.name, "' ", to_string(entry.shape),
             " repeats its bytes too often to look at all of it");
      }
      job.element += static_cast<uint64_t>(size_of(entry.dtype));
      total_ += bytes;
    }
    jobs_.push_back(std::move(job));
  }

  // Fills window number `memory` with the next boxes; nothing in it at the end.
  Window load(size_t memory) {
    Window window;
    while (pending_ || take()) {
      if (!place(*pending_, window)) break;
      pending_.reset();
    }
    for (size_t side = 0; side < indexes_.size(); ++side) read(side, window, *memory_[memory]);
    return window;
  }

  // The next box, to `pending_`.
  bool take() {
    StreamedBox next;
    while (true) {
      if (cutter_ && cutter_->next(next.box)) {
        next.tensor = jobs_[current_].tensor;
        next.repeats = jobs_[current_].repeats;
        pending_ = std::move(next);
        return true;
      }
      if (cutter_) ++current_;
      if (current_ >= jobs_.size()) return false;
      cutter_ = cutter_for(jobs_[current_]);
    }
  }

  // False where the window has no room for it.
  bool place(const StreamedBox& box, Window& window) {
    Piece piece{box, {}};
    uint64_t at = window.used;
    const auto elements = static_cast<uint64_t>(volume(box.box.extent));
    for (const TensorEntry* side : tensors_[box.tensor].sides) {
      piece.offsets.push_back(at);
      at += aligned(elements * static_cast<uint64_t>(size_of(side->dtype)));
    }
    if (at > room_) return false;
    window.used = at;
    window.pieces.push_back(std::move(piece));
    return true;
  }

  BoxCutter cutter_for(const Job& job) const {
    const uint64_t slack = kAlign * indexes_.size();
    const auto most = static_cast<int64_t>(std::max<uint64_t>((room_ - slack) / job.element, 1));
    if (volume(job.shape) <= most) return BoxCutter(job.shape, most);
    // Along which dimension do all sides read the least for one box?
    size_t best = 0;
    double least = 0;
    size_t tried = 0;
    for (size_t d = 0; d < job.shape.size() && tried < 8; ++d) {
      if (job.shape[d] < 2) continue;
      Box box;
      BoxCutter(job.shape, most, d).next(box);
      uint64_t bytes = 0;
      for (size_t side = 0; side < indexes_.size(); ++side) {
        bytes += plan(side, {{tensors_[job.tensor].sides[side], box, 0}}).first.report.bytes_read;
      }
      const double cost = static_cast<double>(bytes) / static_cast<double>(volume(box.extent));
      if (tried++ == 0 || cost < 0.9 * least) best = d, least = cost;
    }
    return BoxCutter(job.shape, most, best);
  }

  struct Wanted {
    const TensorEntry* entry;
    Box box;
    uint64_t offset;
  };
  // The plan for these boxes, and the small index that it counts in.
  std::pair<Plan, Index> plan(size_t side, const std::vector<Wanted>& wanted) const {
    Index part;
    part.format = indexes_[side]->format;
    part.files = indexes_[side]->files;
    Target target;
    std::unordered_map<std::string_view, size_t> known;
    for (const Wanted& one : wanted) {
      const auto [at, is_new] = known.emplace(one.entry->name, part.tensors.size());
      if (is_new) {
        part.tensors.push_back(part_of(*one.entry, one.box));
      } else if (one.entry->slices.size() > kManySlices) {
        part.tensors[at->second] = *one.entry;  // another box may need other slices
      }
      Want want{one.entry->name, one.entry->dtype, one.entry->shape, one.box};
      want.offset = one.offset;
      want.strides = contiguous_strides(one.box.extent);
      target.wants.push_back(std::move(want));
    }
    part.reindex();
    Plan result = make_plan(part, target);
    return {std::move(result), std::move(part)};
  }

  void read(size_t side, Window& window, AlignedBuffer& memory) {
    if (window.pieces.empty()) return;
    std::vector<Wanted> wanted;
    for (const Piece& piece : window.pieces) {
      wanted.push_back({tensors_[piece.box.tensor].sides[side], piece.box.box, piece.offsets[side]});
    }
    const auto [reads, part] = plan(side, wanted);
    require_complete(reads, part.files.empty() ? std::string_view(part.format) : std::string_view(part.files[0].path));
    const Destination destination{std::span(memory.data(), memory.size())};
    execute(reads, part, std::span(&destination, 1), storage_, transfer_);
    for (Piece& piece : window.pieces) {
      const auto bytes = static_cast<uint64_t>(volume(piece.box.box.extent)) *
                         static_cast<uint64_t>(size_of(tensors_[piece.box.tensor].sides[side]->dtype));
      piece.box.sides.emplace_back(memory.data() + piece.offsets[side], static_cast<size_t>(bytes));
    }
  }

  const std::vector<const Index*>& indexes_;
  const std::vector<StreamedTensor>& tensors_;
  Storage& storage_;
  const StreamOptions& options_;
  const std::function<void(const StreamedBox&)>& visit_;

  std::vector<uint64_t> in_files_;  // bytes of each index's files
  std::vector<Job> jobs_;
  uint64_t total_ = 0, done_ = 0;
  TransferBuffers buffers_;
  TransferOptions transfer_;
  uint64_t room_ = 0;
  std::optional<AlignedBuffer> memory_[2];
  // Where reading is; used by one load() at a time.
  size_t current_ = 0;
  std::optional<BoxCutter> cutter_;
  std::optional<StreamedBox> pending_;
};

}  // namespace

void stream_values(const std::vector<const Index*>& indexes, const std::vector<StreamedTensor>& tensors,
                   Storage& storage, const StreamOptions& options,
                   const std::function<void(const StreamedBox&)>& visit) {
  Streamer(indexes, tensors, storage, options, visit).run();
}

std::pair<uint32_t, uint64_t> file_place(const TensorEntry& tensor) {
  if (tensor.slices.empty()) return {UINT32_MAX, 0};
  std::pair<uint32_t, uint64_t> first{tensor.slices[0].file, tensor.slices[0].offset};
  for (const Slice& slice : tensor.slices) first = std::min(first, {slice.file, slice.offset + slice.inner});
  return first;
}

BoxCutter::BoxCutter(Shape shape, int64_t most, size_t first) : shape_(std::move(shape)), at_(whole(shape_)) {
  std::vector<size_t> order;
  if (first < shape_.size()) order.push_back(first);
  for (size_t d = 0; d < shape_.size(); ++d) {
    if (d != first) order.push_back(d);
  }
  more_ = volume(shape_) > 0;
  if (!more_) return;
  int64_t inner = volume(shape_);
  for (const size_t d : order) {
    if (inner <= most) break;
    inner /= shape_[d];
    order_.push_back(d);
    rows_ = std::max<int64_t>(most / inner, 1);
    if (inner <= most) break;
  }
  for (size_t i = 0; i < order_.size(); ++i) {
    at_.extent[order_[i]] = i + 1 < order_.size() ? 1 : std::min(rows_, shape_[order_[i]]);
  }
}

bool BoxCutter::next(Box& box) {
  if (!more_) return false;
  box = at_;
  // Advance like a clock, the last one fastest.
  for (size_t i = order_.size(); i-- > 0;) {
    const size_t d = order_[i];
    at_.offset[d] += at_.extent[d];
    if (at_.offset[d] < shape_[d]) {
      at_.extent[d] = std::min(i + 1 < order_.size() ? 1 : rows_, shape_[d] - at_.offset[d]);
      return true;
    }
    at_.offset[d] = 0;
    at_.extent[d] = i + 1 < order_.size() ? 1 : std::min(rows_, shape_[d]);
  }
  more_ = false;
  return true;
}

}  // namespace shardsmith::cli
