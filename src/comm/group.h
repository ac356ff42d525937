// A process group as the engine uses it: tensors only, with deadlines, tags and errors that name a rank.
// One issuing thread at a time a group; waiting may happen on any thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace shardsmith {

// A transfer under way. Keeps the tensor alive. Movable; wait() at most once, the destructor does not wait.
class Pending {
 public:
  Pending() = default;
  Pending(c10::intrusive_ptr<c10d::Work> work, at::Tensor tensor, std::string what, std::chrono::milliseconds timeout)
      : work_(std::move(work)), tensor_(std::move(tensor)), what_(std::move(what)), timeout_(timeout) {}
  // `input` is kept until the wait, too.
  Pending(c10::intrusive_ptr<c10d::Work> work, at::Tensor tensor, at::Tensor input, std::string what,
          std::chrono::milliseconds timeout)
      : Pending(std::move(work), std::move(tensor), std::move(what), timeout) {
    input_ = std::move(input);
  }
  explicit operator bool() const { return work_ != nullptr; }
  // Throws Error(kPeer) that says what was being waited for.
  at::Tensor wait();

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  at::Tensor tensor_, input_;
  std::string what_;
  std::chrono::milliseconds timeout_{0};
};

class Group {
 public:
  // `name` is for messages: "pipeline group".
  Group(c10::intrusive_ptr<c10d::ProcessGroup> group, std::string name, std::chrono::milliseconds timeout);
  int rank() const;
  int size() const;

  // Ranks are the group's own. Tags are >= 0. Tensors must be dense and stay unchanged until waited for.
  Pending send(const at::Tensor& tensor, int to, int tag);
  Pending receive(at::Tensor tensor, int from, int tag);
  Pending all_reduce_sum(at::Tensor tensor);
  // Every rank's `tensor` (of one shape): [size, ...], by rank.
  Pending all_gather(const at::Tensor& tensor);
  // `tensor` [size, ...]: the sum over the ranks of its element `rank`.
  Pending reduce_scatter_sum(const at::Tensor& tensor);
  Pending broadcast(at::Tensor tensor, int root);

 private:
  c10d::Backend& backend_of(const at::Tensor& tensor) const;
  template <typename F>
  Pending issue(const std::string& what, const at::Tensor& tensor, const F& start);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::string name_;
  std::chrono::milliseconds timeout_;
};

}  // namespace shardsmith
