#include "comm/thread_world.h"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "base/error.h"

namespace shardsmith {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

std::span<std::byte> bytes_of(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.is_contiguous() && tensor.device().is_cpu(), "thread ranks take dense CPU tensors");
  return {static_cast<std::byte*>(tensor.data_ptr()), static_cast<size_t>(tensor.nbytes())};
}

// What remains to be done when wait() is called, on the waiting thread.
class ThreadWork final : public c10d::Work {
 public:
  explicit ThreadWork(std::function<void(steady_clock::time_point)> finish) : finish_(std::move(finish)) {}
  bool isCompleted() override { return !finish_; }
  bool wait(milliseconds timeout) override {
    if (timeout == milliseconds::zero()) timeout = std::chrono::minutes(5);
    if (finish_) std::exchange(finish_, nullptr)(steady_clock::now() + timeout);
    return true;
  }

 private:
  std::function<void(steady_clock::time_point)> finish_;
};

void sum(const at::Tensor& like, std::vector<std::span<std::byte>>& all) {
  // In rank order, so that the result doesn't depend on who came last.
  const auto view = [&](std::span<std::byte> bytes) {
    return at::from_blob(bytes.data(), like.sizes(), like.options());
  };
  at::Tensor total = view(all[0]).clone();
  for (size_t r = 1; r < all.size(); ++r) total.add_(view(all[r]));
  for (const std::span<std::byte>& bytes : all) view(bytes).copy_(total);
}

class ThreadBackend final : public c10d::Backend {
 public:
  ThreadBackend(std::shared_ptr<Rendezvous> rendezvous, int rank, int size)
      : Backend(rank, size), rendezvous_(std::move(rendezvous)) {}
  const std::string getBackendName() const override { return "shardsmith-threads"; }

  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    rendezvous_->send(rank_, to, static_cast<uint64_t>(tag), bytes_of(tensors.at(0)));
    return c10::make_intrusive<ThreadWork>(nullptr);
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return c10::make_intrusive<ThreadWork>([this, tensor = tensors.at(0), from, tag](auto deadline) {
      rendezvous_->receive(from, rank_, static_cast<uint64_t>(tag), bytes_of(tensor), deadline);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "thread ranks sum only");
    return c10::make_intrusive<ThreadWork>([this, tensor = tensors.at(0)](auto deadline) {
      rendezvous_->collective(
          rank_, bytes_of(tensor), [&](auto& all) { sum(tensor, all); }, deadline);
    });
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override {
    return c10::make_intrusive<ThreadWork>([this, tensor = tensors.at(0), root = options.rootRank](auto deadline) {
      const auto spread = [&](std::vector<std::span<std::byte>>& all) {
        const std::span<std::byte> from = all[static_cast<size_t>(root)];
        for (const std::span<std::byte>& to : all)
          if (to.data() != from.data()) std::copy(from.begin(), from.end(), to.begin());
      };
      rendezvous_->collective(rank_, bytes_of(tensor), spread, deadline);
    });
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions&) override {
    const auto size = static_cast<size_t>(input.nbytes());
    return c10::make_intrusive<ThreadWork>([this, output, input, size](auto deadline) {
      at::NoGradGuard no_grad;
      output.view({getSize(), -1}).select(0, rank_).copy_(input.reshape({-1}));
      const auto spread = [&](std::vector<std::span<std::byte>>& all) {
        for (size_t r = 0; r < all.size(); ++r) {
          const std::span<std::byte> own = all[r].subspan(r * size, size);
          for (size_t to = 0; to < all.size(); ++to)
            if (to != r) std::copy(own.begin(), own.end(), all[to].begin() + static_cast<std::ptrdiff_t>(r * size));
        }
      };
      rendezvous_->collective(rank_, bytes_of(output), spread, deadline);
    });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(options.reduceOp == c10d::ReduceOp::SUM, "thread ranks sum only");
    return c10::make_intrusive<ThreadWork>([this, output, input](auto deadline) {
      at::NoGradGuard no_grad;
      const at::Tensor parts = input.clone();
      rendezvous_->collective(
          rank_, bytes_of(parts), [&](auto& all) { sum(parts, all); }, deadline);
      output.copy_(parts.view({getSize(), -1}).select(0, rank_).view(output.sizes()));
    });
  }

 private:
  std::shared_ptr<Rendezvous> rendezvous_;
};

}  // namespace

ThreadWorld make_thread_world(int size) {
  ThreadWorld world;
  world.rendezvous = std::make_shared<Rendezvous>(size);
  auto store = c10::make_intrusive<c10d::HashStore>();
  for (int r = 0; r < size; ++r) {
    auto group = c10::make_intrusive<c10d::ProcessGroup>(store, r, size);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                      c10::make_intrusive<ThreadBackend>(world.rendezvous, r, size));
    world.groups.push_back(std::move(group));
  }
  return world;
}

}  // namespace shardsmith
