#include "layout/index.h"

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "layout/box_tree.h"

namespace shardsmith {
namespace {

std::string file_of(const Index& index, const Slice& slice) { return index.files[slice.file].path; }

[[noreturn]] void bad(const TensorEntry& tensor, const std::string& where, const std::string& why) {
  fail(ErrorKind::kCorrupt, where, ": tensor '", tensor.name, "' ", to_string(tensor.shape), ": ", why);
}

// That there are not too many elements to be counted.
void check_volume(const TensorEntry& tensor, const std::string& where) {
  try {
    volume(tensor.shape);
  } catch (const Error&) {
    bad(tensor, where, "a negative size, or more elements than 63 bits can count");
  }
}

// The bytes that a slice needs from its file's start, by checked arithmetic.
void check_bytes(const Index& index, const TensorEntry& tensor, const Slice& slice) {
  const FileEntry& file = index.files[slice.file];
  int64_t last = 0;  // element number of the last element
  bool overflow = false, empty = false;
  for (size_t d = 0; d < slice.strides.size(); ++d) {
    if (slice.strides[d] < 0) bad(tensor, file.path, str("a negative stride in ", to_string(slice.strides)));
    if (slice.box.extent[d] == 0) empty = true;
    int64_t step = 0;
    overflow |= __builtin_mul_overflow(std::max<int64_t>(slice.box.extent[d] - 1, 0), slice.strides[d], &step);
    overflow |= __builtin_add_overflow(last, step, &last);
  }
  if (empty) return;
  uint64_t end = 0;
  overflow |= __builtin_add_overflow(last, int64_t{1}, &last);
  overflow |= __builtin_mul_overflow(static_cast<uint64_t>(last), static_cast<uint64_t>(size_of(tensor.dtype)), &end);
  if (slice.encoding == Encoding::kDeflated) {
    // How long the record is once inflated is known to the reader only; what is stored must be there.
    overflow |= __builtin_add_overflow(end, slice.inner, &end);
    if (!overflow) overflow = __builtin_add_overflow(slice.offset, slice.stored, &end);
  } else {
    overflow |= __builtin_add_overflow(end, slice.offset, &end);
  }
  if (overflow || end > file.size) {
    bad(tensor, file.path,
        str("box ", to_string(slice.box), " needs the file's bytes up to ", overflow ? "beyond 64 bits" : str(end),
            ", but the file has ", file.size));
  }
}

void check_cover(const Index& index, const TensorEntry& tensor) {
  int64_t covered = 0;
  bool overflow = false;
  for (const Slice& slice : tensor.slices)
    overflow |= __builtin_add_overflow(covered, volume(slice.box.extent), &covered);
  const int64_t total = volume(tensor.shape);
  const std::string where = tensor.slices.empty() ? index.format : file_of(index, tensor.slices[0]);
  // Without an overlap, covering everything is a matter of counting.
  if (tensor.slices.size() > 1) {
    const BoxTree tree(tensor.slices);
    for (size_t i = 0; i < tensor.slices.size(); ++i) {
      const Box& box = tensor.slices[i].box;
      if (volume(box.extent) == 0) continue;
      tree.find(box, [&](size_t j) -> bool {
        if (i == j) return true;
        bad(tensor, file_of(index, tensor.slices[i]),
            str("box ", to_string(box), " overlaps box ", to_string(tensor.slices[j].box), " in ",
                file_of(index, tensor.slices[j]), ": these elements are there twice"));
      });
    }
  }
  if (overflow || covered != total) {
    bad(tensor, where, str("its slices hold ", covered, " of its ", total, " elements; a file or a part is missing"));
  }
}

}  // namespace

const TensorEntry* Index::find(std::string_view name) const {
  if (indexed_ != tensors.size()) {  // not indexed yet: right, if slow
    for (const TensorEntry& tensor : tensors) {
      if (tensor.name == name) return &tensor;
    }
    return nullptr;
  }
  if (slots_.empty()) return nullptr;
  const uint32_t number = slots_[slot_of(name)];
  return number == 0 ? nullptr : &tensors[number - 1];
}

size_t Index::slot_of(std::string_view name) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = std::hash<std::string_view>()(name) & mask;
  while (slots_[slot] != 0 && tensors[slots_[slot] - 1].name != name) slot = (slot + 1) & mask;
  return slot;
}

