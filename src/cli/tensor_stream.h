// The tensors of one output file as a stream of bytes that is read through a window of fixed size: whoever
// writes the file asks for ascending ranges, and gets them from large sequential reads.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "layout/index.h"
#include "storage/storage.h"
#include "storage/transfer.h"

namespace shardsmith::cli {

struct StreamTensor {
  const TensorEntry* entry = nullptr;  // in the index given to the stream
  Dtype dtype = Dtype::kF32;           // as it is to come out
  uint64_t bytes() const;
};

// One thread. `index` must outlive it.
class TensorStream {
 public:
  // `tensors` in the order in which they will be asked for. `window`: bytes, allocated by the caller and reused.
  TensorStream(const Index& index, std::vector<StreamTensor> tensors, AlignedBuffer& window, Storage& storage,
               const TransferOptions& options);

  // Bytes [offset, offset + out.size()) of tensor number `tensor`, packed row-major.
  void read(size_t tensor, uint64_t offset, std::span<std::byte> out);

 private:
  // Some rows (along dimension 0) of one tensor, in the window.
  struct Piece {
    size_t tensor = 0;
    uint64_t begin = 0, end = 0;  // bytes of the tensor
    uint64_t at = 0;              // in the window
  };
  const Piece* find(size_t tensor, uint64_t offset) const;
  // Fills the window from the row that holds `offset` of `tensor` on.
  void load(size_t tensor, uint64_t offset);

  const Index& index_;
  std::vector<StreamTensor> tensors_;
  AlignedBuffer& window_;
  Storage& storage_;
  TransferOptions options_;
  std::vector<Piece> pieces_;
};

}  // namespace shardsmith::cli
