// Saving, finding and verifying checkpoints.
#include "bindings.h"
#include "checkpoint/load.h"
#include "checkpoint/save.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

using Exchange = std::function<std::vector<py::bytes>(py::bytes, double)>;

// Peers whose exchange is a Python callable.
class CallablePeers final : public Peers {
 public:
  CallablePeers(int rank, int size, Exchange exchange) : rank_(rank), size_(size), exchange_(std::move(exchange)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> exchange(const std::string& message, std::chrono::milliseconds deadline) override {
    if (size_ == 1) return {message};
    py::gil_scoped_acquire locked;
    try {
      std::vector<std::string> all;
      for (const py::bytes& one : exchange_(py::bytes(message), static_cast<double>(deadline.count()) / 1000.0))
        all.push_back(one);
      return all;
    } catch (py::error_already_set& e) {
      // Our own errors keep their kind: the save goes on to clean up behind them.
      const py::object type = py::module_::import("shardsmith.errors").attr("Error");
      if (!e.matches(type)) throw Error(ErrorKind::kPeer, e.what());
      const std::string kind = e.value().attr("kind").cast<std::string>();
      throw Error(kind == "timeout" ? ErrorKind::kTimeout : ErrorKind::kPeer, py::str(e.value()).cast<std::string>(),
                  e.value().attr("rank").cast<int>());
    }
  }

 private:
  int rank_, size_;
  Exchange exchange_;
};

template <typename T>
T item(const py::dict& dict, const char* key, T otherwise) {
  return dict.contains(key) ? dict[key].cast<T>() : otherwise;
}

Manifest manifest_of(const py::dict& dict) {
  Manifest m;
  m.step = item<int64_t>(dict, "step", 0);
  m.world_size = item(dict, "world_size", 1);
  m.pp = item(dict, "pp", 1);
  m.tp = item(dict, "tp", 1);
  m.rdp = item(dict, "rdp", 1);
  m.placement = item<std::string>(dict, "placement", "DPT");
  m.partition.first = item<std::vector<int>>(dict, "first", {});
  const auto config = item<std::string>(dict, "model_config", "");
  if (!config.empty()) m.model_config = parse_json(config, "the model's config");
  m.hf = item<std::string>(dict, "hf", "");
  return m;
}

py::object manifest_to_python(const std::optional<Manifest>& manifest) {
  if (!manifest) return py::none();
  py::dict result;
  result["format_version"] = manifest->format_version;
  result["save_id"] = manifest->save_id;
  result["tag"] = manifest->tag;
  result["step"] = manifest->step;
  result["time"] = manifest->time;
  result["world_size"] = manifest->world_size;
  result["pp"] = manifest->pp;
  result["tp"] = manifest->tp;
  result["rdp"] = manifest->rdp;
  result["placement"] = manifest->placement;
  result["first"] = manifest->partition.first;
  result["model_config"] = manifest->model_config.is_none() ? std::string() : to_json(manifest->model_config);
  result["hf"] = manifest->hf;
  return result;
}

py::dict found_to_python(const Found& found) {
  py::dict result;
  result["folder"] = found.folder;
  result["name"] = found.name;
  result["complete"] = found.complete;
  result["why_not"] = found.why_not;
  result["newest"] = found.newest;
  result["bytes"] = found.bytes;
  result["manifest"] = manifest_to_python(found.manifest);
  return result;
}

py::dict save(const std::string& path, const std::string& tag, const py::dict& manifest,
              const std::vector<std::pair<std::string, py::object>>& files, int rank, int size,
              const std::optional<Exchange>& exchange, std::optional<int> num_kept, double deadline) {
  if (size > 1 && !exchange) fail(ErrorKind::kInvalidArgument, "a save by ", size, " ranks needs an exchange");
  SaveRequest request;
  request.path = path;
  request.tag = tag;
  request.manifest = manifest_of(manifest);
  request.num_kept_partial_checkpoints = num_kept;
  request.deadline = std::chrono::milliseconds(static_cast<int64_t>(deadline * 1000));
  for (const auto& [name, tree] : files) {
    SaveFile file{name, {}};
    file.content.value = from_python(tree, &file.content);
    request.files.push_back(std::move(file));
  }
  CallablePeers peers(rank, size, exchange.value_or(Exchange()));
  SaveResult saved;
  {
    py::gil_scoped_release unlocked;
    saved = save_partial(local_storage(), peers, request);
  }
  py::dict result;
  result["folder"] = saved.folder;
  result["bytes"] = saved.bytes;
  result["pruned"] = saved.pruned;
  return result;
}

Leaf make_leaf(const std::string& dtype, uintptr_t storage, uint64_t storage_size, int64_t offset, const Shape& size,
               const Strides& strides, bool requires_grad, const std::string& name, const Shape& global,
               const Shape& box_offset) {
  const std::optional<Dtype> known = dtype_from_torch(dtype);
  if (!known) fail(ErrorKind::kUnsupported, "a tensor of dtype ", dtype, " can't be saved");
  Leaf leaf;
  leaf.tensor.dtype = *known;
  leaf.tensor.offset = offset;
  leaf.tensor.size = size;
  leaf.tensor.strides = strides;
  leaf.tensor.requires_grad = requires_grad;
  leaf.tensor.name = name;
  leaf.tensor.global = name.empty() ? Shape{} : global;
  leaf.tensor.box = name.empty() ? Box{} : Box{box_offset, size};
  leaf.storage = reinterpret_cast<const std::byte*>(storage);
  leaf.storage_size = storage_size;
  return leaf;
}

}  // namespace

