// Saving checkpoints, at once and in the background.
#include <set>

#include "bindings.h"
#include "checkpoint/background_save.h"
#include "checkpoint/save.h"
#include "checkpoint/save_full.h"

namespace py = pybind11;

namespace shardsmith::python {
namespace {

using Exchange = std::function<std::vector<py::bytes>(py::bytes, double)>;

double seconds_of(std::chrono::milliseconds time) { return static_cast<double>(time.count()) / 1000.0; }

// Calls into Python, from any thread. Our own errors keep their kind: the save goes on to clean up behind them.
template <typename Call>
auto called(const Call& call) {
  const py::gil_scoped_acquire locked;
  try {
    return call();
  } catch (py::error_already_set& e) {
    const py::object type = py::module_::import("shardsmith.errors").attr("Error");
    if (!e.matches(type)) throw Error(ErrorKind::kPeer, e.what());
    const std::string kind = e.value().attr("kind").cast<std::string>();
    throw Error(kind == "timeout" ? ErrorKind::kTimeout : ErrorKind::kPeer, py::str(e.value()).cast<std::string>(),
                e.value().attr("rank").cast<int>());
  }
}

// Peers whose exchange is a Python callable.
class CallablePeers final : public Peers {
 public:
  CallablePeers(int rank, int size, Exchange exchange) : rank_(rank), size_(size), exchange_(std::move(exchange)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::string> exchange(const std::string& message, std::chrono::milliseconds deadline) override {
    if (size_ == 1) return {message};
    return called([&] {
      std::vector<std::string> all;
      for (const py::bytes& one : exchange_(py::bytes(message), seconds_of(deadline))) all.push_back(one);
      return all;
    });
  }

 private:
  int rank_, size_;
  Exchange exchange_;
};

// (rank, address, bytes), to send and to receive, and seconds.
using Message = std::tuple<int, uintptr_t, uint64_t>;
using Move = std::function<void(std::vector<Message>, std::vector<Message>, double)>;

// A transport that is a Python callable.
class CallableTransport final : public Transport {
 public:
  explicit CallableTransport(Move move) : move_(std::move(move)) {}
  void move(std::span<const Outgoing> out, std::span<const Incoming> in, std::chrono::milliseconds deadline) override {
    std::vector<Message> sent, received;
    for (const Outgoing& o : out) sent.emplace_back(o.to, reinterpret_cast<uintptr_t>(o.bytes.data()), o.bytes.size());
    for (const Incoming& i : in)
      received.emplace_back(i.from, reinterpret_cast<uintptr_t>(i.bytes.data()), i.bytes.size());
    called([&] { move_(std::move(sent), std::move(received), seconds_of(deadline)); });
  }

