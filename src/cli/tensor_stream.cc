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

StreamMemory::StreamMemory(uint64_t bytes, int threads) : threads_(std::max(threads, 1)) {
  if (bytes < kLeast)
    fail(ErrorKind::kNoSpace, "the memory limit leaves ", bytes, " bytes for data, ", kLeast, " are needed");
  const uint64_t readers = std::min<uint64_t>(kReadBuffer, bytes / 4 / static_cast<uint64_t>(threads_));
  const uint64_t window = std::min(kMaxWindow, (bytes - readers * static_cast<uint64_t>(threads_)) / 2);
  windows_.emplace_back(window);
  windows_.emplace_back(window);
  buffer_size_ = readers;
}

TensorStream::TensorStream(const std::vector<FileEntry>& files, std::vector<StreamTensor> tensors, StreamMemory& memory,
                           Storage& storage, std::function<void()> check_stop)
    : files_(files),
      tensors_(std::move(tensors)),
      memory_(memory),
      storage_(storage),
      check_stop_(std::move(check_stop)) {}

TensorStream::~TensorStream() {
  if (next_.valid()) next_.wait();  // it writes into memory that isn't ours
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

// Makes the window that holds `place` the current one, and has the one after it read.
void TensorStream::advance(Place place) {
  bool have = false;
  if (next_.valid()) {
    current_ = next_.get();
    bytes_read_ += current_.bytes_read;
    have = !current_.pieces.empty() && current_.pieces[0].tensor == place.tensor &&
           current_.pieces[0].begin == static_cast<uint64_t>(place.element * size_of(tensors_[place.tensor].dtype));
  }
  if (!have) {
    current_ = load(place, 0);
    bytes_read_ += current_.bytes_read;
  }
  const Place next = current_.next;
  if (next.tensor >= tensors_.size()) return;
  next_ = std::async(std::launch::async, [this, next, memory = 1 - current_.memory] { return load(next, memory); });
}

TensorStream::Window TensorStream::load(Place place, size_t memory) const {
  const AlignedBuffer& bytes = memory_.windows_[memory];
  Window window;
  window.memory = memory;
  Index part;
  part.files = files_;
  Target target;
  std::unordered_set<const TensorEntry*> known;
  uint64_t used = 0;
  for (; place.tensor < tensors_.size(); ++place.tensor, place.element = 0) {
    const StreamTensor& wanted = tensors_[place.tensor];
    const int64_t size = size_of(wanted.dtype), left = elements_of(wanted) - place.element;
    if (left <= 0) continue;
    used = (used + 63) / 64 * 64;
    const uint64_t limit = is_turned(wanted) ? bytes.size() : std::min<uint64_t>(bytes.size(), kUsualWindow);
    const int64_t room = used < limit ? static_cast<int64_t>(limit - used) / size : 0;
    const int64_t count = std::min(left, room);
    if (count == 0 || (count < left && used > 0 && is_turned(wanted))) break;

    if (known.insert(wanted.entry).second) part.tensors.push_back(*wanted.entry);
    const Shape extent = ordered_extent(wanted);
    const Strides packed = contiguous_strides(extent);
    for (const Box& box : boxes_of_range(extent, place.element, place.element + count)) {
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
      want.offset = used + static_cast<uint64_t>((first - place.element) * size);
      target.wants.push_back(std::move(want));
    }
    const uint64_t begin = static_cast<uint64_t>(place.element * size), length = static_cast<uint64_t>(count * size);
    window.pieces.push_back({place.tensor, begin, begin + length, used});
    used += length;
    if (count < left) {
      place.element += count;
      break;
    }
  }
  window.next = place;
  if (window.pieces.empty()) return window;
  part.reindex();
  PlanOptions options;
  options.max_read = std::min<uint64_t>(options.max_read, memory_.buffer_size_ / 2);
  const Plan plan = make_plan(part, target, options);
  window.bytes_read = plan.report.bytes_read;
  if (!plan.report.missing.empty()) {
    fail(ErrorKind::kCorrupt, files_.empty() ? std::string() : files_[0].path, ": tensor '", plan.report.missing[0],
         "' is not whole: no file holds some of its elements");
  }
  TransferOptions transfer;
  transfer.budget = memory_.buffer_size_ * static_cast<uint64_t>(memory_.threads_);
  transfer.threads = memory_.threads_;
  transfer.buffers = &memory_.buffers_;
  const Destination destination{std::span(bytes.data(), bytes.size())};
  execute(plan, part, std::span(&destination, 1), storage_, transfer);
  return window;
}

}  // namespace shardsmith::cli
