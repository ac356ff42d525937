// The directory of a zip, and its records.
#include <set>

#include "format/zip.h"
#include "support.h"

namespace shardsmith::fuzz {
namespace {

void run(std::string_view input) {
  Files files;
  std::string bytes(input.substr(input.empty() ? 0 : 1));
  const bool with_checksums = !input.empty() && (input[0] & 1);
  if (!with_checksums) forget_checksums(bytes);
  files.add("f", std::move(bytes));
  const auto file = files.open_read("f");
  std::vector<ZipRecord> records;
  if (!errors_only([&] { records = read_zip(*file); })) return;
  std::set<std::string> names;
  for (const ZipRecord& record : records) {
    require(names.insert(record.name).second, "a record's name stands twice");
    require(record.data <= file->size() && record.stored <= file->size() - record.data, "a record outside of its file");
    for (const ZipRecord& other : records)
      require(&other == &record || record.data + record.stored <= other.header || other.header < record.header,
              "records that overlap");
    std::string content;
    if (!errors_only([&] { content = read_record(*file, record, 1 << 20); })) continue;
    require(content.size() == record.size, "a record of another size");
  }
}

const Registration registered("zip", run);

}  // namespace
}  // namespace shardsmith::fuzz
