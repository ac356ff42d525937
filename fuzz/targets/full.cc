// A full checkpoint: the weights' file and its companions.
#include "checkpoint/full.h"

#include "support.h"

namespace shardsmith::fuzz {
namespace {

void run(std::string_view input) {
  Files files;
  unpack(input, "d", files);
  if (!files.stat("d/f").exists) return;
  Manifest manifest;
  Index index;
  errors_only([&] { is_full(files, "d/f"); });
  if (!errors_only([&] { index = read_full(files, "d/f", &manifest); })) return;
  for (const FileEntry& file : index.files) require(parent(file.path) == "d", "a file outside of the folder is read");
  read_everything(index, files);
}

const Registration registered("full", run);

}  // namespace
}  // namespace shardsmith::fuzz
