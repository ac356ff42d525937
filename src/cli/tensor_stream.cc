#include "cli/tensor_stream.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <unordered_set>

#include "base/error.h"
#include "layout/plan.h"
#include "layout/range.h"

namespace shardsmith::cli {
namespace {

constexpr uint64_t kReadBuffer = 8 << 20;  // a reading thread's
// What is used of a window where the source is read front to back. Memory that was never touched is slow to get.
constexpr uint64_t kUsualWindow = 8 << 20;
constexpr uint64_t kMaxWindow = 96 << 20;

Shape ordered_extent(const StreamTensor& tensor) {
  Shape extent;
  for (const size_t d : tensor.order) extent.push_back(tensor.box.extent[d]);
  return extent;
}

int64_t elements_of(const StreamTensor& tensor) { return volume(tensor.box.extent); }

// Elements that are asked for in another order than they lie in: such a tensor is best read in one go.
bool is_turned(const StreamTensor& tensor) {
  return tensor.order.size() > 1 && stored_order(*tensor.entry) != tensor.order;
}

}  // namespace

uint64_t StreamTensor::bytes() const { return static_cast<uint64_t>(volume(box.extent) * size_of(dtype)); }

StreamTensor whole_tensor(const TensorEntry& entry, Dtype dtype) {
  StreamTensor tensor{&entry, dtype, whole(entry.shape), std::vector<size_t>(entry.shape.size())};
  std::iota(tensor.order.begin(), tensor.order.end(), 0);
  return tensor;
}

std::vector<size_t> stored_order(const TensorEntry& entry) {
  std::vector<size_t> order(entry.shape.size());
  std::iota(order.begin(), order.end(), 0);
  const auto largest = std::max_element(entry.slices.begin(), entry.slices.end(), [](const Slice& a, const Slice& b) {
    return volume(a.box.extent) < volume(b.box.extent);
  });
  if (largest == entry.slices.end()) return order;
  const auto step = [&](size_t d) { return largest->box.extent[d] == 1 ? int64_t{-1} : largest->strides[d]; };
  // Dimensions of one element have no say; they stay where they are among the others.
  for (size_t d = 0; d < order.size(); ++d) {
    if (step(d) < 0) return order;
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return step(a) > step(b); });
  return order;
}

StreamMemory::StreamMemory(uint64_t bytes, int threads) {
  if (bytes < kLeast)
    fail(ErrorKind::kNoSpace, "the memory limit leaves ", bytes, " bytes for data, ", kLeast, " are needed");
  // One window is given out while the others are read, each by a thread with a buffer.
  const uint64_t readers = static_cast<uint64_t>(std::clamp(threads, 1, 16));
  buffer_size_ = std::min(kReadBuffer, bytes / 4 / readers);
  const uint64_t window = std::min(kMaxWindow, (bytes - buffer_size_ * readers) / (readers + 1));
  for (uint64_t i = 0; i <= readers; ++i) windows_.emplace_back(window);
}

TensorStream::TensorStream(const std::vector<FileEntry>& files, std::vector<StreamTensor> tensors, StreamMemory& memory,
                           Storage& storage, BlockLedger* ledger, std::function<void()> check_stop)
    : files_(files),
      tensors_(std::move(tensors)),
      memory_(memory),
      storage_(storage),
      ledger_(ledger),
      check_stop_(std::move(check_stop)) {
  for (const StreamTensor& tensor : tensors_) turned_.push_back(is_turned(tensor));
}

TensorStream::~TensorStream() {
  for (Ahead& ahead : ahead_) ahead.loaded.wait();  // they write into memory that isn't ours
}

const TensorStream::Piece* TensorStream::find(size_t tensor, uint64_t offset) const {
  // Pieces are ordered; the one asked for is most often the first that is not yet used up.
  const auto after =
      std::upper_bound(current_.pieces.begin(), current_.pieces.end(), std::pair(tensor, offset),
                       [](const auto& key, const Piece& piece) { return key < std::pair(piece.tensor, piece.begin); });
  if (after == current_.pieces.begin()) return nullptr;
  const Piece& piece = *std::prev(after);
  return piece.tensor == tensor && offset < piece.end ? &piece : nullptr;
}

void TensorStream::read(size_t tensor, uint64_t offset, std::span<std::byte> out) {
  if (check_stop_) check_stop_();
  const auto element = static_cast<uint64_t>(size_of(tensors_[tensor].dtype));
  while (!out.empty()) {
    const Piece* piece = find(tensor, offset);
    if (!piece) {
      advance({tensor, static_cast<int64_t>(offset / element)});
      continue;
    }
    const uint64_t length = std::min<uint64_t>(out.size(), piece->end - offset);
    std::memcpy(out.data(), memory_.windows_[current_.memory].data() + piece->at + (offset - piece->begin), length);
    out = out.subspan(length);
    offset += length;
  }
}

