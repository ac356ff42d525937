// The content of one file to be written (.pt, or a DCP folder) whose bytes come from a Content's tensors as a stream.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/progress.h"
#include "cli/content.h"
#include "cli/tensor_stream.h"
#include "format/pt.h"

namespace shardsmith::cli {

// Shared by all files of one output: what is read, as what, and who is told.
struct Feed {
  const Content& content;
  const std::vector<Dtype>& dtypes;  // of content.index.tensors, as they are to come out
  Storage& storage;
  StreamMemory& memory;
  BlockLedger& ledger;  // checks what is read
  Progress progress;
  uint64_t total = 0;  // bytes of tensors that all files together will hold
  uint64_t done = 0;   // so far
};

class FileBuilder {
 public:
  // `packed`: every tensor row-major; otherwise in the order in which its elements lie, which reads them in one pass.
  FileBuilder(Feed& feed, bool packed) : feed_(feed), packed_(packed) {}
  FileBuilder(const FileBuilder&) = delete;

  // A whole tensor, once, however often it is asked for.
  TensorRef add(size_t tensor);
  // A part of a tensor, under its name in the slice list.
  TensorRef add(size_t tensor, const Box& box, const std::string& name);
  // The value with all its tensors taken whole.
  Value import(Value value);

  // The same with each tensor in the slice list, under `path` and its place below.
  Value import_listed(Value value, const std::string& path);

  uint64_t bytes() const;
  // The file with `value` as its object. The builder must outlive the writing of it; one file of a Feed at a time.
  PtContent finish(Value value, bool with_slices);

 private:
  TensorRef append(size_t tensor, const Box& box);

  Feed& feed_;
  bool packed_;
  std::vector<StreamTensor> parts_;
  std::vector<PtTensor> tensors_;
  std::map<size_t, size_t> whole_;
  std::unique_ptr<TensorStream> stream_;
};

}  // namespace shardsmith::cli
