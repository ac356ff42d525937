#include "checkpoint/written_shares.h"

#include <cstdio>

#include "base/error.h"

namespace shardsmith {
namespace {

constexpr size_t kDigits = 8;

}  // namespace

uint64_t blocks_of(const std::vector<Share>& shares, int rank) {
  uint64_t blocks = 0;
  for (const Share& share : shares) blocks += share.rank == rank ? share.end - share.begin : 0;
  return blocks;
}

std::string checksums_of(const PtFile& layout, const std::vector<Share>& shares, int rank, PtRanges& ranges) {
  std::string text;
  for_each_section(layout, shares, rank, [&](const PtFile::Section& section) {
    char digits[kDigits + 1];
    std::snprintf(digits, sizeof digits, "%08x", ranges.crcs()[section.number]);
    text += digits;
  });
  return text;
}

void take_checksums(const PtFile& layout, const std::vector<Share>& shares, const std::vector<Value>& written,
                    const std::string& name, PtRanges& ranges) {
  for (size_t rank = 0; rank < written.size(); ++rank) {
    const Value* found = written[rank].find(name);
    const std::string* text = found ? found->get_if<std::string>() : nullptr;
    size_t at = 0;
    for_each_section(layout, shares, static_cast<int>(rank), [&](const PtFile::Section& section) {
      if (!text || at + kDigits > text->size())
        fail(ErrorKind::kPeer, "rank ", rank, " gives too few checksums of ", name);
      ranges.crcs()[section.number] = static_cast<uint32_t>(std::stoul(text->substr(at, kDigits), nullptr, 16));
      at += kDigits;
    });
  }
}

}  // namespace shardsmith
