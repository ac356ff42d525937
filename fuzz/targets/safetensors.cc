#include "format/safetensors.h"

#include "format/bytes.h"
#include "support.h"

namespace shardsmith::fuzz {
namespace {

void run(std::string_view input) {
  Files files;
  std::string bytes(input.substr(input.empty() ? 0 : 1));
  // Most inputs get the length that their header has, up to its last brace, or little would be reached behind it.
  if (!input.empty() && (input[0] & 3) != 0 && bytes.size() >= 8) {
    const size_t brace =
        bytes.find('\0', 8) == std::string::npos ? bytes.rfind('}') : bytes.rfind('}', bytes.find('\0', 8));
    if (brace != std::string::npos && brace >= 8) {
      std::string number;
      put_le<uint64_t>(number, brace - 7);
      bytes.replace(0, 8, number);
    }
  }
  files.add("f", std::move(bytes));
  errors_only([&] { is_safetensors(files, "f"); });
  Index index;
  if (errors_only([&] { index = read_safetensors(files, "f"); })) read_everything(index, files);
}

const Registration registered("safetensors", run);

}  // namespace
}  // namespace shardsmith::fuzz
