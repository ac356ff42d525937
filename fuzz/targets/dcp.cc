// A folder of torch.distributed.checkpoint, and its Hugging Face variant.
#include "format/dcp.h"

#include "format/dcp_metadata.h"
#include "support.h"

namespace shardsmith::fuzz {
namespace {

bool same(const DcpItem& a, const DcpItem& b) {
  return a.file == b.file && a.offset == b.offset && a.length == b.length;
}

// What we make of the metadata, torch's reader and ours must take back.
void check_metadata(const std::string& pickle) {
  std::vector<DcpEntry> first;
  if (!errors_only([&] { first = parse_dcp_metadata(pickle, "f"); })) return;
  for (DcpEntry& entry : first)
    if (entry.path.empty()) entry.path = {Value(entry.key)};
  std::string bytes;
  if (!errors_only([&] { bytes = make_dcp_metadata(first); })) return;
  std::vector<DcpEntry> second;
  try {
    second = parse_dcp_metadata(bytes, "f");
  } catch (const Error& e) {
    broken(str("what we write we can't read: ", e.what()));
  }
  require(first.size() == second.size(), "another number of items");
  for (size_t i = 0; i < first.size(); ++i) {
    const DcpEntry &a = first[i], &b = second[i];
    require(a.key == b.key && a.is_tensor == b.is_tensor && a.chunks.size() == b.chunks.size(), "another item");
    require(Value(a.path) == Value(b.path), "another path");
    require(a.is_tensor || same(a.item, b.item), "an item at another place");
    if (!a.is_tensor) continue;
    require(a.dtype == b.dtype && a.shape == b.shape && a.requires_grad == b.requires_grad, "another tensor");
    for (size_t c = 0; c < a.chunks.size(); ++c)
      require(a.chunks[c].box == b.chunks[c].box && same(a.chunks[c].item, b.chunks[c].item), "another chunk");
  }
}

void run(std::string_view input) {
  Files files;
  unpack(input, "d/c", files);
  files.add("d/secret", "a file that no metadata may reach");
  if (const std::string* metadata = files.find("d/c/.metadata")) check_metadata(*metadata);
  errors_only([&] { is_dcp(files, "d/c"); });
  Index index;
  if (!errors_only([&] { index = read_dcp(files, "d/c"); })) return;
  for (const FileEntry& file : index.files) require(parent(file.path) == "d/c", "a file outside of the folder is read");
  read_everything(index, files);
}

const Registration registered("dcp", run);

}  // namespace
}  // namespace shardsmith::fuzz