// Makes the window that begins at `place` the current one.
void TensorStream::advance(Place place) {
  const auto begins_there = [&](const Window& window) {
    return window.pieces[0].tensor == place.tensor &&
           window.pieces[0].begin == static_cast<uint64_t>(place.element * size_of(tensors_[place.tensor].dtype));
  };
  if (ahead_.empty() || !begins_there(ahead_.front().window)) {  // the first one, or someone jumps
    for (Ahead& ahead : ahead_) ahead.loaded.wait();
    ahead_.clear();
    current_ = {};
    next_ = place;
  }
  read_ahead();
  ahead_.front().loaded.wait();  // its thread reads the window's list: only now may that move
  Ahead next = std::move(ahead_.front());
  ahead_.pop_front();
  next.loaded.get();
  current_ = std::move(next.window);
  read_ahead();
}

void TensorStream::read_ahead() {
  const size_t windows = memory_.windows_.size();
  while (ahead_.size() + (current_.pieces.empty() ? 0 : 1) < windows) {
    const size_t last = ahead_.empty() ? current_.memory : ahead_.back().window.memory;
    Window window = lay_out(next_, (last + 1) % windows);
    if (window.pieces.empty()) return;
    Ahead& ahead = ahead_.emplace_back();
    ahead.window = std::move(window);
    ahead.loaded = std::async(std::launch::async, [this, &ahead] { load(ahead.window); });
  }
}

TensorStream::Window TensorStream::lay_out(Place& place, size_t memory) const {
  const uint64_t size_of_window = memory_.windows_[memory].size();
  Window window;
  window.memory = memory;
  uint64_t used = 0;
  for (; place.tensor < tensors_.size(); ++place.tensor, place.element = 0) {
    const StreamTensor& wanted = tensors_[place.tensor];
    const int64_t size = size_of(wanted.dtype), left = elements_of(wanted) - place.element;
    if (left <= 0) continue;
    used = (used + 63) / 64 * 64;
    const uint64_t limit = turned_[place.tensor] ? size_of_window : std::min(size_of_window, kUsualWindow);
    const int64_t room = used < limit ? static_cast<int64_t>(limit - used) / size : 0;
    const int64_t count = std::min(left, room);
    if (count == 0 || (count < left && used > 0 && turned_[place.tensor])) break;
    const uint64_t begin = static_cast<uint64_t>(place.element * size), length = static_cast<uint64_t>(count * size);
    window.pieces.push_back({place.tensor, begin, begin + length, used});
    used += length;
    if (count < left) {
      place.element += count;
      break;
    }
  }
  return window;
}

// A piece's elements as boxes of its tensor, and where they go in the window.
void TensorStream::add_wants(const Piece& piece, Target& target) const {
  const StreamTensor& wanted = tensors_[piece.tensor];
  const int64_t size = size_of(wanted.dtype);
  const int64_t begin = static_cast<int64_t>(piece.begin) / size, end = static_cast<int64_t>(piece.end) / size;
  const Shape extent = ordered_extent(wanted);
  const Strides packed = contiguous_strides(extent);
  for (const Box& box : boxes_of_range(extent, begin, end)) {
    Want want{wanted.entry->name, wanted.dtype, wanted.entry->shape, wanted.box};
    want.strides.resize(extent.size());
    int64_t first = 0;
    for (size_t k = 0; k < extent.size(); ++k) {
      const size_t d = wanted.order[k];
      want.box.offset[d] += box.offset[k];
      want.box.extent[d] = box.extent[k];
      want.strides[d] = packed[k];
      first += box.offset[k] * packed[k];
    }
    want.offset = piece.at + static_cast<uint64_t>((first - begin) * size);
    target.wants.push_back(std::move(want));
  }
}

void TensorStream::load(const Window& window) const {
  Index part;
  part.files = files_;
  Target target;
  std::unordered_set<const TensorEntry*> known;
  for (const Piece& piece : window.pieces) {
    const TensorEntry* entry = tensors_[piece.tensor].entry;
    if (known.insert(entry).second) part.tensors.push_back(*entry);
    add_wants(piece, target);
  }
  part.reindex();
  PlanOptions options;
  options.max_read = std::min<uint64_t>(options.max_read, memory_.buffer_size_ / 2);
  const Plan plan = make_plan(part, target, options);
  if (!plan.report.missing.empty()) {
    fail(ErrorKind::kCorrupt, files_.empty() ? std::string() : files_[0].path, ": tensor '", plan.report.missing[0],
         "' is not whole: no file holds some of its elements");
  }
  const AlignedBuffer& bytes = memory_.windows_[window.memory];
  TransferOptions transfer;
  transfer.budget = memory_.buffer_size_;
  transfer.threads = 1;  // several windows are read at once
  transfer.buffers = &memory_.buffers_;
  transfer.ledger = ledger_;
  const Destination destination{std::span(bytes.data(), bytes.size())};
  execute(plan, part, std::span(&destination, 1), storage_, transfer);
}

}  // namespace shardsmith::cli
