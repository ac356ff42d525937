// The bytes of a full file's ranges, fetched from whoever holds them, window by window.
//
// Each rank writes its own blocks. What it needs of others comes in rounds: in round k every rank gets what the k-th
// window of its blocks lacks. So a rank holds a window's foreign bytes at a time and never the whole. All ranks compute
// all rounds alike from the same FullFile and shares.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/transport.h"
#include "checkpoint/full_layout.h"
#include "format/pt_file.h"
#include "layout/box_tree.h"
#include "layout/share.h"

namespace shardsmith {

// Blocks of `layout` that a rank may write without asking others for more than it must: for each stretch the ranks, out
// of `writers` (ascending), that hold the most of it.
std::vector<Stretch> stretches_of(const FullFile& file, const PtFile& layout, const std::vector<int>& writers);

class Gather final : public SectionSource {
 public:
  // All must outlive this. `shares` (StreamWriter::kBlock each) cover the file. `transport` may be null where nothing
  // has to be moved: kInvalidArgument otherwise. Buffers are allocated here.
  Gather(const FullFile& file, const PtFile& layout, const std::vector<Share>& shares, int rank, int size,
         Transport* transport, std::chrono::milliseconds deadline);

  size_t rounds() const { return rounds_; }
  // Sends and receives for round k, one after the other from 0 on; all ranks do all of them, whatever else fails. Then
  // the ranges of window(k) may be written.
  void move(size_t round);
  struct Range {
    uint64_t begin = 0, end = 0;  // bytes of the file
  };
  const std::vector<Range>& window(size_t round) const { return windows_[static_cast<size_t>(rank_)][round]; }

  // Of sections in the window moved last, in ascending order.
  const std::byte* memory(const PtFile::Section& section) override;
  void fill(const PtFile::Section& section, std::span<std::byte> out) override;

 private:
  struct Move {
    size_t part;
    Box box;   // in the tensor
    int from;  // rank
    uint64_t bytes;
  };
  std::vector<Move> moves(const PtFile::Section& section, int writer) const;
  template <typename Visit>  // visit(section, move) for all of a writer's window
  void for_each_move(int writer, size_t round, Visit&& visit) const;
  void pack(size_t tensor, const Move& move, std::byte* to) const;

  const FullFile& file_;
  const PtFile& layout_;
  int rank_, size_;
  Transport* transport_;
  std::chrono::milliseconds deadline_;
  size_t rounds_ = 0;
  std::vector<std::vector<std::vector<Range>>> windows_;  // by writer, by round
  std::vector<std::vector<Slice>> slices_;                // by tensor: its parts, for the trees
  std::vector<std::unique_ptr<BoxTree>> trees_;
  std::vector<std::byte> out_, in_;
  std::vector<uint64_t> in_at_;  // by sender: where its next bytes begin in in_
};

}  // namespace shardsmith
