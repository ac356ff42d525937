// Runs the orders of all stages of a pipeline against each other, with blocking receives.
#pragma once

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "pipeline/schedule.h"

namespace shardsmith::test {

struct Simulated {
  bool finished = false;       // every stage ran its whole order
  int slots = 0;               // time until the last backward, where a forward and a backward take a slot each
  std::vector<int> most_held;  // by stage: microbatches that held activations at once
};

// `sends_in_flight`: after a task a stage waits until at most so many of its sends have not been received yet; 0 makes
// every send a rendezvous. nullopt: sends never wait.
inline Simulated simulate(const std::vector<std::vector<Task>>& orders, std::optional<size_t> sends_in_flight) {
  using Message = std::tuple<int, Task::Kind, int>;  // to stage, kind, microbatch
  const int stages = static_cast<int>(orders.size());
  struct Machine {
    size_t next = 0;
    int free_at = 0;
    int held = 0;
    std::deque<Message> unreceived;
  };
  std::vector<Machine> machines(orders.size());
  std::map<Message, int> arrived;  // when
  std::map<Message, bool> received;
  Simulated result;
  result.most_held.assign(orders.size(), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (int s = 0; s < stages; ++s) {
      Machine& machine = machines[static_cast<size_t>(s)];
      while (!machine.unreceived.empty() && received.contains(machine.unreceived.front()))
        machine.unreceived.pop_front();
      const std::vector<Task>& order = orders[static_cast<size_t>(s)];
      if (machine.next == order.size()) continue;
      if (sends_in_flight && machine.unreceived.size() > *sends_in_flight) continue;
      const Task task = order[machine.next];
      const bool forward = task.kind == Task::Kind::kForward;
      const bool receives = forward ? s > 0 : s + 1 < stages, sends = forward ? s + 1 < stages : s > 0;
      const Message incoming{s, task.kind, task.microbatch};
      if (receives && !arrived.contains(incoming)) continue;
      if (receives) received[incoming] = true;
      machine.free_at = std::max(machine.free_at, receives ? arrived[incoming] : 0) + 1;
      machine.held += forward ? 1 : -1;
      int& most = result.most_held[static_cast<size_t>(s)];
      most = std::max(most, machine.held);
      if (sends) {
        const Message outgoing{forward ? s + 1 : s - 1, task.kind, task.microbatch};
        arrived[outgoing] = machine.free_at;
        machine.unreceived.push_back(outgoing);
      }
      result.slots = std::max(result.slots, machine.free_at);
      ++machine.next;
      moved = true;
    }
  }
  result.finished = std::all_of(machines.begin(), machines.end(), [&](const Machine& machine) {
    return machine.next == orders[static_cast<size_t>(&machine - machines.data())].size();
  });
  return result;
}

}  // namespace shardsmith::test