void Index::reserve_slots(size_t count) {
  size_t size = 16;
  while (size < 2 * count) size *= 2;
  if (size <= slots_.size()) return;
  slots_.assign(size, 0);
  for (size_t i = 0; i < indexed_; ++i) slots_[slot_of(tensors[i].name)] = static_cast<uint32_t>(i + 1);
}

void Index::reindex() {
  slots_.clear();
  indexed_ = 0;
  reserve_slots(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    uint32_t& number = slots_[slot_of(tensors[i].name)];
    if (number != 0) fail(ErrorKind::kCorrupt, format, ": tensor '", tensors[i].name, "' is there twice");
    number = static_cast<uint32_t>(i + 1);
  }
  indexed_ = tensors.size();
}

std::vector<size_t> Index::merge(Index other) {
  if (indexed_ != tensors.size()) reindex();
  reserve_slots(tensors.size() + other.tensors.size());
  const uint32_t shift = static_cast<uint32_t>(files.size());
  std::vector<size_t> places;
  places.reserve(other.tensors.size());
  std::move(other.files.begin(), other.files.end(), std::back_inserter(files));
  for (TensorEntry& theirs : other.tensors) {
    for (Slice& slice : theirs.slices) slice.file += shift;
    const size_t slot = slot_of(theirs.name);
    places.push_back(slots_[slot] == 0 ? tensors.size() : slots_[slot] - 1);
    if (slots_[slot] == 0) {
      tensors.push_back(std::move(theirs));
      slots_[slot] = static_cast<uint32_t>(++indexed_);
      continue;
    }
    TensorEntry& ours = tensors[slots_[slot] - 1];
    if (ours.dtype != theirs.dtype || ours.shape != theirs.shape) {
      const auto place = [this](const TensorEntry& t) {
        return t.slices.empty() ? std::string("another file") : files[t.slices[0].file].path;
      };
      fail(ErrorKind::kCorrupt, "tensor '", ours.name, "' is ", to_string(ours.dtype), " ", to_string(ours.shape),
           " in ", place(ours), " but ", to_string(theirs.dtype), " ", to_string(theirs.shape), " in ", place(theirs));
    }
    if (!ours.alias_of.empty() && !theirs.alias_of.empty() && ours.alias_of != theirs.alias_of) {
      fail(ErrorKind::kCorrupt, "tensor '", ours.name, "' is a second name of '", ours.alias_of, "' and of '",
           theirs.alias_of, "'");
    }
    // Real slices win over a second name.
    if (theirs.alias_of.empty()) ours.alias_of.clear();
    std::move(theirs.slices.begin(), theirs.slices.end(), std::back_inserter(ours.slices));
  }
  return places;
}

const TensorEntry* stored_entry(const Index& index, const TensorEntry& tensor) {
  const TensorEntry* entry = &tensor;
  for (size_t hops = 0; entry && !entry->alias_of.empty(); ++hops) {
    if (hops > index.tensors.size()) {
      fail(ErrorKind::kCorrupt, index.format, ": tensor '", tensor.name, "' is a second name of itself");
    }
    entry = index.find(entry->alias_of);
  }
  return entry;
}

void validate(const Index& index, bool require_cover) {
  for (const TensorEntry& tensor : index.tensors) {
    const std::string where = tensor.slices.empty() || tensor.slices[0].file >= index.files.size()
                                  ? index.format
                                  : file_of(index, tensor.slices[0]);
    check_volume(tensor, where);
    for (const Slice& slice : tensor.slices) {
      if (slice.file >= index.files.size()) bad(tensor, index.format, "a slice names a file that is not listed");
      if (slice.strides.size() != tensor.shape.size() || !inside(slice.box, tensor.shape)) {
        bad(tensor, file_of(index, slice), str("box ", to_string(slice.box), " does not lie inside it"));
      }
      check_bytes(index, tensor, slice);
    }
    if (require_cover && tensor.alias_of.empty()) check_cover(index, tensor);
  }
}

}  // namespace shardsmith