 private:
  Move move_;
};

std::unique_ptr<Peers> peers_of(int rank, int size, const std::optional<Exchange>& exchange) {
  if (size > 1 && !exchange) fail(ErrorKind::kInvalidArgument, "a save by ", size, " ranks needs an exchange");
  return std::make_unique<CallablePeers>(rank, size, exchange.value_or(Exchange()));
}

std::unique_ptr<Transport> transport_of(const std::optional<Move>& move) {
  return move ? std::make_unique<CallableTransport>(*move) : nullptr;
}

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

std::chrono::milliseconds milliseconds_of(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

SaveRequest partial_request(const std::string& path, const std::string& tag, const py::dict& manifest,
                            const std::vector<std::pair<std::string, py::object>>& files, std::optional<int> num_kept,
                            double deadline, const std::set<std::string>& shared) {
  SaveRequest request;
  request.path = path;
  request.tag = tag;
  request.manifest = manifest_of(manifest);
  request.num_kept_partial_checkpoints = num_kept;
  request.deadline = milliseconds_of(deadline);
  for (const auto& [name, tree] : files) {
    SaveFile file{name, {}, shared.count(name) > 0};
    file.content.value = from_python(tree, &file.content);
    request.files.push_back(std::move(file));
  }
  return request;
}

FullRequest full_request(const std::string& path, const std::string& tag, const py::dict& manifest,
                         const py::object& weights, const py::object& optimizer, const py::object& user_content,
                         bool translate, std::optional<int> num_kept, double deadline) {
  FullRequest request;
  request.path = path;
  request.tag = tag;
  request.manifest = manifest_of(manifest);
  request.translate = translate;
  request.num_kept_partial_checkpoints = num_kept;
  request.deadline = milliseconds_of(deadline);
  const auto fill = [](std::optional<PtContent>& content, const py::object& tree) {
    if (tree.is_none()) return;
    content.emplace();
    content->value = from_python(tree, &*content);
  };
  fill(request.weights, weights);
  fill(request.optimizer, optimizer);
  fill(request.user_content, user_content);
  return request;
}

py::dict result_to_python(const SaveResult& saved) {
  py::dict result;
  result["folder"] = saved.folder;
  result["bytes"] = saved.bytes;
  result["pruned"] = saved.pruned;
  result["warnings"] = saved.warnings;
  return result;
}

py::object result_to_python(const std::optional<SaveResult>& saved) {
  return saved ? py::object(result_to_python(*saved)) : py::object(py::none());
}

py::dict save_partial_now(const SaveRequest& request, int rank, int size, const std::optional<Exchange>& exchange) {
  const std::unique_ptr<Peers> peers = peers_of(rank, size, exchange);
  SaveResult saved;
  {
    py::gil_scoped_release unlocked;
    saved = save_partial(local_storage(), *peers, request);
  }
  return result_to_python(saved);
}

py::dict save_full_now(const FullRequest& request, int rank, int size, const std::optional<Exchange>& exchange,
                       const std::optional<Move>& move) {
  const std::unique_ptr<Peers> peers = peers_of(rank, size, exchange);
  const std::unique_ptr<Transport> transport = transport_of(move);
  SaveResult saved;
  {
    py::gil_scoped_release unlocked;
    saved = save_full(local_storage(), *peers, transport.get(), request);
  }
  return result_to_python(saved);
}

// BackgroundSave for Python: its thread calls Python, so it is never waited for with the interpreter locked.
class Saver {
 public:
  Saver(int rank, int size, const std::optional<Exchange>& foreground, const std::optional<Exchange>& background,
        const std::optional<Move>& move)
      : foreground_(peers_of(rank, size, foreground)),
        save_(std::make_unique<BackgroundSave>(local_storage(), peers_of(rank, size, background), transport_of(move))) {
  }
  ~Saver() {
    py::gil_scoped_release unlocked;
    save_.reset();
  }

  template <typename Request>
  bool begin(Request request, bool skip_if_busy, const py::object& check) {
    py::gil_scoped_release unlocked;
    return save_->begin(*foreground_, std::move(request), skip_if_busy ? IfBusy::kSkip : IfBusy::kWait, [&] {
      if (check.is_none()) return;
      const std::string text = called([&] { return check().cast<std::string>(); });
      if (!text.empty()) fail(ErrorKind::kInvalidArgument, text);
    });
  }
  py::object wait() {
    return result_of([&] { return save_->wait(); });
  }
  py::object close() {
    return result_of([&] { return save_->close(); });
  }
  bool is_idle_within(double seconds) {
    py::gil_scoped_release unlocked;
    return save_->is_idle_within(milliseconds_of(seconds));
  }
  uint64_t memory() const { return save_->memory(); }

 private:
  py::object result_of(const std::function<std::optional<SaveResult>()>& work) {
    std::optional<SaveResult> result;
    {
      py::gil_scoped_release unlocked;
      result = work();
    }
    return result_to_python(result);
  }

  std::unique_ptr<Peers> foreground_;
  std::unique_ptr<BackgroundSave> save_;
};

Leaf make_leaf(const std::string& dtype, uintptr_t storage, uint64_t storage_size, int64_t offset, const Shape& size,
               const Strides& strides, bool requires_grad, const std::string& name, const Shape& global,
               const Shape& box_offset) {
  Leaf leaf;
  leaf.tensor.dtype = dtype_of(dtype);
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

void bind_saving(py::module_& m) {
  py::class_<Leaf>(m, "Leaf").def(py::init(&make_leaf), py::arg("dtype"), py::arg("storage_ptr"),
                                  py::arg("storage_nbytes"), py::arg("offset"), py::arg("size"), py::arg("strides"),
                                  py::arg("requires_grad") = false, py::arg("name") = "",
                                  py::arg("global_shape") = Shape{}, py::arg("box_offset") = Shape{});
  py::class_<SaveRequest>(m, "PartialRequest")
      .def(py::init(&partial_request), py::arg("path"), py::arg("tag"), py::arg("manifest"), py::arg("files"),
           py::arg("num_kept") = py::none(), py::arg("deadline") = 300.0, py::arg("shared") = std::set<std::string>())
      .def_property_readonly("snapshot_bytes", [](const SaveRequest& r) { return BackgroundSave::memory_for(r); });
  py::class_<FullRequest>(m, "FullRequest")
      .def(py::init(&full_request), py::arg("path"), py::arg("tag"), py::arg("manifest"),
           py::arg("weights") = py::none(), py::arg("optimizer") = py::none(), py::arg("user_content") = py::none(),
           py::arg("translate") = true, py::arg("num_kept") = py::none(), py::arg("deadline") = 300.0)
      .def_property_readonly("snapshot_bytes", [](const FullRequest& r) { return BackgroundSave::memory_for(r); });
  m.def("save_partial", &save_partial_now, py::arg("request"), py::arg("rank") = 0, py::arg("size") = 1,
        py::arg("exchange") = py::none());
  m.def("save_full", &save_full_now, py::arg("request"), py::arg("rank") = 0, py::arg("size") = 1,
        py::arg("exchange") = py::none(), py::arg("move") = py::none());
  py::class_<Saver>(m, "BackgroundSave")
      .def(py::init<int, int, const std::optional<Exchange>&, const std::optional<Exchange>&,
                    const std::optional<Move>&>(),
           py::arg("rank") = 0, py::arg("size") = 1, py::arg("foreground") = py::none(),
           py::arg("background") = py::none(), py::arg("move") = py::none())
      .def("begin", &Saver::begin<SaveRequest>, py::arg("request"), py::arg("skip_if_busy") = false,
           py::arg("check") = py::none())
      .def("begin", &Saver::begin<FullRequest>, py::arg("request"), py::arg("skip_if_busy") = false,
           py::arg("check") = py::none())
      .def("wait", &Saver::wait)
      .def("close", &Saver::close)
      .def("is_idle_within", &Saver::is_idle_within, py::arg("seconds"))
      .def_property_readonly("memory", &Saver::memory);
}

}  // namespace shardsmith::python
