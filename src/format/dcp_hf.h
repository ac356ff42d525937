// DCP's Hugging Face variant: safetensors files whose `__metadata__` tell where in its tensor each piece begins.
#pragma once

#include <string>

#include "layout/index.h"
#include "storage/storage.h"

namespace shardsmith {

bool is_dcp_hf(Storage& storage, const std::string& directory);
// As read_dcp. What nothing in the files tells is a last shard that is missing: a tensor is as large as its pieces say.
Index read_dcp_hf(Storage& storage, const std::string& directory);

}  // namespace shardsmith
