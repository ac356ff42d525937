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
  // The directory alone, and each record found by itself.
  ZipDirectory directory;
  const bool listed = errors_only([&] { directory = read_zip_directory(*file); });
  for (ZipRecord& record : directory.records) {
    if (!errors_only([&] { locate_record(*file, directory, record); })) continue;
    require(record.data <= file->size() && record.stored <= file->size() - record.data, "a record outside of its file");
  }
  std::vector<ZipRecord> records;
  if (!errors_only([&] { records = read_zip(*file); })) return;
  require(listed && directory.records.size() == records.size(), "two readings of one directory differ");
  for (size_t i = 0; i < records.size(); ++i)
    require(directory.records[i].name == records[i].name && directory.records[i].data == records[i].data,
            "two readings of one directory differ");
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
