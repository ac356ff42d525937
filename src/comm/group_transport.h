// base/transport.h over a process group: what ranks send each other while they save.
#pragma once

#include "base/transport.h"
#include "comm/group.h"

namespace shardsmith {

// Ranks are the group's own. The group is this object's alone, and carries tensors of the CPU. One thread at a time.
class GroupTransport final : public Transport {
 public:
  // The group's own timeout holds; `deadline` of move() can't be shorter than that.
  explicit GroupTransport(Group group) : group_(std::move(group)) {}
  void move(std::span<const Outgoing> out, std::span<const Incoming> in, std::chrono::milliseconds deadline) override;

 private:
  Group group_;
};

}  // namespace shardsmith
