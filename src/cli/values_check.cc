#include "cli/values_check.h"

#include <algorithm>

namespace shardsmith::cli {

ValuesCheck check_values(const Index& index, Storage& storage, const StreamOptions& options) {
  ValuesCheck check;
  std::vector<const TensorEntry*> tensors;
  for (const TensorEntry& tensor : index.tensors) {
    if (!tensor.alias_of.empty() || !has_specials(tensor.dtype)) continue;  // a second name is counted once
    tensors.push_back(&tensor);
    ++check.tensors;
    check.elements += volume(tensor.shape);
  }
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const TensorEntry* a, const TensorEntry* b) { return file_place(*a) < file_place(*b); });
  std::vector<StreamedTensor> streamed;
  for (const TensorEntry* tensor : tensors) streamed.push_back({{tensor}});

  std::vector<Specials> found(tensors.size());
  stream_values({&index}, streamed, storage, options, [&](const StreamedBox& box) {
    const Specials here = count_specials(tensors[box.tensor]->dtype, box.sides[0]);
    found[box.tensor].nan += here.nan * box.repeats;
    found[box.tensor].infinite += here.infinite * box.repeats;
  });

  std::vector<size_t> order(tensors.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return tensors[a] < tensors[b]; });
  for (const size_t i : order) {
    if (found[i].nan == 0 && found[i].infinite == 0) continue;
    check.not_finite.push_back({tensors[i]->name, tensors[i]->dtype, tensors[i]->shape, found[i]});
  }
  return check;
}

}  // namespace shardsmith::cli
