// Storages and tensors of a pickle, the special ones (sparse, quantised) too.
#include <algorithm>

#include "format/pickle_machine.h"

namespace shardsmith::pickle {

// ("storage", class, key, location, elements), in files from before torch 1.6 with a sixth: None, or (key, offset,
// size) of a storage that shows a part of it.
void Machine::persistent() {
  const Id whole_id = pop();
  if (names_ == PickleNames::kAny) return object("(persistent)", {&whole_id, 1});
  const Node& id = node(whole_id);
  if (id.kind == Kind::kTuple && id.items.size() == 4 && text(id.items[0]) && *text(id.items[0]) == "module")
    return push(id.items[1]);  // a class with its source: what it is was checked when it was named
  if (id.kind != Kind::kTuple || id.items.size() < 5 || id.items.size() > 6 || !text(id.items[0]) ||
      *text(id.items[0]) != "storage")
    bad("a persistent object that is no storage");
  const Node& cls = node(id.items[1]);
  if (cls.kind == Kind::kGlobal && cls.global.name == PickleName::kNotHeld)
    fail(ErrorKind::kUnsupported, where_, ": a '", *cls.scalar.get_if<std::string>(), "' can't be held");
  if (cls.kind != Kind::kGlobal || (cls.global.name != PickleName::kStorage && cls.global.name != PickleName::kUntyped))
    bad("a storage of a class that is none");
  const std::string* key = text(id.items[2]);
  if (!key || !text(id.items[3])) bad("a storage whose key or location is no text");
  const bool untyped = cls.global.name == PickleName::kUntyped;
  const Dtype dtype = untyped ? Dtype::kU8 : cls.global.dtype;
  const auto element = static_cast<uint64_t>(size_of(dtype));
  const int64_t elements = integer(id.items[4], "a storage's size");
  uint64_t size = 0;
  if (elements < 0 || __builtin_mul_overflow(static_cast<uint64_t>(elements), element, &size))
    bad("storage '", printable(*key), "' of ", elements, " elements");
  const auto [found, is_new] = storages_.emplace(*key, result_.storages.size());
  if (is_new)
    result_.storages.push_back({*key, size, static_cast<int64_t>(element)});
  else if (result_.storages[found->second].bytes != size)
    bad("storage '", printable(*key), "' is declared with ", result_.storages[found->second].bytes, " and with ", size,
        " bytes");
  uint64_t begin = 0, end = size;
  if (id.items.size() == 6 && !(node(id.items[5]).kind == Kind::kScalar && node(id.items[5]).scalar.is_none())) {
    const Node& view = node(id.items[5]);
    if (view.kind != Kind::kTuple || view.items.size() != 3) bad("a view of a storage that is none");
    const int64_t offset = integer(view.items[1], "a view's offset"), count = integer(view.items[2], "a view's size");
    if (offset < 0 || count < 0 || offset > elements || count > elements - offset)
      bad("a view of ", count, " elements at ", offset, " leaves storage '", printable(*key), "' of ", elements);
    begin = static_cast<uint64_t>(offset) * element;
    end = begin + static_cast<uint64_t>(count) * element;
  }
  views_.push_back({found->second, dtype, begin, end});
  const Id storage = make(Kind::kStorage);
  nodes_[storage].index = static_cast<uint32_t>(views_.size() - 1);
  nodes_[storage].global = {untyped ? PickleName::kUntyped : PickleName::kStorage, dtype};
  push(storage);
}

// Adds it to the result once it is known to lie inside of its storage; returns its number.
size_t Machine::describe_tensor(PickledTensor tensor, const Node& storage) {
  if (storage.kind != Kind::kStorage) bad("a tensor whose storage is none");
  const StorageView& shown = views_[storage.index];
  tensor.storage = shown.storage;
  if (tensor.size.size() != tensor.strides.size())
    bad("a tensor with ", tensor.size.size(), " sizes and ", tensor.strides.size(), " strides");
  if (tensor.offset < 0) bad("a tensor with a negative offset");
  int64_t last = tensor.offset, elements = 1;
  bool overflow = false, empty = false;
  for (size_t d = 0; d < tensor.size.size(); ++d) {
    if (tensor.size[d] < 0 || tensor.strides[d] < 0) bad("a tensor with a negative size or stride");
    if (tensor.size[d] == 0) empty = true;
    int64_t step = 0;
    overflow |= __builtin_mul_overflow(std::max<int64_t>(tensor.size[d] - 1, 0), tensor.strides[d], &step);
    overflow |= __builtin_add_overflow(last, step, &last);
    overflow |= __builtin_mul_overflow(elements, std::max<int64_t>(tensor.size[d], 1), &elements);
  }
  uint64_t end = 0, bytes = 0;
  const auto element = static_cast<uint64_t>(size_of(tensor.dtype));
  overflow |= __builtin_mul_overflow(static_cast<uint64_t>(elements), 2 * element, &bytes);
  overflow |= __builtin_add_overflow(last, int64_t{1}, &last);
  overflow |= __builtin_mul_overflow(static_cast<uint64_t>(last), element, &end);
  if (overflow || (!empty && end > shown.end - shown.begin))
    bad("a tensor of shape ", to_string(tensor.size), " and strides ", to_string(tensor.strides), " at element ",
        tensor.offset, " leaves its storage '", printable(result_.storages[tensor.storage].key), "' of ",
        shown.end - shown.begin, " bytes");
  if (shown.begin % element != 0) bad("a view of a storage that begins inside of an element");
  tensor.offset = empty ? 0 : tensor.offset + static_cast<int64_t>(shown.begin / element);
  result_.tensors.push_back(std::move(tensor));
  return result_.tensors.size() - 1;
}

void Machine::push_tensor(size_t index) {
  const Id id = make(Kind::kTensor);
  nodes_[id].index = static_cast<uint32_t>(index);
  push(id);
}

void Machine::rebuild(PickleName name, Ids args) {
  const size_t needed = name == PickleName::kTensorV1 ? 4 : name == PickleName::kTensorV2 ? 6 : 7;
  if (args.size() < needed) bad("a tensor with ", args.size(), " arguments instead of ", needed);
  const Node& storage = node(args[0]);
  PickledTensor tensor;
  tensor.dtype = storage.global.dtype;
  tensor.offset = integer(args[1], "a tensor's offset");
  tensor.size = integers(args[2], "a tensor's size");
  tensor.strides = integers(args[3], "a tensor's stride");
  if (name != PickleName::kTensorV1) {
    const bool* grad = node(args[4]).scalar.get_if<bool>();
    tensor.requires_grad = grad && *grad;
  }
  if (name == PickleName::kTensorV3) {
    const DtypeName* dtype = node(args[6]).scalar.get_if<DtypeName>();
    if (!dtype) bad("a tensor whose dtype is none");
    const auto known = dtype_from_torch(dtype->name);
    if (!known) fail(ErrorKind::kUnsupported, where_, ": a tensor of dtype ", dtype->name, " can't be held");
    tensor.dtype = *known;
  } else if (storage.kind == Kind::kStorage && storage.global.name == PickleName::kUntyped) {
    bad("a tensor over an untyped storage without a dtype");
  }
  if (args.size() > needed) {  // {"conj": True}, {"neg": True}: a lazily changed view
    const Node& metadata = node(args[needed]);
    for (size_t i = 1; metadata.kind == Kind::kDict && i < metadata.items.size(); i += 2) {
      const bool* flag = node(metadata.items[i]).scalar.get_if<bool>();
      if (flag && *flag)
        fail(ErrorKind::kUnsupported, where_,
             ": a lazily conjugated or negated tensor; save .resolve_conj().resolve_neg()");
    }
  }
  push_tensor(describe_tensor(std::move(tensor), storage));
}

// A tensor with Python attributes, (function, class, arguments, state): the attributes are not held.
void Machine::rebuild_from_type(Ids args) {
  const Node& inner = node(args[0]);
  const Node& type = node(args[1]);
  if (inner.kind != Kind::kGlobal || type.kind != Kind::kGlobal || type.global.name != PickleName::kClass)
    bad("a tensor of a class that is not known");
  switch (inner.global.name) {
    case PickleName::kTensorV1:
    case PickleName::kTensorV2:
    case PickleName::kTensorV3:
    case PickleName::kSparse:
    case PickleName::kQuantized:
    case PickleName::kParameter:
    case PickleName::kFromCpuTensor:
    case PickleName::kNotHeld:
      break;
    default:
      bad("forbidden: a tensor made by '", *inner.scalar.get_if<std::string>(), "'");
  }
  if (node(args[2]).kind != Kind::kTuple) bad("a call whose arguments are no tuple");
  charge(node(args[2]).items.size());
  call(inner, node(args[2]).items);
}

// An Opaque of one dict; see format/pickle.h.
void Machine::push_special(const char* name, const std::vector<std::pair<const char*, Id>>& fields) {
  std::vector<Id> items;
  for (const auto& [field, value] : fields) {
    items.push_back(make_scalar(Value(field)));
    items.push_back(value);
  }
  const Id dict = make(Kind::kDict, items), special = make(Kind::kOpaque, {&dict, 1});
  nodes_[special].scalar = scalar(Value(name));
  push(special);
}

// (layout, (indices, values, size[, is_coalesced])) or (layout, (compressed, plain, values, size))
void Machine::rebuild_sparse(Ids args) {
  const Node& layout = node(args[0]);
  const std::string* word =
      layout.kind == Kind::kOpaque && layout.items.size() == 1 && *layout.scalar.get_if<std::string>() == "torch.layout"
          ? text(layout.items[0])
          : nullptr;
  if (!word || node(args[1]).kind != Kind::kTuple) bad("a sparse tensor without a layout or parts");
  const Ids parts = node(args[1]).items;
  const bool coo = *word == "torch.sparse_coo";
  const bool rows = *word == "torch.sparse_csr" || *word == "torch.sparse_bsr";
  const bool columns = *word == "torch.sparse_csc" || *word == "torch.sparse_bsc";
  if (!coo && !rows && !columns) bad("a sparse tensor of the layout '", printable(*word), "'");
  if (coo ? parts.size() != 3 && parts.size() != 4 : parts.size() != 4)
    bad("a sparse tensor of ", parts.size(), " parts");
  const size_t tensors = coo ? 2 : 3;
  for (size_t i = 0; i < tensors; ++i)
    if (node(parts[i]).kind != Kind::kTensor) bad("a sparse tensor with a part that is no tensor");
  for (int64_t n : integers(parts[tensors], "a sparse tensor's size"))
    if (n < 0) bad("a sparse tensor with a negative size");
  if (coo) {
    const Id coalesced = parts.size() == 4 ? parts[3] : none_;
    const Scalar& flag = node(coalesced).scalar;
    if (node(coalesced).kind != Kind::kScalar || !(flag.is_none() || flag.get_if<bool>()))
      bad("a sparse tensor of which it isn't said whether it is coalesced");
    push_special("torch.sparse_coo",
                 {{"indices", parts[0]}, {"values", parts[1]}, {"size", parts[2]}, {"is_coalesced", coalesced}});
    return;
  }
  const char* name = *word == "torch.sparse_csr"   ? "torch.sparse_csr"
                     : *word == "torch.sparse_bsr" ? "torch.sparse_bsr"
                     : *word == "torch.sparse_csc" ? "torch.sparse_csc"
                                                   : "torch.sparse_bsc";
  push_special(name, {{rows ? "crow_indices" : "ccol_indices", parts[0]},
                      {rows ? "col_indices" : "row_indices", parts[1]},
                      {"values", parts[2]},
                      {"size", parts[3]}});
}

// (storage, offset, size, stride, (scheme, scale, zero point) or (scheme, scales, zero points, axis), grad, hooks)
void Machine::rebuild_quantized(Ids args) {
  const Node& storage = node(args[0]);
  if (storage.kind != Kind::kStorage || quantized_storage_class(storage.global.dtype).empty() ||
      storage.global.name == PickleName::kUntyped)
    bad("a quantised tensor over a storage of other numbers");
  const Node& params_node = node(args[4]);
  if (params_node.kind != Kind::kTuple || params_node.items.size() < 3 || params_node.items.size() > 4)
    bad("a quantised tensor without parameters");
  const Ids params = params_node.items;
  const Node& scheme = node(params[0]);
  if (scheme.kind != Kind::kGlobal || scheme.global.name != PickleName::kQScheme)
    bad("a quantised tensor without a scheme");
  const std::string& name = *scheme.scalar.get_if<std::string>();
  const bool per_channel = name.starts_with("torch.per_channel");
  if (params.size() != (per_channel ? 4u : 3u)) bad("'", name, "' with ", params.size(), " parameters");
  PickledTensor tensor;
  tensor.dtype = storage.global.dtype;
  tensor.offset = integer(args[1], "a tensor's offset");
  tensor.size = integers(args[2], "a tensor's size");
  tensor.strides = integers(args[3], "a tensor's stride");
  if (per_channel) {
    for (size_t i = 1; i < 3; ++i)
      if (node(params[i]).kind != Kind::kTensor && node(params[i]).kind != Kind::kList)
        bad("a quantised tensor whose scales or zero points are no tensor");
    const int64_t axis = integer(params[3], "a quantised tensor's axis");
    if (axis < 0 || static_cast<size_t>(axis) >= tensor.size.size())
      bad("axis ", axis, " of a quantised tensor of ", tensor.size.size(), " dimensions");
  } else {
    if (node(params[1]).kind != Kind::kScalar || !node(params[1]).scalar.get_if<double>())
      bad("a quantised tensor whose scale is no number");
    integer(params[2], "a quantised tensor's zero point");
  }
  const bool* grad = node(args[5]).scalar.get_if<bool>();
  tensor.requires_grad = grad && *grad;
  push_tensor(describe_tensor(std::move(tensor), storage));
  const Id data = pop(), scheme_name = make_scalar(Value(name));
  if (per_channel)
    push_special("torch.quantized", {{"data", data},
                                     {"qscheme", scheme_name},
                                     {"scales", params[1]},
                                     {"zero_points", params[2]},
                                     {"axis", params[3]}});
  else
    push_special("torch.quantized",
                 {{"data", data}, {"qscheme", scheme_name}, {"scale", params[1]}, {"zero_point", params[2]}});
}

// What Tensor.set_(storage, offset, size, stride) would do to it; false for another kind of state.
bool Machine::set_tensor(Id tensor, Id state) {
  if (node(state).kind != Kind::kTuple || node(state).items.size() != 4) return false;
  const Ids parts = node(state).items;
  if (node(parts[0]).kind != Kind::kStorage) return false;
  const Node& storage = node(parts[0]);
  if (storage.global.name == PickleName::kUntyped) bad("a tensor over an untyped storage without a dtype");
  PickledTensor described;
  described.dtype = storage.global.dtype;
  described.offset = integer(parts[1], "a tensor's offset");
  described.size = integers(parts[2], "a tensor's size");
  described.strides = integers(parts[3], "a tensor's stride");
  const size_t index = describe_tensor(std::move(described), storage);
  nodes_[tensor].kind = Kind::kTensor;
  nodes_[tensor].index = static_cast<uint32_t>(index);
  return true;
}

}  // namespace shardsmith::pickle
