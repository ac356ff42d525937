#include "cli/tensor_stream.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "layout/plan.h"

namespace shardsmith::cli {
namespace {

// A tensor as rows along dimension 0; one row where it has no dimensions.
struct Rows {
  int64_t count = 1;
  uint64_t bytes = 0;  // of one
};

Rows rows_of(const StreamTensor& tensor) {
  Rows rows;
  if (!tensor.entry->shape.empty()) rows.count = tensor.entry->shape[0];
  rows.bytes = rows.count > 0 ? tensor.bytes() / static_cast<uint64_t>(rows.count) : 0;
  return rows;
}

}  // namespace

uint64_t StreamTensor::bytes() const { return static_cast<uint64_t>(volume(entry->shape) * size_of(dtype)); }

TensorStream::TensorStream(const Index& index, std::vector<StreamTensor> tensors, AlignedBuffer& window,
                           Storage& storage, const TransferOptions& options)
    : index_(index), tensors_(std::move(tensors)), window_(window), storage_(storage), options_(options) {}

const TensorStream::Piece* TensorStream::find(size_t tensor, uint64_t offset) const {
  for (const auto& piece : pieces_) {
    if (piece.tensor == tensor && piece.begin <= offset && offset < piece.end) return &piece;
  }
  return nullptr;
}

void TensorStream::read(size_t tensor, uint64_t offset, std::span<std::byte> out) {
  while (!out.empty()) {
    const Piece* piece = find(tensor, offset);
    if (!piece) {
      load(tensor, offset);
      piece = find(tensor, offset);
      if (!piece)
        fail(ErrorKind::kUnsupported, tensors_[tensor].entry->name, ": one row is larger than the memory budget");
    }
    const uint64_t length = std::min<uint64_t>(out.size(), piece->end - offset);
    std::memcpy(out.data(), window_.data() + piece->at + (offset - piece->begin), length);
    out = out.subspan(length);
    offset += length;
  }
}

void TensorStream::load(size_t tensor, uint64_t offset) {
  pieces_.clear();
  Index part;
  part.format = index_.format;
  part.files = index_.files;
  Target target;
  uint64_t used = 0;
  for (; tensor < tensors_.size(); ++tensor, offset = 0) {
    const StreamTensor& wanted = tensors_[tensor];
    const Rows rows = rows_of(wanted);
    if (rows.bytes == 0 || rows.count == 0) continue;
    // Elements of every tensor start where their size demands.
    used = (used + 63) / 64 * 64;
    const auto first = static_cast<int64_t>(offset / rows.bytes);
    const uint64_t room = used < window_.size() ? (window_.size() - used) / rows.bytes : 0;
    const int64_t count = std::min(rows.count - first, static_cast<int64_t>(room));
    if (count <= 0) break;

    Want want{wanted.entry->name, wanted.dtype, wanted.entry->shape, whole(wanted.entry->shape)};
    if (!want.box.offset.empty()) {
      want.box.offset[0] = first;
      want.box.extent[0] = count;
    }
    want.offset = used;
    want.strides = contiguous_strides(want.box.extent);
    target.wants.push_back(std::move(want));
    part.tensors.push_back(*wanted.entry);
    const uint64_t begin = static_cast<uint64_t>(first) * rows.bytes;
    const uint64_t length = static_cast<uint64_t>(count) * rows.bytes;
    pieces_.push_back({tensor, begin, begin + length, used});
    used += length;
    if (first + count < rows.count) break;  // the window is full
  }
  if (pieces_.empty()) return;
  part.reindex();
  const Plan plan = make_plan(part, target);
  require_complete(plan, part.files.empty() ? std::string_view("") : std::string_view(part.files[0].path));
  const Destination destination{std::span(window_.data(), window_.size())};
  execute(plan, part, std::span(&destination, 1), storage_, options_);
}

}  // namespace shardsmith::cli
