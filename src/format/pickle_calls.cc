// What a pickle may call. Nothing runs: each name has its meaning here.
#include <array>

#include "format/pickle_machine.h"

namespace shardsmith::pickle {

namespace {

// Where only names are asked for there are no storages, so no tensor either.
bool is_tensor_call(PickleName name) {
  switch (name) {
    case PickleName::kTensorV1:
    case PickleName::kTensorV2:
    case PickleName::kTensorV3:
    case PickleName::kParameter:
    case PickleName::kFromType:
    case PickleName::kSparse:
    case PickleName::kQuantized:
    case PickleName::kFromCpuTensor:
    case PickleName::kClass:
      return true;
    default:
      return false;
  }
}

}  // namespace

void Machine::reduce() {
  const Id args_id = pop(), function_id = pop();
  const bool known = node(function_id).kind == Kind::kGlobal;
  if (names_ == PickleNames::kAny && !known)
    return object("(call)", std::array{function_id, args_id});  // of something that only a run would know
  if (!known) bad("forbidden: it calls something that is no known function");
  if (node(args_id).kind != Kind::kTuple) bad("a call whose arguments are no tuple");
  charge(node(args_id).items.size());
  call(node(function_id), node(args_id).items);
}

// An object that is known by its class only.
void Machine::object(std::string name, Ids parts) {
  charge(name.size() / 16);
  const Id id = make(Kind::kOpaque, parts);
  nodes_[id].scalar = scalar(Value(std::move(name)));
  nodes_[id].global.name = PickleName::kObject;
  push(id);
}

void Machine::make_dict(Ids args) {
  const Id dict = make(Kind::kDict);
  if (args.size() == 1) {
    const Node& from = node(args[0]);
    charge(from.items.size());
    if (from.kind == Kind::kDict) {
      nodes_[dict].items = from.items;
    } else if (from.kind == Kind::kList) {
      std::pmr::vector<Id>& items = nodes_[dict].items;
      for (Id pair : from.items) {
        if ((node(pair).kind != Kind::kTuple && node(pair).kind != Kind::kList) || node(pair).items.size() != 2)
          bad("a dict made of something else than pairs");
        items.insert(items.end(), node(pair).items.begin(), node(pair).items.end());
      }
    } else {
      bad("a dict made of something else than pairs");
    }
  }
  push(dict);
}

void Machine::make_set_or_size(PickleName name, Ids args) {
  Ids items;
  if (args.size() == 1) {
    const Node& from = node(args[0]);
    charge(from.items.size());
    if (from.kind != Kind::kTuple && from.kind != Kind::kList && from.kind != Kind::kSet)
      bad("a set or size of no list");
    items = from.items;
  }
  push(name == PickleName::kSize ? make_tuple(items) : make(Kind::kSet, items));
}

// Bytes as they are, or spelled as latin1 text.
void Machine::make_bytes(Ids args) {
  if (args.empty()) return push_bytes({});
  if (const Bytes* bytes = node(args[0]).scalar.get_if<Bytes>()) {
    charge(bytes->data.size() / 16);
    return push_bytes(bytes->data);
  }
  const std::string* coding = args.size() == 2 ? text(args[1]) : nullptr;
  if (!text(args[0]) || !coding || (*coding != "latin1" && *coding != "latin-1"))
    bad("bytes that are not written as latin1 text");
  charge(text(args[0])->size() / 16);
  const std::string& source = *text(args[0]);
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
  push_bytes(out);
}

void Machine::call(const Node& function, Ids args) {
  const std::string& full = *function.scalar.get_if<std::string>();
  const auto arguments = [&](size_t low, size_t high) {
    if (args.size() < low || args.size() > high) bad("'", full, "' with ", args.size(), " arguments");
  };
  if (names_ == PickleNames::kAny && is_tensor_call(function.global.name)) return object(full, args);
  switch (function.global.name) {
    case PickleName::kDict:
      arguments(0, 1);
      return make_dict(args);
    case PickleName::kSize:
    case PickleName::kSet:
      arguments(0, 1);
      return make_set_or_size(function.global.name, args);
    case PickleName::kEncode:
    case PickleName::kBytearray:
      arguments(0, 2);
      return make_bytes(args);
    case PickleName::kComplex: {
      arguments(2, 2);
      const double* real = node(args[0]).scalar.get_if<double>();
      const double* imag = node(args[1]).scalar.get_if<double>();
      if (!real || !imag) bad("a complex number whose parts are none");
      return push(make_scalar(Value(Complex{*real, *imag})));
    }
    case PickleName::kDevice:
    case PickleName::kLayout:
      arguments(1, function.global.name == PickleName::kDevice ? 2 : 1);
      object(function.global.name == PickleName::kDevice ? "torch.device" : "torch.layout", args);
      top().global.name = function.global.name;  // takes no state
      return;
    case PickleName::kTensorV1:
    case PickleName::kTensorV2:
    case PickleName::kTensorV3:
      return rebuild(function.global.name, args);
    case PickleName::kParameter: {
      arguments(3, 4);
      const Node& data = node(args[0]);
      const bool* grad = node(args[1]).scalar.get_if<bool>();
      if (data.kind == Kind::kTensor)
        result_.tensors[data.index].requires_grad = grad && *grad;
      else if (data.kind != Kind::kOpaque || !is_special_tensor(*data.scalar.get_if<std::string>()))
        bad("a parameter that is no tensor");
      return push(args[0]);
    }
    case PickleName::kFromType:
      arguments(4, 4);
      return rebuild_from_type(args);
    case PickleName::kSparse:
      arguments(2, 2);
      return rebuild_sparse(args);
    case PickleName::kQuantized:
      arguments(7, 7);
      return rebuild_quantized(args);
    case PickleName::kFromCpuTensor: {
      arguments(4, 4);
      const DtypeName* dtype = node(args[1]).scalar.get_if<DtypeName>();
      if (node(args[0]).kind != Kind::kTensor || !dtype) bad("'", full, "' of no tensor");
      const Dtype held = result_.tensors[node(args[0]).index].dtype;
      if (dtype->name != to_string(held))
        fail(ErrorKind::kUnsupported, where_, ": a tensor that is stored as ", to_string(held), " to become ",
             printable(dtype->name), " on its device; save it on the CPU");
      return push(args[0]);
    }
    case PickleName::kClass:
      arguments(0, 2);
      if (args.empty()) return push(make(Kind::kBlank));
      if (full != "torch.nn.parameter.Parameter" || node(args[0]).kind != Kind::kTensor)
        bad("forbidden: it calls '", full, "'");
      return push(args[0]);
    case PickleName::kGetattr: {
      arguments(2, 2);
      const Node& owner = node(args[0]);
      if (owner.kind != Kind::kGlobal || !is_dcp_enum(*owner.scalar.get_if<std::string>()) || !text(args[1]))
        bad("forbidden: 'builtins.getattr' of something else than an enumeration; nothing was executed");
      return object(*owner.scalar.get_if<std::string>(), args.subspan(1));
    }
    case PickleName::kObject:
      return object(full, args);
    case PickleName::kNotHeld:
    case PickleName::kForeignTensor:
      if (names_ == PickleNames::kAny) return object(full, args);
      fail(ErrorKind::kUnsupported, where_, ": holds a meta, nested, packed or foreign tensor ('", full,
           "'), which can't be held; save plain tensors");
    case PickleName::kStorage:
    case PickleName::kUntyped:
    case PickleName::kDtype:
    case PickleName::kQScheme:
      if (names_ == PickleNames::kAny) return object(full, args);
      bad("forbidden: it calls '", full, "'");
  }
}

}  // namespace shardsmith::pickle
