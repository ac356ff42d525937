// A partial checkpoint's folder, and the folder of checkpoints around it.
#include <iterator>

#include "checkpoint/commit.h"
#include "checkpoint/load.h"
#include "format/pt.h"
#include "support.h"

namespace shardsmith::fuzz {
namespace {

constexpr const char* kFolder = "d/a_partial";

// The manifest made to fit the files, as one that an attacker wrote with care would: otherwise no file gets past its
// digest.
void fit(Files& files, bool with_tails) {
  const std::string path = join(kFolder, kManifestName);
  Manifest manifest;
  const bool known = errors_only([&] {
    manifest = read_manifest(files, kFolder);
    for (ManifestFile& file : manifest.files) {
      const std::string name = join(kFolder, file.name);
      file.size = files.stat(name).size;
      errors_only([&] {
        file.digest = read_pt_record(files, name).digest;
        if (with_tails) file.tail = tail_digest(files, name);
      });
    }
  });
  if (known) files.add(path, to_json_text(manifest));
}

void run(std::string_view input) {
  Files files;
  unpack(input, kFolder, files);
  files.add("d/newest", "a_partial\n");
  const std::string path = join(kFolder, kManifestName);
  Manifest manifest;
  if (errors_only([&] { manifest = read_manifest(files, kFolder); })) {
    // What is read is written, and read again as the same.
    const std::string text = to_json_text(manifest);
    files.add("d/again/" + std::string(kManifestName), text);
    try {
      require(to_json_text(read_manifest(files, "d/again")) == text, "a manifest that comes back as another one");
    } catch (const Error& e) {
      broken(str("what we write we can't read: ", e.what()));
    }
  }
  const bool verified = input.size() % 16 == 0;  // slow: its buffers are for large files
  fit(files, verified);
  errors_only([&] { look_at(files, kFolder); });
  errors_only([&] { scan(files, "d"); });
  std::vector<std::string> passed_over;
  errors_only([&] { find_checkpoint(files, "d", "", &passed_over); });
  Index index;
  if (!errors_only([&] {
        manifest = read_manifest(files, kFolder);
        index = read_partial(files, kFolder, manifest);
      }))
    return;
  for (const FileEntry& file : index.files)
    require(parent(file.path) == kFolder, "a file outside of the folder is read");
  read_everything(index, files);
  if (verified) errors_only([&] { verify_partial(files, kFolder, manifest); });
}

const Registration registered("partial", run);

}  // namespace
}  // namespace shardsmith::fuzz
