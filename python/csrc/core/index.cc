// Readers, and moving an Index's bytes into memory.
#include "bindings.h"
#include "checkpoint/load.h"
#include "checkpoint/save_steps.h"
#include "cli/resume.h"
#include "family/family.h"
#include "format/detect.h"
#include "format/hf.h"
#include "layout/plan.h"
#include "storage/large_pages.h"
#include "storage/shared_reads.h"
#include "storage/transfer.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

// name, dtype, global shape, box offset, box extent, address, bytes, strides in elements
using WantTuple = std::tuple<std::string, std::string, Shape, Shape, Shape, uintptr_t, uint64_t, Strides>;

// All pieces of parameters. Each has the first of these names that the index has; where it has none, the last one, or
// nothing is read where they may be missing.
using WantedParameters = std::tuple<const RankModel*, std::vector<ParameterMemory>, std::vector<std::string>, bool>;

const TensorEntry& entry(const Index& index, const std::string& name) {
  const TensorEntry* found = index.find(name);
  if (!found) fail(ErrorKind::kInvalidArgument, "there is no tensor '", name, "'");
  return *found;
}

// What is to be read of an index, and where to. Points into the index and at the memory that the wants name.
class Reading {
 public:
  Reading(const Index& index, const std::vector<WantTuple>& wants, const std::vector<WantedParameters>& parameters,
          const std::string& where)
      : index_(index) {
    Target target;
    for (const auto& [name, dtype, shape, offset, extent, address, size, strides] : wants)
      add(target, {name, dtype_of(dtype), shape, {offset, extent}, 0, 0, strides},
          reinterpret_cast<std::byte*>(address), size);
    for (const WantedParameters& some : parameters) add(target, some);
    plan_ = make_plan(index, target);
    require_complete(plan_, where);
  }

  std::string announcement() const { return SharedReads::announce(plan_, index_, host_identity()); }

  // `announcements`: of all ranks, by rank; empty: nobody else reads.
  void run(const std::vector<std::string>& announcements, int rank) const {
    std::optional<SharedReads> shared;
    if (!announcements.empty()) shared.emplace(announcements, rank);
    for (const Destination& destination : destinations_) prefer_large_pages(destination.bytes);
    TransferOptions options;
    options.shared = shared ? &*shared : nullptr;
    execute(plan_, index_, destinations_, local_storage(), options);
  }

 private:
  void add(Target& target, Want want, std::byte* memory, uint64_t size) {
    want.buffer = static_cast<uint32_t>(destinations_.size());
    target.wants.push_back(std::move(want));
    destinations_.push_back({{memory, static_cast<size_t>(size)}});
  }

  void add(Target& target, const WantedParameters& wanted) {
    const auto& [model, parameters, texts, may_be_missing] = wanted;
    const std::vector<NamePattern> patterns(texts.begin(), texts.end());
    for (const ParameterMemory& parameter : parameters) {
      for (const RankPiece& piece : rank_pieces(*model, std::get<0>(parameter))) {
        std::string name;
        bool is_there = false;
        for (size_t i = 0; i < patterns.size() && !is_there; ++i) {
          name = patterns[i].of(piece.piece.name);
          is_there = index_.find(name) != nullptr;
        }
        if (!is_there && may_be_missing) continue;
        PieceMemory memory(parameter, piece.piece);
        const uint64_t begin = static_cast<uint64_t>(memory.offset) * static_cast<uint64_t>(size_of(memory.dtype));
        add(target, {std::move(name), memory.dtype, piece.whole, piece.box, 0, 0, std::move(memory.strides)},
            memory.storage + begin, memory.storage_size - begin);
      }
    }
  }

  const Index& index_;
  std::vector<Destination> destinations_;
  Plan plan_;
};

py::list names_of(const Index& index) {
  py::list names;
  for (const TensorEntry& tensor : index.tensors) names.append(text_of(tensor.name));
  return names;
}

// In our names; tensors that the model doesn't have are listed in values["unexpected"].
Index logical(const Index& hf, const FamilyModel& model) {
  std::vector<std::string> unexpected;
  Index result = to_logical(hf, model, &unexpected);
  result.values = None{};
  result.values.set("unexpected", List(unexpected.begin(), unexpected.end()));
  return result;
}

}  // namespace

Dtype dtype_of(const std::string& torch_word) {
  const std::optional<Dtype> dtype = dtype_from_torch(torch_word);
  if (!dtype) fail(ErrorKind::kUnsupported, "tensors of dtype '", torch_word, "' can't be held by a checkpoint");
  return *dtype;
}

