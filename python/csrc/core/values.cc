// Plain values, from and to Python.
#include <map>
#include <utility>
#include <variant>
#include <vector>

#include "bindings.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

struct ToPython {
  const Index& index;

  py::object items(const List& list) const {
    py::list result;
    for (const Value& item : list) result.append(to_python(item, index));
    return result;
  }
  py::object operator()(const None&) const { return py::none(); }
  py::object operator()(bool v) const { return py::bool_(v); }
  py::object operator()(int64_t v) const { return py::int_(v); }
  py::object operator()(double v) const { return py::float_(v); }
  py::object operator()(const std::string& v) const { return text_of(v); }
  py::object operator()(const Bytes& v) const { return py::bytes(v.data); }
  py::object operator()(const List& v) const { return items(v); }
  py::object operator()(const Tuple& v) const { return py::tuple(items(v.items)); }
  py::object operator()(const Set& v) const { return py::set(items(v.items)); }
  py::object operator()(const Dict& v) const {
    py::dict result;
    for (const auto& [key, value] : v.items) result[to_python(key, index)] = to_python(value, index);
    return result;
  }
  py::object operator()(const TensorRef& v) const { return py::cast(TensorName{index.tensors.at(v.index).name}); }
  py::object operator()(const Opaque& v) const { return py::cast(v); }
  py::object operator()(const BigInt& v) const { return py::int_(py::str(v.digits)); }
  py::object operator()(const Complex& v) const { return py::cast(std::complex<double>(v.real, v.imag)); }
  py::object operator()(const DtypeName& v) const { return py::str("torch." + v.name); }
};

Value integer(const py::handle& object) {
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
  if (overflow) return BigInt{py::str(object).cast<std::string>()};
  return value;
}

class FromPython {
 public:
  explicit FromPython(PtContent* content) : content_(content) {}

  Value convert(const py::handle& object) {
    if (object.is_none()) return None{};
    if (py::isinstance<py::bool_>(object)) return object.cast<bool>();
    if (PyLong_CheckExact(object.ptr())) return integer(object);
    if (PyFloat_CheckExact(object.ptr())) return object.cast<double>();
    if (PyUnicode_CheckExact(object.ptr())) return object.cast<std::string>();
    if (PyComplex_CheckExact(object.ptr())) {
      const auto c = object.cast<std::complex<double>>();
      return Complex{c.real(), c.imag()};
    }
    if (PyBytes_CheckExact(object.ptr())) return Bytes{object.cast<std::string>()};
    if (PyList_CheckExact(object.ptr())) return list(object);
    if (PyTuple_CheckExact(object.ptr())) return Tuple{list(object)};
    if (PyAnySet_CheckExact(object.ptr())) return Set{list(object)};
    if (PyDict_Check(object.ptr())) return dict(py::reinterpret_borrow<py::dict>(object));
    if (py::isinstance<Opaque>(object)) return object.cast<Opaque>();
    if (content_ && py::isinstance<Leaf>(object)) return leaf(object.cast<const Leaf&>());
    if (content_ && py::isinstance<Leaves>(object)) return leaves(object.cast<Leaves&>());
    fail(ErrorKind::kUnsupported, "'", path(), "' is a ", py::str(py::type::of(object)).cast<std::string>(),
         ", which is no plain value");
  }

 private:
  List list(const py::handle& items) {
    List result;
    int64_t position = 0;
    for (const py::handle& item : items) {
      above_.emplace_back(position++);
      result.push_back(convert(item));
      above_.pop_back();
    }
    return result;
  }

  Dict dict(const py::dict& items) {
    Dict result;
    for (const auto& [key, value] : items) {
      above_.emplace_back(key);
      PtContent* const content = std::exchange(content_, nullptr);  // a key is no tensor
      Value name = convert(key);
      content_ = content;
      result.items.emplace_back(std::move(name), convert(value));
      above_.pop_back();
    }
    return result;
  }

  Value leaves(Leaves& leaves) {
    Dict result;
    result.items.reserve(leaves.items.size());
    for (auto& [name, one] : leaves.items) result.items.emplace_back(Value(std::move(name)), leaf(std::move(one)));
    leaves.items.clear();
    return result;
  }

  Value leaf(Leaf leaf) {
    const auto [known, is_new] =
        storages_.emplace(std::pair(leaf.storage, leaf.storage_size), content_->storages.size());
    if (is_new) content_->storages.push_back({leaf.storage_size, leaf.storage, nullptr});
    leaf.tensor.storage = known->second;
    content_->tensors.push_back(std::move(leaf.tensor));
    return TensorRef{content_->tensors.size() - 1};
  }

  std::string path() const {
    std::string path;
    for (const auto& step : above_) {
      const int64_t* position = std::get_if<int64_t>(&step);
      const py::handle key = position ? py::handle() : std::get<py::handle>(step);
      if (position)
        path = path_join(path, *position);
      else if (PyLong_CheckExact(key.ptr()))
        path = path_join(path, key.cast<int64_t>());
      else
        path = path_join(path, py::str(key).cast<std::string>());
    }
    return path;
  }

  PtContent* content_;
  std::map<std::pair<const std::byte*, uint64_t>, size_t> storages_;  // by address and size
  std::vector<std::variant<int64_t, py::handle>> above_;              // positions and keys that lead to the object
};

}  // namespace

py::object text_of(const std::string& text) {
  const auto size = static_cast<Py_ssize_t>(text.size());
  PyObject* made = PyUnicode_DecodeUTF8(text.data(), size, "surrogatepass");  // as Python's own pickles have them
  if (!made) {
    PyErr_Clear();
    made = PyUnicode_DecodeUTF8(text.data(), size, "backslashreplace");
  }
  if (!made) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::list texts_of(const std::vector<std::string>& texts) {
  py::list result;
  for (const std::string& text : texts) result.append(text_of(text));
  return result;
}

py::object to_python(const Value& value, const Index& index) { return std::visit(ToPython{index}, value.variant()); }

Value from_python(const py::handle& object, PtContent* content) { return FromPython(content).convert(object); }

}  // namespace shardsmith::python
