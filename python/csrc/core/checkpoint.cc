// Finding and verifying checkpoints.
#include "bindings.h"
#include "checkpoint/load.h"
#include "checkpoint/save.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

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
  result["kind"] = found.kind == CheckpointKind::kFull ? "full" : "partial";
  result["folder"] = found.folder;
  result["name"] = found.name;
  result["complete"] = found.complete;
  result["why_not"] = found.why_not;
  result["newest"] = found.newest;
  result["bytes"] = found.bytes;
  result["manifest"] = manifest_to_python(found.manifest);
  return result;
}

}  // namespace

void bind_checkpoint(py::module_& m) {
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
      [](const std::string& path, const std::string& tag, bool full) {
        std::vector<std::string> passed_over;
        const CheckpointKind kind = full ? CheckpointKind::kFull : CheckpointKind::kPartial;
        const std::optional<Found> found = find_checkpoint(local_storage(), path, tag, &passed_over, kind);
        return py::make_tuple(found ? py::object(found_to_python(*found)) : py::object(py::none()), passed_over);
      },
      py::arg("path"), py::arg("tag") = "", py::arg("full") = false);
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
