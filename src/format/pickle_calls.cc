// What a pickle may call: tensors, storages and a few plain types. Nothing runs; each name has its meaning here.
#include "format/pickle_machine.h"

namespace shardsmith::pickle {

void Machine::persistent() {
  const Node id = node(pop());
  if (id.kind != Kind::kTuple || id.items.size() < 5 || !text(id.items[0]) || *text(id.items[0]) != "storage")
    bad("a persistent object that is no storage");
  if (id.items.size() > 5)
    fail(ErrorKind::kUnsupported, where_, ": written by torch before 1.6; load it in torch and save it again");
  const Node& cls = node(id.items[1]);
  if (cls.kind != Kind::kGlobal || (cls.global.name != PickleName::kStorage && cls.global.name != PickleName::kUntyped))
    bad("a storage of a class that is none");
  const std::string* key = text(id.items[2]);
  if (!key || !text(id.items[3])) bad("a storage whose key or location is no text");
  const Dtype dtype = cls.global.dtype;
  const bool untyped = cls.global.name == PickleName::kUntyped;
  const int64_t elements = integer(id.items[4], "a storage's size");
  uint64_t size = 0;
  if (elements < 0 || __builtin_mul_overflow(static_cast<uint64_t>(elements),
                                             static_cast<uint64_t>(untyped ? 1 : size_of(dtype)), &size))
    bad("storage '", printable(*key), "' of ", elements, " elements");
  const auto [found, is_new] = storages_.emplace(*key, result_.storages.size());
  if (is_new)
    result_.storages.push_back({*key, size});
  else if (result_.storages[found->second].bytes != size)
    bad("storage '", printable(*key), "' is declared with ", result_.storages[found->second].bytes, " and with ", size,
        " bytes");
  const Id storage = make(Kind::kStorage);
  nodes_[storage].index = found->second;
  nodes_[storage].dtype = untyped ? Dtype::kU8 : dtype;
  nodes_[storage].global = {untyped ? PickleName::kUntyped : PickleName::kStorage, dtype};
  push(storage);
}

void Machine::add_tensor(PickledTensor tensor, const Node& storage) {
  if (storage.kind != Kind::kStorage) bad("a tensor whose storage is none");
  tensor.storage = storage.index;
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
  const PickledStorage& held = result_.storages[tensor.storage];
  if (overflow || (!empty && end > held.bytes))
    bad("a tensor of shape ", to_string(tensor.size), " and strides ", to_string(tensor.strides), " at element ",
        tensor.offset, " leaves its storage '", printable(held.key), "' of ", held.bytes, " bytes");
  if (empty) tensor.offset = 0;
  const Id id = make(Kind::kTensor);
  nodes_[id].index = result_.tensors.size();
  result_.tensors.push_back(std::move(tensor));
  push(id);
}

void Machine::rebuild(PickleName name, const std::vector<Id>& args) {
  const size_t needed = name == PickleName::kTensorV1 ? 4 : name == PickleName::kTensorV2 ? 6 : 7;
  if (args.size() < needed) bad("a tensor with ", args.size(), " arguments instead of ", needed);
  const Node storage = node(args[0]);
  PickledTensor tensor;
  tensor.dtype = storage.dtype;
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
  } else if (storage.global.name == PickleName::kUntyped) {
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
  add_tensor(std::move(tensor), storage);
}

void Machine::reduce() {
  const Id args_id = pop();
  const Node function = node(pop());
  if (function.kind != Kind::kGlobal) bad("forbidden: it calls something that is no known function");
  if (node(args_id).kind != Kind::kTuple) bad("a call whose arguments are no tuple");
  charge(node(args_id).items.size());
  const std::vector<Id> args = node(args_id).items;
  const auto arguments = [&](size_t low, size_t high) {
    if (args.size() < low || args.size() > high)
      bad("'", *function.scalar.get_if<std::string>(), "' with ", args.size(), " arguments");
  };
  switch (function.global.name) {
    case PickleName::kDict: {
      arguments(0, 1);
      const Id dict = make(Kind::kDict);
      if (args.size() == 1) {
        const Node& from = node(args[0]);
        charge(from.items.size());
        if (from.kind == Kind::kDict) {
          nodes_[dict].items = std::vector<Id>(from.items);
        } else if (from.kind == Kind::kList) {
          std::vector<Id> items;
          for (Id pair : from.items) {
            if ((node(pair).kind != Kind::kTuple && node(pair).kind != Kind::kList) || node(pair).items.size() != 2)
              bad("a dict made of something else than pairs");
            items.insert(items.end(), node(pair).items.begin(), node(pair).items.end());
          }
          nodes_[dict].items = std::move(items);
        } else {
          bad("a dict made of something else than pairs");
        }
      }
      return push(dict);
    }
    case PickleName::kSize:
    case PickleName::kSet: {
      arguments(0, 1);
      std::vector<Id> items;
      if (args.size() == 1) {
        const Node& from = node(args[0]);
        charge(from.items.size());
        if (from.kind != Kind::kTuple && from.kind != Kind::kList && from.kind != Kind::kSet)
          bad("a set or size of no list");
        items = from.items;
      }
      if (function.global.name == PickleName::kSize) return push(make_tuple(std::move(items)));
      const Id set = make(Kind::kSet);
      nodes_[set].items = std::move(items);
      return push(set);
    }
    case PickleName::kEncode:
    case PickleName::kBytearray: {
      arguments(0, 2);
      if (args.empty()) return push_bytes({});
      if (const Bytes* bytes = node(args[0]).scalar.get_if<Bytes>()) {
        charge(bytes->data.size() / 16);
        const std::string copy = bytes->data;
        return push_bytes(copy);
      }
      const std::string* coding = args.size() == 2 ? text(args[1]) : nullptr;
      if (!text(args[0]) || !coding || (*coding != "latin1" && *coding != "latin-1"))
        bad("bytes that are not written as latin1 text");
      charge(text(args[0])->size() / 16);
      const std::string source = *text(args[0]);
      std::string out;
      for (size_t i = 0; i < source.size(); ++i) {
        const auto c = static_cast<unsigned char>(source[i]);
        if (c < 0x80) {
          out += source[i];
        } else if ((c == 0xc2 || c == 0xc3) && i + 1 < source.size() && (source[i + 1] & 0xc0) == 0x80) {
          out += static_cast<char>((c & 3) << 6 | (source[i + 1] & 0x3f));
          ++i;
        } else {
          bad("bytes that are not written as latin1 text");
        }
      }
      return push_bytes(out);
    }
    case PickleName::kComplex: {
      arguments(2, 2);
      const double* real = node(args[0]).scalar.get_if<double>();
      const double* imag = node(args[1]).scalar.get_if<double>();
      if (!real || !imag) bad("a complex number whose parts are none");
      return push(make_scalar(Value(Complex{*real, *imag})));
    }
    case PickleName::kDevice: {
      arguments(1, 2);
      const Id device = make(Kind::kOpaque);
      nodes_[device].scalar = Value("torch.device");
      nodes_[device].items = args;
      return push(device);
    }
    case PickleName::kLayout: {
      arguments(1, 1);
      const Id layout = make(Kind::kOpaque);
      nodes_[layout].scalar = Value("torch.layout");
      nodes_[layout].items = args;
      return push(layout);
    }
    case PickleName::kTensorV1:
    case PickleName::kTensorV2:
    case PickleName::kTensorV3:
      return rebuild(function.global.name, args);
    case PickleName::kParameter: {
      arguments(3, 4);
      if (node(args[0]).kind != Kind::kTensor) bad("a parameter that is no tensor");
      const bool* grad = node(args[1]).scalar.get_if<bool>();
      result_.tensors[node(args[0]).index].requires_grad = grad && *grad;
      return push(args[0]);
    }
    case PickleName::kFromType: {
      arguments(4, 4);
      const Node& inner = node(args[0]);
      const Node& type = node(args[1]);
      if (inner.kind != Kind::kGlobal || type.kind != Kind::kGlobal || type.global.name != PickleName::kClass)
        bad("a tensor of a class that is not known");
      if (inner.global.name != PickleName::kTensorV2 && inner.global.name != PickleName::kTensorV3)
        fail(ErrorKind::kUnsupported, where_, ": a tensor made by '", *inner.scalar.get_if<std::string>(), "'");
      if (node(args[2]).kind != Kind::kTuple) bad("a call whose arguments are no tuple");
      charge(node(args[2]).items.size());
      const std::vector<Id> inner_args = node(args[2]).items;
      return rebuild(inner.global.name, inner_args);
    }
    case PickleName::kNotHeld:
      fail(ErrorKind::kUnsupported, where_, ": holds a sparse, quantised, meta or foreign tensor ('",
           *function.scalar.get_if<std::string>(), "'), which can't be held; save plain tensors");
    case PickleName::kStorage:
    case PickleName::kUntyped:
    case PickleName::kDtype:
    case PickleName::kClass:
      bad("forbidden: it calls '", *function.scalar.get_if<std::string>(), "'");
  }
}

}  // namespace shardsmith::pickle
