// Trees of values in messages between ranks: what JSON has no word for (tuples, sets, keys that are no texts) survives.
#pragma once

#include "base/value.h"

namespace shardsmith {

// For to_json, on the sender's side.
Value pack_value(const Value& value);
// On the receiver's, of what parse_json has made of it.
Value unpack_value(Value value);

}  // namespace shardsmith
