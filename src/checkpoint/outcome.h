// One rank's failure is everybody's: the ranks exchange how it went, and all throw the first failing rank's error.
#pragma once

#include <chrono>
#include <functional>

#include "base/error.h"
#include "base/peers.h"
#include "base/value.h"

namespace shardsmith {

// Runs `work` on this rank, exchanges what it returned or threw, and returns all ranks' values in rank order. Throws
// the first failing rank's error on every rank; its text and Error::rank() name the rank where there are several (as
// they are, where that error names one already).
std::vector<Value> all_do(Peers& peers, std::chrono::milliseconds deadline, const std::function<Value()>& work);

}  // namespace shardsmith
