// A .pt file: torch's zip, the row of pickles from before 1.6, or an archive put together from records.
#include "format/pt.h"

#include "support.h"

namespace shardsmith::fuzz {
namespace {

void run(std::string_view input) {
  Files files;
  if (is_packed(input)) {
    unpack(input, "d", files);
    if (!files.stat("d/f").exists) return;
  } else {
    std::string bytes(input);
    forget_checksums(bytes);
    files.add("d/f", std::move(bytes));
  }
  errors_only([&] { is_pt(files, "d/f"); });
  errors_only([&] {
    const PtRecord record = read_pt_record(files, "d/f");
    require(!record.present || record.checksums->covered <= record.file_size, "checksums of more than the file");
  });
  Index index;
  if (errors_only([&] { index = read_pt(files, "d/f"); })) read_everything(index, files);
}

const Registration registered("pt", run);

}  // namespace
}  // namespace shardsmith::fuzz
