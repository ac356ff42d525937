// A look at what a pickle made without copying it: the metadata of a large distributed checkpoint are millions of
// objects.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "format/pickle_machine.h"

namespace shardsmith {

// One object. A null view stands for what is not there. The machine must outlive it.
class PickleView {
 public:
  PickleView() = default;
  PickleView(const pickle::Machine& machine, pickle::Id id) : machine_(&machine), id_(id) {}

  explicit operator bool() const { return machine_ != nullptr; }
  bool is_none() const { return is(pickle::Kind::kScalar) && node().scalar.is_none(); }
  bool is_dict() const { return is(pickle::Kind::kDict); }
  bool is_list() const { return is(pickle::Kind::kList) || is(pickle::Kind::kTuple); }
  bool is_tuple() const { return is(pickle::Kind::kTuple); }
  template <typename T>
  const T* get_if() const {
    return is(pickle::Kind::kScalar) ? node().scalar.get_if<T>() : nullptr;
  }

  // Of a list or tuple; of a dict, its keys and values in turn. Zero for all else.
  size_t size() const { return is_list() || is_dict() ? node().items.size() : 0; }
  PickleView operator[](size_t i) const { return {*machine_, node().items[i]}; }
  // The value under a text key of a dict; the last one, should it stand there twice, as in Python.
  PickleView find(std::string_view key) const {
    if (!is_dict()) return {};
    for (size_t i = size(); i >= 2; i -= 2) {
      const std::string* name = (*this)[i - 2].get_if<std::string>();
      if (name && *name == key) return (*this)[i - 1];
    }
    return {};
  }

  // Of an object that is known by its class: the class's own name, without the module; "" for all else.
  std::string_view class_name() const {
    if (!is(pickle::Kind::kOpaque)) return {};
    const std::string_view full = *node().scalar.get_if<std::string>();
    return full.substr(full.rfind('.') + 1);
  }
  // The last thing that the pickle said of such an object: its attributes.
  PickleView state() const {
    if (!is(pickle::Kind::kOpaque) || node().items.empty()) return {};
    return {*machine_, node().items.back()};
  }

 private:
  bool is(pickle::Kind kind) const { return machine_ && node().kind == kind; }
  const pickle::Node& node() const { return machine_->node(id_); }

  const pickle::Machine* machine_ = nullptr;
  pickle::Id id_ = 0;
};

}  // namespace shardsmith
