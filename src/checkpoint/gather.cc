#include "checkpoint/gather.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "layout/range.h"
#include "storage/transfer.h"

namespace shardsmith {
namespace {

constexpr uint64_t kBlock = StreamWriter::kBlock;
// Of all ranks together: what one of them may have to send in a round.
constexpr uint64_t kRoundBlocks = 16, kMostBlocks = 4;

std::vector<Slice> slices_of(const FullTensor& tensor) {
  std::vector<Slice> slices;
  for (const FullPart& part : tensor.parts) slices.push_back({.box = part.box, .strides = {}});
  return slices;
}

// Copies `box` of a tensor: from elements at `source` with `source_strides`, its first element's place, to `target`.
void copy_box(const Box& box, Dtype dtype, const std::byte* source, const Strides& source_strides, std::byte* target,
              const Strides& target_strides) {
  const int64_t size = size_of(dtype);
  Copy copy;
  copy.from = copy.to = dtype;
  copy.extent = box.extent;
  int64_t source_last = 0, target_last = 0;
  for (size_t d = 0; d < box.extent.size(); ++d) {
    copy.source_step.push_back(source_strides[d] * size);
    copy.destination_step.push_back(target_strides[d] * size);
    source_last += (box.extent[d] - 1) * source_strides[d] * size;
    target_last += (box.extent[d] - 1) * target_strides[d] * size;
  }
  run_copy(copy, {source, static_cast<size_t>(source_last + size)}, {target, static_cast<size_t>(target_last + size)});
}

// Of element `at` of a tensor, in a box's elements that lie at `strides`.
int64_t place_of(const Shape& at, const Shape& origin, const Strides& strides) {
  int64_t place = 0;
  for (size_t d = 0; d < at.size(); ++d) place += (at[d] - origin[d]) * strides[d];
  return place;
}

}  // namespace

std::vector<Stretch> stretches_of(const FullFile& file, const PtFile& layout, const std::vector<int>& writers) {
  std::vector<std::unique_ptr<BoxTree>> trees;
  std::vector<std::vector<Slice>> slices;
  for (const FullTensor& tensor : file.tensors) slices.push_back(slices_of(tensor));
  for (const auto& of_tensor : slices) trees.push_back(std::make_unique<BoxTree>(of_tensor));
  std::vector<Stretch> stretches;
  const uint64_t blocks = (layout.covered() + kBlock - 1) / kBlock;
  for (uint64_t block = 0; block < blocks; ++block) {
    std::map<int, int64_t> held;  // bytes by rank
    const uint64_t end = std::min((block + 1) * kBlock, layout.covered());
    for (const PtFile::Section& section : layout.sections_in(block * kBlock, end)) {
      const FullTensor& tensor = file.tensors[section.storage];
      const int64_t size = size_of(tensor.dtype), begin = static_cast<int64_t>(section.offset) / size;
      for (const Box& range :
           boxes_of_range(tensor.shape, begin, begin + static_cast<int64_t>(section.length) / size)) {
        trees[section.storage]->find(range, [&](size_t i) {
          if (const auto both = intersect(range, tensor.parts[i].box))
            for (const int holder : tensor.parts[i].holders) held[holder] += volume(both->extent) * size;
          return true;
        });
      }
    }
    int64_t most = 0;
    std::vector<int> ranks;
    for (const int writer : writers) {
      const auto found = held.find(writer);
      const int64_t bytes = found == held.end() ? 0 : found->second;
      if (bytes > most) ranks.clear();
      most = std::max(most, bytes);
      if (bytes == most) ranks.push_back(writer);
    }
    if (!stretches.empty() && stretches.back().ranks == ranks)
      ++stretches.back().blocks;
    else
      stretches.push_back({1, std::move(ranks)});
  }
  return stretches;
}

Gather::Gather(const FullFile& file, const PtFile& layout, const std::vector<Share>& shares, int rank, int size,
               Transport* transport, std::chrono::milliseconds deadline)
    : file_(file), layout_(layout), rank_(rank), size_(size), transport_(transport), deadline_(deadline) {
  for (const FullTensor& tensor : file_.tensors) slices_.push_back(slices_of(tensor));
  for (const auto& of_tensor : slices_) trees_.push_back(std::make_unique<BoxTree>(of_tensor));
  const uint64_t window = std::clamp<uint64_t>(kRoundBlocks / static_cast<uint64_t>(size), 1, kMostBlocks);
  windows_.resize(static_cast<size_t>(size));
  std::vector<uint64_t> filled(static_cast<size_t>(size), window);  // blocks in the last window
  for (const Share& share : shares) {
    auto& windows = windows_[static_cast<size_t>(share.rank)];
    uint64_t& in_last = filled[static_cast<size_t>(share.rank)];
    for (uint64_t at = share.begin; at < share.end;) {
      if (in_last == window) windows.emplace_back(), in_last = 0;
      const uint64_t stop = std::min(share.end, at + window - in_last);
      windows.back().push_back({at * kBlock, std::min(stop * kBlock, layout.covered())});
      in_last += stop - at;
      at = stop;
    }
  }
  for (const auto& windows : windows_) rounds_ = std::max(rounds_, windows.size());
  for (auto& windows : windows_) windows.resize(rounds_);
  // Buffers for the largest round, so that nothing is allocated while others wait.
  uint64_t most_in = 0, most_out = 0;
  for (size_t round = 0; round < rounds_; ++round) {
    uint64_t in = 0, out = 0;
    for (int writer = 0; writer < size_; ++writer) {
      for_each_move(writer, round, [&](const PtFile::Section&, const Move& move) {
        if (move.from == writer) return;
        if (writer == rank_) in += move.bytes;
        if (move.from == rank_) out += move.bytes;
      });
    }
    most_in = std::max(most_in, in), most_out = std::max(most_out, out);
  }
  if (most_in + most_out > 0 && !transport_)
    fail(ErrorKind::kInvalidArgument, layout.path(),
         ": ranks hold parts of one block of the file, and there is nothing that moves bytes between them");
  in_.resize(most_in);
  out_.resize(most_out);
  in_at_.resize(static_cast<size_t>(size));
}

std::vector<Gather::Move> Gather::moves(const PtFile::Section& section, int writer) const {
  const FullTensor& tensor = file_.tensors[section.storage];
  const int64_t size = size_of(tensor.dtype), begin = static_cast<int64_t>(section.offset) / size;
  std::vector<Move> result;
  for (const Box& range : boxes_of_range(tensor.shape, begin, begin + static_cast<int64_t>(section.length) / size)) {
    trees_[section.storage]->find(range, [&](size_t i) {
      const FullPart& part = tensor.parts[i];
      const auto both = intersect(range, part.box);
      if (!both) return true;
      const bool holds = std::binary_search(part.holders.begin(), part.holders.end(), writer);
      const int from = holds ? writer : part.holders[static_cast<size_t>(writer) % part.holders.size()];
      result.push_back({i, *both, from, static_cast<uint64_t>(volume(both->extent) * size)});
      return true;
    });
  }
  return result;
}

template <typename Visit>
void Gather::for_each_move(int writer, size_t round, Visit&& visit) const {
  for (const Range& range : windows_[static_cast<size_t>(writer)][round])
    for (const PtFile::Section& section : layout_.sections_in(range.begin, range.end))
      for (const Move& move : moves(section, writer)) visit(section, move);
}

void Gather::pack(size_t tensor_number, const Move& move, std::byte* to) const {
  const FullTensor& tensor = file_.tensors[tensor_number];
  const FullPart& part = tensor.parts[move.part];
  const std::byte* from = part.data + place_of(move.box.offset, part.box.offset, part.strides) * size_of(tensor.dtype);
  copy_box(move.box, tensor.dtype, from, part.strides, to, contiguous_strides(move.box.extent));
}

void Gather::move(size_t round) {
  std::vector<Outgoing> out;
  uint64_t at = 0;
  for (int writer = 0; writer < size_; ++writer) {
    if (writer == rank_) continue;
    const uint64_t begin = at;
    for_each_move(writer, round, [&](const PtFile::Section& section, const Move& move) {
      if (move.from != rank_) return;
      pack(section.storage, move, out_.data() + at);
      at += move.bytes;
    });
    if (at > begin) out.push_back({writer, std::span(out_).subspan(begin, at - begin)});
  }
  std::vector<uint64_t> bytes(static_cast<size_t>(size_), 0);
  for_each_move(rank_, round, [&](const PtFile::Section&, const Move& move) {
    if (move.from != rank_) bytes[static_cast<size_t>(move.from)] += move.bytes;
  });
  std::vector<Incoming> in;
  at = 0;
  for (int sender = 0; sender < size_; ++sender) {
    const uint64_t length = bytes[static_cast<size_t>(sender)];
    in_at_[static_cast<size_t>(sender)] = at;
    if (length > 0) in.push_back({sender, std::span(in_).subspan(at, length)});
    at += length;
  }
  if (!out.empty() || !in.empty()) transport_->move(out, in, deadline_);
}

const std::byte* Gather::memory(const PtFile::Section& section) {
  const FullTensor& tensor = file_.tensors[section.storage];
  for (const FullPart& part : tensor.parts) {
    if (!part.data || part.strides != contiguous_strides(tensor.shape)) continue;
    // Whole rows, one after the other: a run of the tensor's elements.
    bool rows = true;
    int64_t row = size_of(tensor.dtype);
    for (size_t d = 1; d < tensor.shape.size(); ++d) {
      rows = rows && part.box.extent[d] == tensor.shape[d];
      row *= tensor.shape[d];
    }
    if (!rows) continue;
    const int64_t first = tensor.shape.empty() ? 0 : part.box.offset[0],
                  count = tensor.shape.empty() ? 1 : part.box.extent[0];
    const uint64_t begin = static_cast<uint64_t>(first * row), end = static_cast<uint64_t>((first + count) * row);
    if (section.offset >= begin && section.offset + section.length <= end) return part.data + (section.offset - begin);
  }
  return nullptr;
}

void Gather::fill(const PtFile::Section& section, std::span<std::byte> out) {
  const FullTensor& tensor = file_.tensors[section.storage];
  const int64_t size = size_of(tensor.dtype), begin = static_cast<int64_t>(section.offset) / size;
  const Strides strides = contiguous_strides(tensor.shape);
  for (const Move& move : moves(section, rank_)) {
    std::byte* to = out.data() + (place_of(move.box.offset, Shape(tensor.shape.size(), 0), strides) - begin) * size;
    if (move.from == rank_) {
      const FullPart& part = tensor.parts[move.part];
      const std::byte* from = part.data + place_of(move.box.offset, part.box.offset, part.strides) * size;
      copy_box(move.box, tensor.dtype, from, part.strides, to, strides);
    } else {
      uint64_t& at = in_at_[static_cast<size_t>(move.from)];
      copy_box(move.box, tensor.dtype, in_.data() + at, contiguous_strides(move.box.extent), to, strides);
      at += move.bytes;
    }
  }
}

}  // namespace shardsmith
