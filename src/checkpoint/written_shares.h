// One file that several ranks write: what of it a rank writes, and the checksums of that, as a text for the others.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "base/value.h"
#include "format/pt_file.h"
#include "layout/share.h"

namespace shardsmith {

// Of the file's blocks, the rank's.
uint64_t blocks_of(const std::vector<Share>& shares, int rank);

// Calls visit(section) for what the rank writes, in order.
template <typename Visit>
void for_each_section(const PtFile& layout, const std::vector<Share>& shares, int rank, Visit&& visit) {
  constexpr uint64_t kBlock = StreamWriter::kBlock;
  for (const Share& share : shares) {
    if (share.rank != rank) continue;
    const uint64_t end = std::min(share.end * kBlock, layout.covered());
    for (const PtFile::Section& section : layout.sections_in(share.begin * kBlock, end)) visit(section);
  }
}

// Those of the rank's sections: eight hexadecimal digits each.
std::string checksums_of(const PtFile& layout, const std::vector<Share>& shares, int rank, PtRanges& ranges);

// Those of all ranks into `ranges`. `written`: by rank, a dict in which checksums_of() may stand under `name`. Throws
// kPeer that names a rank which gives too few.
void take_checksums(const PtFile& layout, const std::vector<Share>& shares, const std::vector<Value>& written,
                    const std::string& name, PtRanges& ranges);

}  // namespace shardsmith
