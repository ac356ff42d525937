// Plan: Index x Target -> the reads and copies that move the bytes. Pure: no I/O.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/index.h"

namespace shardsmith {

// A box that someone wants and where it goes: element i of the box is put at byte
// offset + size_of(dtype) * sum_d (i[d] - box.offset[d]) * strides[d]  of destination `buffer`
// (a rank's memory, or a new file: whoever executes the plan knows).
struct Want {
  std::string name;
  Dtype dtype = Dtype::kF32;  // where it differs from the source's, elements are cast (said in the report)
  Shape shape;                // the true global shape, compared with the source's
  Box box;
  uint32_t buffer = 0;
  uint64_t offset = 0;
  Strides strides;
};

struct Target {
  std::vector<Want> wants;
};

// A strided block copy from a read's bytes to a destination. Dimension 0 is the outermost.
struct Copy {
  uint64_t source = 0;  // byte offset inside the Read
  uint32_t buffer = 0;
  uint64_t offset = 0;                    // byte offset in the destination
  std::vector<int64_t> extent;            // of the loops, in elements
  std::vector<int64_t> source_step;       // bytes per step of each loop
  std::vector<int64_t> destination_step;  // bytes per step of each loop
  Dtype from = Dtype::kF32, to = Dtype::kF32;
  bool byte_swapped = false;
  uint32_t tensor = 0;  // Index::tensors[tensor], for messages
};

// One sequential read, and what becomes of its bytes. For a deflated record, offset/length are the
// stored bytes and `inflated` their length once inflated (copies then count in the inflated bytes).
struct Read {
  uint32_t file = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
  uint64_t inflated = 0;  // 0: raw
  std::vector<Copy> copies;
};

// What the user is told.
struct Report {
  std::vector<std::string> missing;      // wanted, not in the index (or not covered)
  std::vector<std::string> unexpected;   // in the index, wanted by nobody
  std::vector<std::string> cast;         // "name: float32 -> bfloat16"
  std::vector<std::string> tied;         // "name = other"
  std::vector<std::string> passed_over;  // checkpoints or files that were skipped, and why
  uint64_t bytes_needed = 0;
  uint64_t bytes_read = 0;
};

struct Plan {
  std::vector<Read> reads;  // by file, then by offset
  Report report;
};

struct PlanOptions {
  uint64_t max_read = 4 << 20;  // no Read (raw) is longer, so that buffers are of known size
  uint64_t max_gap = 64 << 10;  // holes up to this are read over rather than split at
};

// Throws kCorrupt where a wanted tensor's shape differs from the index's (both are named).
// Missing tensors are listed in the report, not thrown: see require_complete.
Plan make_plan(const Index& index, const Target& target, const PlanOptions& options = {});

// Throws kCorrupt that names the first missing tensors and their number, if there are any.
void require_complete(const Plan& plan, std::string_view where);

}  // namespace shardsmith
