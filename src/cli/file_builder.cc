#include "cli/file_builder.h"

#include <algorithm>
#include <numeric>

#include "cli/signals.h"

namespace shardsmith::cli {
namespace {

// Where a part begins in its source: parts are written in this order, so that the source is read from front to back.
std::pair<uint32_t, uint64_t> place_of(const StreamTensor& part) {
  std::pair<uint32_t, uint64_t> first{~uint32_t{0}, 0};
  for (const Slice& slice : part.entry->slices) {
    if (intersect(slice.box, part.box)) first = std::min(first, {slice.file, slice.offset});
  }
  return first;
}

}  // namespace

TensorRef FileBuilder::append(size_t tensor, const Box& box) {
  const TensorEntry& entry = feed_.content.index.tensors[tensor];
  StreamTensor part = whole_tensor(entry, feed_.dtypes[tensor]);
  part.box = box;
  if (!packed_) part.order = stored_order(entry);
  PtTensor out;
  out.dtype = part.dtype;
  out.storage = parts_.size();
  out.size = box.extent;
  Shape ordered;
  for (const size_t d : part.order) ordered.push_back(box.extent[d]);
  const Strides packed = contiguous_strides(ordered);
  out.strides.resize(box.extent.size());
  for (size_t k = 0; k < part.order.size(); ++k) out.strides[part.order[k]] = packed[k];
  parts_.push_back(std::move(part));
  tensors_.push_back(std::move(out));
  return {tensors_.size() - 1};
}

TensorRef FileBuilder::add(size_t tensor) {
  const auto [found, is_new] = whole_.emplace(tensor, 0);
  if (is_new) found->second = append(tensor, whole(feed_.content.index.tensors[tensor].shape)).index;
  return {found->second};
}

TensorRef FileBuilder::add(size_t tensor, const Box& box, const std::string& name) {
  const TensorRef ref = append(tensor, box);
  tensors_[ref.index].name = name;
  tensors_[ref.index].global = feed_.content.index.tensors[tensor].shape;
  tensors_[ref.index].box = box;
  return ref;
}

Value FileBuilder::import(Value value) {
  for_each_tensor(value, [&](TensorRef& reference) { reference = add(reference.index); });
  return value;
}

Value FileBuilder::import_listed(Value value, const std::string& path) {
  for_each_tensor(value, path, [&](TensorRef& reference, const std::string& place) {
    const size_t tensor = reference.index;
    const bool is_new = !whole_.count(tensor);
    reference = add(tensor);
    if (!is_new) return;
    PtTensor& listed = tensors_[reference.index];
    listed.name = place;
    listed.global = feed_.content.index.tensors[tensor].shape;
    listed.box = whole(listed.global);
  });
  return value;
}

uint64_t FileBuilder::bytes() const {
  uint64_t total = 0;
  for (const StreamTensor& part : parts_) total += part.bytes();
  return total;
}

PtContent FileBuilder::finish(Value value, bool with_slices) {
  std::vector<size_t> order(parts_.size()), rank(parts_.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<std::pair<uint32_t, uint64_t>> places;
  for (const StreamTensor& part : parts_) places.push_back(place_of(part));
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return places[a] < places[b]; });
  for (size_t i = 0; i < order.size(); ++i) rank[order[i]] = i;

  PtContent content;
  content.value = std::move(value);
  content.with_slices = with_slices;
  std::vector<StreamTensor> streamed;
  for (const size_t i : order) streamed.push_back(std::move(parts_[i]));
  for (PtTensor& tensor : tensors_) tensor.storage = rank[tensor.storage];
  content.tensors = std::move(tensors_);
  stream_ = std::make_unique<TensorStream>(feed_.content.index.files, std::move(streamed), feed_.memory, feed_.storage,
                                           &feed_.ledger, check_signals);
  for (size_t i = 0; i < order.size(); ++i) {
    ByteSource source;
    source.size = stream_->tensors()[i].bytes();
    source.fill = [this, i](uint64_t offset, std::span<std::byte> out) {
      stream_->read(i, offset, out);
      feed_.done += out.size();
      if (feed_.progress) feed_.progress({"write", feed_.done, feed_.total, "bytes"});
    };
    content.storages.push_back(std::move(source));
  }
  return content;
}

}  // namespace shardsmith::cli
