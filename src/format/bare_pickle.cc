#include "format/bare_pickle.h"

#include "base/error.h"
#include "format/torch_object.h"

namespace shardsmith {

bool is_bare_pickle(Storage& storage, const std::string& path) {
  if (storage.stat(path).is_directory) return false;
  const auto file = storage.open_read(path);
  if (file->size() < 3 || torch_container(*file) != TorchContainer::kNone) return false;
  unsigned char head[2];
  file->read(0, std::as_writable_bytes(std::span(head)));
  return head[0] == 0x80 && head[1] >= 2 && head[1] <= 5;
}

Value read_bare_pickle_names(Storage& storage, const std::string& path) {
  const auto file = storage.open_read(path);
  if (file->size() > kMaxPickle)
    fail(ErrorKind::kUnsupported, path, ": a pickle of ", file->size(), " bytes, more than the ", kMaxPickle,
         " that are read");
  std::string bytes(static_cast<size_t>(file->size()), '\0');
  file->read(0, std::as_writable_bytes(std::span(bytes)));
  return read_pickle(bytes, path, {}, PickleNames::kAny).value;
}

}  // namespace shardsmith
