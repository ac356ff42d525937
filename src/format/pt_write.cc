#include "format/pt_write.h"
#include "base/error.h"
#include "format/pickle.h"
#include "format/pt.h"
#include "format/pt_record.h"
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

namespace {

std::vector<PtSlice> slice_list(const PtContent& content, const std::vector<size_t>& order, const std::string& path) {
  std::vector<PtSlice> slices;
  std::vector<bool> written(content.tensors.size(), false);
  for (size_t number = 0; number < order.size(); ++number) {
    const PtTensor& tensor = content.tensors[order[number]];
    written[order[number]] = true;
    if (!tensor.name.empty()) slices.push_back({number, tensor.name, tensor.global, tensor.box});
  }
  for (size_t i = 0; i < written.size(); ++i)
    if (!written[i] && !content.tensors[i].name.empty())
      fail(ErrorKind::kInvalidArgument, path, ": tensor '", content.tensors[i].name, "' stands nowhere in the value");
  return slices;
}

}  // namespace

// The file, in order: data.pkl, byteorder, data/0 ... data/N, version, shardsmith, directory. The place of each is
// known before the first byte is written; the checksums are filled in as the bytes go by.
Written write_pt(Storage& storage, const std::string& path, const PtContent& content) {
  std::vector<PickledTensor> tensors;
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    const PtTensor& t = content.tensors[i];
    check_pt_tensor(content, i, path);
    tensors.push_back({t.storage, t.dtype, t.offset, t.size, t.strides, t.requires_grad});
  }
  std::vector<PickledStorage> storages;
  for (size_t i = 0; i < content.storages.size(); ++i)
    storages.push_back({std::to_string(i), content.storages[i].size});
  std::vector<size_t> order;
  const std::string pickle = write_pickle(content.value, tensors, storages, path, &order);
  if (pickle.size() > (256 << 20))
    fail(ErrorKind::kUnsupported, path, ": ", pickle.size(), " bytes of plain values; put large data into tensors");

  TorchZip zip(pickle);
  for (const ByteSource& source : content.storages) zip.add_storage(source);
  zip.add_version();
  const size_t before_record = zip.records();
  std::string record;
  if (content.with_slices) {
    record = make_pt_record(slice_list(content, order, path), content.extra, zip.end());
    zip.add(kPtRecordName, bytes_of(record), 64);
  }
  const uint64_t size = zip.size();

  const auto file = storage.create(path, Access::kDirect, size);
  StreamWriter out(*file, size);
  zip.write(out, [&](size_t i) {
    if (i == before_record) set_crcs(record, out.take_block_crcs());
  });
  out.finish();
  file->sync();
  file->close();
  return {size, content.with_slices ? digest_of(record) : ""};
}

}  // namespace shardsmith
