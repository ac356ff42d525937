#include "comm/group_transport.h"

#include <ATen/ATen.h>

namespace shardsmith {
namespace {

constexpr int kTag = 0;  // a pair's messages come in their order

at::Tensor tensor_of(const std::byte* bytes, size_t size) {
  return at::from_blob(const_cast<std::byte*>(bytes), {static_cast<int64_t>(size)}, at::kByte);
}

}  // namespace

void GroupTransport::move(std::span<const Outgoing> out, std::span<const Incoming> in, std::chrono::milliseconds) {
  // All are begun before any is waited for: two ranks that send each other something need both at once.
  std::vector<Pending> pending;
  for (const Incoming& message : in)
    pending.push_back(group_.receive(tensor_of(message.bytes.data(), message.bytes.size()), message.from, kTag));
  for (const Outgoing& message : out)
    pending.push_back(group_.send(tensor_of(message.bytes.data(), message.bytes.size()), message.to, kTag));
  for (Pending& one : pending) one.wait();
}

}  // namespace shardsmith
