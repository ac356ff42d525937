#include "cli/companions.h"

#include <algorithm>

#include "base/error.h"
#include "cli/conversion.h"
#include "cli/staged_output.h"
#include "format/shards.h"

namespace shardsmith::cli {
namespace {

constexpr uint64_t kCopyChunk = 1 << 20;

void copy_file(Storage& storage, const std::string& from, const std::string& to) {
  const auto input = storage.open_read(from);
  const auto output = storage.create(to, Access::kBuffered, 0);
  AlignedBuffer buffer(kCopyChunk);
  for (uint64_t at = 0; at < input->size();) {
    const std::span chunk(buffer.data(), std::min<uint64_t>(buffer.size(), input->size() - at));
    input->read(at, chunk);
    output->write(at, chunk);
    at += chunk.size();
  }
  output->sync();
  output->close();
}

bool ends_with_any(const std::string& name, std::initializer_list<std::string_view> ends) {
  return std::any_of(ends.begin(), ends.end(), [&](std::string_view end) { return name.ends_with(end); });
}

bool has_config(Storage& storage, const std::string& folder, const Value& config) {
  const std::string path = join(folder, "config.json");
  if (!storage.stat(path).exists) return false;
  try {
    return parse_json(read_text(storage, path), path) == config;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

bool copy_companions(Storage& storage, const std::string& from, const std::string& folder) {
  bool tokenizer = false;
  for (const auto& name : storage.list(from)) {
    const auto stat = storage.stat(join(from, name));
    const bool weights = ends_with_any(name, {".safetensors", ".bin", ".pt", ".pth", ".index.json", ".h5", ".msgpack",
                                              ".onnx", ".gguf", ".ckpt", ".ot"});
    if (stat.is_directory || weights || name == "config.json" || name == kExportMarker || name.starts_with('.'))
      continue;
    if (stat.is_link && storage.stat(join(join(from, name), ".")).exists) continue;
    if (stat.is_link) check_file_name(storage, from, from, name);  // a link may lead to somebody's secrets
    copy_file(storage, join(from, name), join(folder, name));
    tokenizer = tokenizer || name == "tokenizer.json" || name == "tokenizer.model" || name == "vocab.json" ||
                name == "vocab.txt";
  }
  return tokenizer;
}

std::string companions_name(Storage& storage, const std::string& companions, const Value& config,
                            const std::string& checkpoint) {
  const std::string folder = parent(checkpoint);
  if (parent(companions) == folder && companions != checkpoint) return base_name(companions);
  const std::string usual = join(folder, "hf");
  if (!storage.stat(usual).exists || has_config(storage, usual, config)) return "hf";
  return "hf_" + base_name(checkpoint);  // that one is another model's
}

std::unique_ptr<StagedOutput> keep_companions(Storage& storage, const std::string& companions, const Value& config,
                                              const std::string& folder) {
  recover_output(storage, folder);
  if (storage.stat(folder).exists) return nullptr;
  auto out = std::make_unique<StagedOutput>(storage, folder, false);
  out->make_folder();
  copy_companions(storage, companions, out->temporary());
  write_text_atomic(storage, join(out->temporary(), "config.json"), to_json(config, 2) + "\n");
  const std::string left = out->publish();  // nothing was there, so nothing is left
  (void)left;
  return out;
}

}  // namespace shardsmith::cli
