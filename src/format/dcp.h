// torch.distributed.checkpoint (DCP): a folder with a pickled `.metadata` and data files, each of which is a row of
// whole torch.save archives, one per chunk of a tensor. Also its Hugging Face variant: safetensors files whose metadata
// hold DCP_SHARDING_INFO. Bytes: docs/formats/dcp.md. Nothing in a file is ever executed.
#pragma once

#include <string>

#include "format/pt.h"
#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

// True for a folder with `.metadata` or `__{rank}.metadata`, with data files of a save that did not finish
// (which read_dcp says), or with safetensors files that carry DCP_SHARDING_INFO.
bool is_dcp(Storage& storage, const std::string& directory);

// Reads metadata, and of each chunk its archive's directory and pickle; no tensor data. Index::format is "dcp".
// Names are flat paths (base/value.h): from planner_data's paths, else the whole key is one element. Index::values is
// the nested object, with TensorRefs for tensors and what was pickled beside them. Throws kCorrupt that lists the data
// files that are missing, kUnsupported that names a transform which the items went through.
Index read_dcp(Storage& storage, const std::string& directory);

// Writes `__0_0.distcp`, then `.metadata`, into an existing folder that is empty; both are durable when it returns.
// The value is flattened as torch does it (nested dicts, and lists that hold tensors), keys joined with '.'; two paths
// with one key are an error that names it. Tensors are written packed; two that are the same view of one storage are
// one item of the file. kInvalidArgument for a strided view of a storage that has no ByteSource::data. ByteSource::fill
// is called once for each storage, with ascending ranges.
void write_dcp(Storage& storage, const std::string& folder, const PtContent& content);

}  // namespace shardsmith
