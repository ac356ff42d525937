#include "comm/group.h"

#include "base/error.h"

namespace shardsmith {
namespace {

// torch's messages run over several lines with a C++ stack; people need the first.
std::string first_line(const char* what) {
  std::string text(what);
  return text.substr(0, text.find('\n'));
}

}  // namespace

at::Tensor Pending::wait() {
  const c10::intrusive_ptr<c10d::Work> work = std::move(work_);
  try {
    if (work) work->wait(timeout_);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    fail(ErrorKind::kPeer, what_, ": ", first_line(e.what()));
  }
  return std::move(tensor_);
}

Group::Group(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string name, std::chrono::milliseconds timeout)
    : group_(std::move(group)), name_(std::move(name)), timeout_(timeout) {}

int Group::rank() const { return group_->getRank(); }
int Group::size() const { return group_->getSize(); }

c10d::Backend& Group::backend(const at::Tensor& tensor) { return *group_->getBackend(tensor.device().type()); }

Pending Group::send(const at::Tensor& tensor, int to, int tag) {
  const std::string what = str("sending to rank ", to, " of the ", name_);
  try {
    std::vector<at::Tensor> tensors{tensor};
    return Pending(backend(tensor).send(tensors, to, tag), tensor, what, timeout_);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    fail(ErrorKind::kPeer, what, ": ", first_line(e.what()));
  }
}

Pending Group::receive(at::Tensor tensor, int from, int tag) {
  const std::string what = str("receiving from rank ", from, " of the ", name_);
  try {
    std::vector<at::Tensor> tensors{tensor};
    return Pending(backend(tensor).recv(tensors, from, tag), tensor, what, timeout_);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    fail(ErrorKind::kPeer, what, ": ", first_line(e.what()));
  }
}

Pending Group::all_reduce_sum(at::Tensor tensor) {
  const std::string what = str("summing over the ", name_);
  try {
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.timeout = timeout_;
    return Pending(backend(tensor).allreduce(tensors, options), tensor, what, timeout_);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    fail(ErrorKind::kPeer, what, ": ", first_line(e.what()));
  }
}

Pending Group::broadcast(at::Tensor tensor, int root) {
  const std::string what = str("broadcast from rank ", root, " of the ", name_);
  try {
    std::vector<at::Tensor> tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.timeout = timeout_;
    return Pending(backend(tensor).broadcast(tensors, options), tensor, what, timeout_);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    fail(ErrorKind::kPeer, what, ": ", first_line(e.what()));
  }
}

}  // namespace shardsmith