void bind_index(py::module_& m) {
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  py::class_<TensorName>(m, "TensorName")
      .def(py::init<std::string>())
      .def_readonly("name", &TensorName::name)
      .def("__repr__", [](const TensorName& t) { return "TensorName('" + t.name + "')"; });
  py::class_<Opaque>(m, "Opaque")
      .def(py::init([](std::string class_name) {
             return Opaque{std::move(class_name), {}};
           }),
           py::arg("class_name"))
      .def_readonly("class_name", &Opaque::class_name)
      .def_property_readonly("state",
                             [](const Opaque& o) {
                               py::list result;
                               for (const Value& v : o.state) result.append(to_python(v, Index{}));
                               return result;
                             })
      .def("__repr__", [](const Opaque& o) { return "<stand-in for a " + o.class_name + ">"; });
  py::class_<Index>(m, "Index")
      .def_readonly("format", &Index::format)
      .def_property_readonly("values", [](const Index& index) { return to_python(index.values, index); })
      .def("value",
           [](const Index& index, const std::string& key) -> py::object {
             const Value* value = index.values.find(key);
             return value ? to_python(*value, index) : py::none();
           })
      .def("names", &names_of)
      .def("shape", [](const Index& index, const std::string& name) { return entry(index, name).shape; })
      .def("dtype",
           [](const Index& index, const std::string& name) { return std::string(to_string(entry(index, name).dtype)); })
      .def("place",
           [](const Index& index, const std::string& name) -> std::optional<std::tuple<uint32_t, uint64_t, Strides>> {
             const TensorEntry* stored = stored_entry(index, entry(index, name));
             if (!stored || stored->slices.size() != 1 || stored->slices[0].encoding != Encoding::kRaw) return {};
             return std::tuple{stored->slices[0].file, stored->slices[0].offset, stored->slices[0].strides};
           })
      .def("alias_of", [](const Index& index, const std::string& name) { return entry(index, name).alias_of; })
      .def(
          "prepare",
          [](const Index& index, const std::vector<WantTuple>& wants, const std::string& where,
             const std::vector<WantedParameters>& parameters) {
            return std::make_unique<Reading>(index, wants, parameters, where);
          },
          py::arg("wants"), py::arg("where") = "", py::arg("parameters") = std::vector<WantedParameters>(),
          py::keep_alive<0, 1>(), Unlocked());
  py::class_<Reading>(m, "Reading")
      .def("announcement", [](const Reading& reading) { return py::bytes(reading.announcement()); })
      .def("run", &Reading::run, py::arg("announcements") = std::vector<std::string>(), py::arg("rank") = 0,
           Unlocked());

  m.def(
      "read_hf", [](const std::string& folder) { return read_hf(local_storage(), folder); }, Unlocked());
  m.def(
      "read_hf_logical",
      [](const std::string& folder, const RankModel& model) {
        return logical(read_hf(local_storage(), folder), model.whole);
      },
      Unlocked());
  m.def(
      "read_pt", [](const std::string& path) { return read_pt(local_storage(), path); }, Unlocked());
  m.def(
      "open_as_is", [](const std::string& path) { return cli::open_source(local_storage(), path).index; }, Unlocked());
  m.def(
      "open_for_resume",
      [](const std::string& path, const RankModel& model, const std::vector<std::string>& parameters) {
        cli::ResumeSource source;
        {
          py::gil_scoped_release unlocked;
          source = cli::open_for_resume(local_storage(), path, model.whole, parameters);
        }
        py::dict told;
        told["format"] = source.format;
        told["missing"] = source.names.missing;
        told["unexpected"] = texts_of(source.names.unexpected);
        py::list renamed;
        for (const auto& [before, after] : source.names.renamed) renamed.append(py::make_tuple(text_of(before), after));
        told["renamed"] = renamed;
        told["left_out"] = texts_of(source.left_out);
        return py::make_tuple(std::move(source.index), told);
      },
      py::arg("path"), py::arg("model"), py::arg("parameters") = std::vector<std::string>());
  m.def(
      "read_partial",
      [](const std::string& folder) {
        return read_partial(local_storage(), folder, read_manifest(local_storage(), folder));
      },
      Unlocked());
  m.def(
      "detect_format", [](const std::string& path) { return detect_format(local_storage(), path); }, Unlocked());
}

}  // namespace shardsmith::python
