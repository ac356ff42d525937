// The slice list and checksums in our own .pt files, and back.
#include "format/pt_record.h"

#include "format/bytes.h"
#include "support.h"

namespace shardsmith::fuzz {
namespace {

void run(std::string_view input) {
  if (input.size() < 4) return;
  ZipRecord record;
  record.header = get_le<uint32_t>(input, 0) % (3u << 20);
  PtRecordContent first;
  if (!errors_only([&] { first = parse_pt_record(input.substr(4), record, "f"); })) return;
  for (const PtSlice& slice : first.slices) require(inside(slice.box, slice.shape), "a slice outside of its tensor");
  require(first.checksums && first.checksums->covered == record.header, "checksums of other bytes");

  std::string bytes = make_pt_record(first.slices, first.extra, record.header);
  if (first.checksums->block_size == 1 << 20) set_crcs(bytes, first.checksums->crc);
  PtRecordContent second;
  try {
    second = parse_pt_record(bytes, record, "f");
  } catch (const Error& e) {
    broken(str("what we write we can't read: ", e.what()));
  }
  require(second.slices.size() == first.slices.size(), "another number of slices");
  for (size_t i = 0; i < first.slices.size(); ++i) {
    const PtSlice &a = first.slices[i], &b = second.slices[i];
    require(a.tensor == b.tensor && a.name == b.name && a.shape == b.shape && a.box == b.box, "another slice");
  }
  require(second.extra == first.extra, "another extra value");
  if (first.checksums->block_size == 1 << 20) require(second.checksums->crc == first.checksums->crc, "other checksums");
}

const Registration registered("pt_record", run);

}  // namespace
}  // namespace shardsmith::fuzz
