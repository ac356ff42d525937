// A pickle, and back: what was read is written, and read again as the same, or refused by an Error.
#include "format/pickle.h"

#include "support.h"

namespace shardsmith::fuzz {
namespace {

constexpr PickleNames kNames[] = {PickleNames::kTorch, PickleNames::kDcp, PickleNames::kAny};

// The tensors' numbers as the written pickle will have them.
void renumber(Value& value, const std::vector<size_t>& numbers) {
  const auto all = [&](List& items) {
    for (Value& item : items) renumber(item, numbers);
  };
  if (TensorRef* reference = value.get_if<TensorRef>()) reference->index = numbers.at(reference->index);
  if (List* list = value.get_if<List>()) all(*list);
  if (Tuple* tuple = value.get_if<Tuple>()) all(tuple->items);
  if (Set* set = value.get_if<Set>()) all(set->items);
  if (Opaque* opaque = value.get_if<Opaque>()) all(opaque->state);
  if (Dict* dict = value.get_if<Dict>()) {
    for (auto& [key, item] : dict->items) {
      renumber(key, numbers);
      renumber(item, numbers);
    }
  }
}

void check_tensors(const Pickled& pickled) {
  for (const PickledTensor& tensor : pickled.tensors) {
    require(tensor.storage < pickled.storages.size(), "a tensor without a storage");
    if (volume(tensor.size) == 0) continue;
    int64_t last = tensor.offset;
    for (size_t d = 0; d < tensor.size.size(); ++d) last += (tensor.size[d] - 1) * tensor.strides[d];
    require((static_cast<uint64_t>(last) + 1) * static_cast<uint64_t>(size_of(tensor.dtype)) <=
                pickled.storages[tensor.storage].bytes,
            "a tensor that leaves its storage");
  }
}

void run(std::string_view input) {
  if (input.empty()) return;
  const PickleNames names = kNames[static_cast<unsigned char>(input[0]) % 3];
  Pickled first;
  size_t used = 0;
  if (!errors_only([&] { first = read_pickle(input.substr(1), "f", {.objects = 1 << 20}, names, &used); })) return;
  require(used <= input.size() - 1, "a pickle that is longer than its bytes");
  check_tensors(first);
  if (names != PickleNames::kTorch) return;

  Value value = untag(std::move(first.value));
  std::string bytes;
  std::vector<size_t> order;
  // Refused: tensors that only torch could build, text that is none, what is nested too deep once it is tagged.
  if (!errors_only([&] { bytes = write_pickle(value, first.tensors, first.storages, "f", &order); })) return;
  Pickled second;
  try {
    second = read_pickle(bytes, "f");
  } catch (const Error& e) {
    broken(str("what we write we can't read: ", e.what()));
  }
  check_tensors(second);
  std::vector<size_t> numbers(first.tensors.size(), 0);
  for (size_t i = 0; i < order.size(); ++i) numbers.at(order[i]) = i;
  renumber(value, numbers);
  require(untag(std::move(second.value)) == value, "a value that comes back as another one");
  require(second.tensors.size() == order.size(), "another number of tensors");
  for (size_t i = 0; i < order.size(); ++i) {
    const PickledTensor &a = first.tensors[order[i]], &b = second.tensors[i];
    require(a.dtype == b.dtype && a.offset == b.offset && a.size == b.size && a.strides == b.strides &&
                a.requires_grad == b.requires_grad,
            "a tensor that comes back as another one");
    require(first.storages[a.storage].key == second.storages[b.storage].key &&
                first.storages[a.storage].bytes == second.storages[b.storage].bytes,
            "a tensor that comes back in another storage");
  }
}

const Registration registered("pickle", run);

}  // namespace
}  // namespace shardsmith::fuzz
