// The tensors of one output file as a stream of bytes: whoever writes the file asks for ascending ranges, and gets them
// from large sequential reads. While one window is given out the next ones are read.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <span>
#include <string>
#include <vector>

#include "layout/index.h"
#include "layout/plan.h"
#include "storage/storage.h"
#include "storage/transfer.h"

namespace shardsmith::cli {

struct StreamTensor {
  const TensorEntry* entry = nullptr;  // no alias
  Dtype dtype = Dtype::kF32;           // as it is to come out
  Box box;                             // the part of it that is wanted
  std::vector<size_t> order;           // its dimensions as they are to lie, the outermost first
  uint64_t bytes() const;
};

// All of a tensor, row-major.
StreamTensor whole_tensor(const TensorEntry& entry, Dtype dtype);
// The order of dimensions in which most of a tensor lies in its files, so that a copy in this order is sequential.
std::vector<size_t> stored_order(const TensorEntry& entry);

// Memory of a fixed size for streams, one after another, used by one of them at a time.
class StreamMemory {
 public:
  // `bytes` in all, of which a few windows and the readers' buffers are made. Throws kNoSpace where that is too little.
  StreamMemory(uint64_t bytes, int threads);
  uint64_t bytes_read() const { return buffers_.bytes_read(); }
  static constexpr uint64_t kLeast = 16 << 20;

 private:
  friend class TensorStream;
  std::vector<AlignedBuffer> windows_;
  TransferBuffers buffers_;
  uint64_t buffer_size_ = 0;
};

// Used by one thread.
class TensorStream {
 public:
  // `tensors` in the order in which they will be asked for; entries of one name are one entry. All references must
  // outlive it; `files` are those that the tensors' slices count in.
  TensorStream(const std::vector<FileEntry>& files, std::vector<StreamTensor> tensors, StreamMemory& memory,
               Storage& storage, BlockLedger* ledger = nullptr, std::function<void()> check_stop = {});
  ~TensorStream();
  TensorStream(const TensorStream&) = delete;

  // Bytes [offset, offset + out.size()) of tensor number `tensor`, packed in its order.
  void read(size_t tensor, uint64_t offset, std::span<std::byte> out);
  const std::vector<StreamTensor>& tensors() const { return tensors_; }

 private:
  struct Place {
    size_t tensor = 0;
    int64_t element = 0;
  };
  // Some elements of one tensor, in a window.
  struct Piece {
    size_t tensor = 0;
    uint64_t begin = 0, end = 0;  // bytes of the tensor
    uint64_t at = 0;              // in the window
  };
  struct Window {
    size_t memory = 0;  // which of StreamMemory's windows
    std::vector<Piece> pieces;
  };
  const Piece* find(size_t tensor, uint64_t offset) const;
  // What the window that begins at `place` holds; `place` becomes that of the next one.
  Window lay_out(Place& place, size_t memory) const;
  void add_wants(const Piece& piece, Target& target) const;
  // Reads it. Runs on any thread.
  void load(const Window& window) const;
  void advance(Place place);
  // Has windows read ahead, as many as there is memory for.
  void read_ahead();

  const std::vector<FileEntry>& files_;
  std::vector<StreamTensor> tensors_;
  std::vector<bool> turned_;  // of each: asked for in another order than it lies in
  StreamMemory& memory_;
  Storage& storage_;
  BlockLedger* ledger_;
  std::function<void()> check_stop_;
  struct Ahead {
    Window window;
    std::future<void> loaded;
  };
  Window current_;
  std::deque<Ahead> ahead_;  // being read, in order
  Place next_;               // where the window after those begins
};

}  // namespace shardsmith::cli