void bind_checkpoint(py::module_& m) {
  py::class_<Leaf>(m, "Leaf").def(py::init(&make_leaf), py::arg("dtype"), py::arg("storage_ptr"),
                                  py::arg("storage_nbytes"), py::arg("offset"), py::arg("size"), py::arg("strides"),
                                  py::arg("requires_grad") = false, py::arg("name") = "",
                                  py::arg("global_shape") = Shape{}, py::arg("box_offset") = Shape{});
  m.def("save_partial", &save, py::arg("path"), py::arg("tag"), py::arg("manifest"), py::arg("files"), py::arg("rank"),
        py::arg("size"), py::arg("exchange") = py::none(), py::arg("num_kept") = py::none(),
        py::arg("deadline") = 300.0);
  m.def("scan", [](const std::string& path) {
    py::list result;
    for (const Found& found : scan(local_storage(), path))
      if (found.kind == CheckpointKind::kPartial) result.append(found_to_python(found));
    return result;
  });
  m.def("scan_full", [](const std::string& path) {
    py::list result;
    for (const Found& found : scan(local_storage(), path))
      if (found.kind == CheckpointKind::kFull) result.append(found_to_python(found));
    return result;
  });
  m.def("write_values", [](const std::string& path, const py::object& tree) {
    PtContent content;
    content.value = from_python(tree, &content);
    py::gil_scoped_release unlocked;
    write_pt(local_storage(), path, content);
  });
  m.def(
      "find_checkpoint",
      [](const std::string& path, const std::string& tag) {
        std::vector<std::string> passed_over;
        const std::optional<Found> found = find_checkpoint(local_storage(), path, tag, &passed_over);
        return py::make_tuple(found ? py::object(found_to_python(*found)) : py::object(py::none()), passed_over);
      },
      py::arg("path"), py::arg("tag") = "");
  m.def(
      "verify_partial",
      [](const std::string& folder) {
        return verify_partial(local_storage(), folder, read_manifest(local_storage(), folder));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def("check_same_model", [](const std::string& path, const std::string& config_json) {
    check_same_model(local_storage(), path, parse_json(config_json, "the model's config"));
  });
}

}  // namespace shardsmith::python
