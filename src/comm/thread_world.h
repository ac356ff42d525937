// Ranks as threads of one process: a c10d backend over Rendezvous, on which the engine's tests run in seconds.
#pragma once

#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/rendezvous.h"

namespace shardsmith {

// One process group of `size` ranks; element r belongs to thread r. CPU tensors only.
// Ranks may be failed through `rendezvous` (Rendezvous::fail_rank), or stalled by not calling.
struct ThreadWorld {
  std::shared_ptr<Rendezvous> rendezvous;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;
};
ThreadWorld make_thread_world(int size);

}  // namespace shardsmith
