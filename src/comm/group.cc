#include "comm/group.h"

#include "base/error.h"

namespace shardsmith {
namespace {

// Runs a call of torch's; what it throws becomes an Error that says what was being done. torch's messages run over
// several lines with a C++ stack; people need the first.
template <typename F>
auto named(const std::string& what, const F& call) {
  try {
    return call();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    const std::string text = e.what();
    fail(ErrorKind::kPeer, what, ": ", text.substr(0, text.find('\n')));
  }
}

}  // namespace

at::Tensor Pending::wait() {
  const c10::intrusive_ptr<c10d::Work> work = std::move(work_);
  if (work) named(what_, [&] { return work->wait(timeout_); });
  input_ = at::Tensor();
  return std::move(tensor_);
}

Group::Group(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string name, std::chrono::milliseconds timeout)
    : group_(std::move(group)), name_(std::move(name)), timeout_(timeout) {}

int Group::rank() const { return group_->getRank(); }
int Group::size() const { return group_->getSize(); }
c10d::Backend& Group::backend_of(const at::Tensor& tensor) const { return *group_->getBackend(tensor.device().type()); }

template <typename F>
Pending Group::issue(const std::string& what, const at::Tensor& tensor, const F& start) {
  std::vector<at::Tensor> tensors{tensor};
  const auto work = named(what, [&] { return start(backend_of(tensor), tensors); });
  return Pending(work, tensor, what, timeout_);
}

Pending Group::send(const at::Tensor& tensor, int to, int tag) {
  return issue(
      str("sending to rank ", to, " of the ", name_), tensor,
      [&](c10d::Backend& backend, std::vector<at::Tensor>& tensors) { return backend.send(tensors, to, tag); });
}

Pending Group::receive(at::Tensor tensor, int from, int tag) {
  return issue(
      str("receiving from rank ", from, " of the ", name_), tensor,
      [&](c10d::Backend& backend, std::vector<at::Tensor>& tensors) { return backend.recv(tensors, from, tag); });
}

Pending Group::all_reduce_sum(at::Tensor tensor) {
  c10d::AllreduceOptions options;
  options.timeout = timeout_;
  return issue(str("summing over the ", name_), tensor, [&](c10d::Backend& backend, std::vector<at::Tensor>& tensors) {
    return backend.allreduce(tensors, options);
  });
}

Pending Group::all_gather(const at::Tensor& tensor) {
  std::vector<int64_t> shape = tensor.sizes().vec();
  shape.insert(shape.begin(), size());
  at::Tensor all = at::empty(shape, tensor.options());
  at::Tensor own = tensor.contiguous();
  c10d::AllgatherOptions options;
  options.timeout = timeout_;
  const std::string what = str("gathering over the ", name_);
  // gloo compares the shapes of the input and of a share of the output.
  at::Tensor output = all.view(-1), input = own.view(-1);
  auto work = named(what, [&] { return backend_of(tensor)._allgather_base(output, input, options); });
  return Pending(std::move(work), all, own, what, timeout_);
}

Pending Group::reduce_scatter_sum(const at::Tensor& tensor) {
  at::Tensor parts = tensor.contiguous();
  at::Tensor own = at::empty(tensor.sizes().slice(1), tensor.options());
  c10d::ReduceScatterOptions options;
  options.reduceOp = c10d::ReduceOp::SUM;
  options.timeout = timeout_;
  const std::string what = str("summing over the ", name_);
  at::Tensor output = own.view(-1), input = parts.view(-1);
  auto work = named(what, [&] { return backend_of(tensor)._reduce_scatter_base(output, input, options); });
  return Pending(std::move(work), own, parts, what, timeout_);
}

Pending Group::broadcast(at::Tensor tensor, int root) {
  c10d::BroadcastOptions options;
  options.rootRank = root;
  options.timeout = timeout_;
  return issue(
      str("broadcast from rank ", root, " of the ", name_), tensor,
      [&](c10d::Backend& backend, std::vector<at::Tensor>& tensors) { return backend.broadcast(tensors, options); });
}

}  // namespace shardsmith
