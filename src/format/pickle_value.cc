// The copy of what a pickle made into a Value, within limits.
#include <algorithm>
#include <unordered_set>

#include "format/pickle_machine.h"

namespace shardsmith {
namespace pickle {

Pickled Machine::run() {
  const Id root = parse();
  result_.value = value_of(root, 0);
  return std::move(result_);
}

Value Machine::value_of(Id id, size_t depth) {
  if (depth > limits_.depth) bad("nested deeper than ", limits_.depth, " levels, or inside of itself");
  // Each reference takes a byte of the pickle, so that only one whose references multiply makes much more of it.
  const uint64_t most = std::min<uint64_t>(limits_.objects, (1 << 20) + 8 * bytes_.size());
  if (++copied_ > most) bad("references that multiply to more than ", most, " objects");
  const Node& n = nodes_[id];
  switch (n.kind) {
    case Kind::kScalar:
      if (const std::string* s = n.scalar.get_if<std::string>()) copied_ += s->size() / 64;
      if (const Bytes* b = n.scalar.get_if<Bytes>()) copied_ += b->data.size() / 64;
      return n.scalar.copy();
    case Kind::kList:
      return Value(values_of(n.items, depth + 1));
    case Kind::kTuple:
      return Value(Tuple{values_of(n.items, depth + 1)});
    case Kind::kSet:
      return Value(Set{values_of(n.items, depth + 1)});
    case Kind::kDict: {
      Dict dict;
      std::unordered_set<std::string_view> texts;
      dict.items.reserve(n.items.size() / 2);
      for (size_t i = 0; i + 1 < n.items.size(); i += 2) {
        Value key = value_of(n.items[i], depth + 1);
        if (const std::string* name = text(n.items[i]);
            name && node(n.items[i]).kind == Kind::kScalar && !texts.insert(*name).second)
          bad("the key '", printable(*name), "' stands twice in one dict");
        dict.items.emplace_back(std::move(key), value_of(n.items[i + 1], depth + 1));
      }
      return Value(std::move(dict));
    }
    case Kind::kTensor:
      return Value(TensorRef{n.index});
    case Kind::kBlank:
      bad("a tensor without a state");
    case Kind::kStorage: {  // on its own: as torch shows it, one dimension of elements
      const StorageView& shown = views_[n.index];
      PickledTensor tensor;
      tensor.storage = shown.storage;
      tensor.dtype = shown.dtype;
      tensor.offset = static_cast<int64_t>(shown.begin) / size_of(shown.dtype);
      tensor.size = {static_cast<int64_t>(shown.end - shown.begin) / size_of(shown.dtype)};
      tensor.strides = {1};
      result_.tensors.push_back(std::move(tensor));
      return Value(TensorRef{result_.tensors.size() - 1});
    }
    case Kind::kGlobal:
      copied_ += n.scalar.get_if<std::string>()->size() / 64;
      return Value(Opaque{*n.scalar.get_if<std::string>(), {}});
    case Kind::kOpaque:
      copied_ += n.scalar.get_if<std::string>()->size() / 64;
      return Value(Opaque{*n.scalar.get_if<std::string>(), values_of(n.items, depth + 1)});
  }
  return {};
}

}  // namespace pickle

Pickled read_pickle(std::string_view bytes, std::string_view where, const PickleLimits& limits, PickleNames names,
                    size_t* used) {
  pickle::Machine machine(bytes, where, limits, names);
  Pickled result = machine.run();
  if (used) *used = machine.used();
  return result;
}

}  // namespace shardsmith
