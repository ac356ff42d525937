// The tensors of one output file as a stream of bytes: whoever writes the file asks for ascending ranges, and gets them
// from large sequential reads. While one window is given out the next one is read.
#pragma once

#include <cstdint>
#include <functional>
#include <future>
#include <span>
#include <string>
#include <vector>

#include "layout/index.h"
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
  // `bytes` in all, of which two windows and the readers' buffers are made. Throws kNoSpace where that is too little.
  StreamMemory(uint64_t bytes, int threads);
  static constexpr uint64_t kLeast = 16 << 20;

 private:
  friend class TensorStream;
  std::vector<AlignedBuffer> windows_;
  TransferBuffers buffers_;
  uint64_t buffer_size_;
  int threads_;
};

// Used by one thread.
class TensorStream {
 public:
  // `tensors` in the order in which they will be asked for; entries of one name are one entry. All references must
  // outlive it; `files` are those that the tensors' slices count in.
  TensorStream(const std::vector<FileEntry>& files, std::vector<StreamTensor> tensors, StreamMemory& memory,
               Storage& storage, std::function<void()> check_stop = {});
  ~TensorStream();
  TensorStream(const TensorStream&) = delete;

  // Bytes [offset, offset + out.size()) of tensor number `tensor`, packed in its order.
  void read(size_t tensor, uint64_t offset, std::span<std::byte> out);
  const std::vector<StreamTensor>& tensors() const { return tensors_; }
  // So far, of the source's files.
  uint64_t bytes_read() const { return bytes_read_; }

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
    Place next;  // where the window after this one begins
    uint64_t bytes_read = 0;
  };
  const Piece* find(size_t tensor, uint64_t offset) const;
  // The window that begins at `place`, read into memory number `memory`. Runs on any thread.
  Window load(Place place, size_t memory) const;
  void advance(Place place);

  const std::vector<FileEntry>& files_;
  std::vector<StreamTensor> tensors_;
  StreamMemory& memory_;
  Storage& storage_;
  std::function<void()> check_stop_;
  Window current_;
  std::future<Window> next_;  // valid while a window is being read
  Place next_place_;
  uint64_t bytes_read_ = 0;
};

}  // namespace shardsmith::cli
