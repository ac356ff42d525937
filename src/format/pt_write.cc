#include "format/pt_write.h"

#include "base/error.h"
#include "format/pt.h"
#include "format/pt_file.h"
#include "format/stream_writer.h"

namespace shardsmith {

void check_pt_tensor(const PtContent& content, size_t number, const std::string& path) {
  const PtTensor& tensor = content.tensors[number];
  const auto bad = [&](const auto&... why) {
    fail(ErrorKind::kInvalidArgument, path, ": tensor ",
         tensor.name.empty() ? std::to_string(number) : "'" + tensor.name + "'", " ", to_string(tensor.size), ": ",
         why...);
  };
  if (tensor.storage >= content.storages.size())
    bad("lies in storage ", tensor.storage, " of ", content.storages.size());
  if (tensor.strides.size() != tensor.size.size() || tensor.offset < 0) bad("has no proper strides or offset");
  if (volume(tensor.size) != 0) {
    int64_t last = tensor.offset;
    bool overflow = false;
    for (size_t d = 0; d < tensor.size.size(); ++d) {
      int64_t step = 0;
      if (tensor.strides[d] < 0) bad("has a negative stride");
      overflow |= __builtin_mul_overflow(tensor.size[d] - 1, tensor.strides[d], &step);
      overflow |= __builtin_add_overflow(last, step, &last);
    }
    const uint64_t held = content.storages[tensor.storage].size / static_cast<uint64_t>(size_of(tensor.dtype));
    if (overflow || static_cast<uint64_t>(last) >= held)
      bad("leaves its storage of ", content.storages[tensor.storage].size, " bytes");
  }
  if (tensor.name.empty()) return;
  if (tensor.box.extent.size() != tensor.size.size() || tensor.box.offset.size() != tensor.size.size() ||
      tensor.global.size() != tensor.size.size() || !inside(tensor.box, tensor.global))
    bad("its box ", to_string(tensor.box), " doesn't lie inside of ", to_string(tensor.global));
  for (size_t d = 0; d < tensor.size.size(); ++d)
    if (tensor.box.extent[d] > tensor.size[d]) bad("is smaller than its box ", to_string(tensor.box));
}

// One writer: the covered bytes from the first to the last, then the tail, whose checksums are known by then.
Written write_pt(Storage& storage, const std::string& path, const PtContent& content) {
  const PtFile layout(content, path);
  const auto file = storage.create(path, Access::kDirect, layout.size());
  StreamWriter out(*file, layout.size());
  PtRanges ranges(layout);
  ContentSource source(content);
  ranges.write(out, 0, layout.covered(), source);
  const PtFile::Tail tail = layout.finish(ranges.crcs(), content.extra);
  out.append(tail.bytes);
  out.finish();
  file->sync();
  file->close();
  return {layout.size(), tail.digest, tail.tail_digest};
}

}  // namespace shardsmith
