// What lies beside a model's weights and belongs to it: tokenizer, generation settings and the like.
#pragma once

#include <memory>
#include <string>

#include "base/value.h"
#include "cli/staged_output.h"
#include "storage/storage.h"

namespace shardsmith::cli {

// Copies from one folder to another all files but weights, their index, hidden ones and config.json, which the caller
// writes. Returns whether a tokenizer was among them.
bool copy_companions(Storage& storage, const std::string& from, const std::string& folder);

// The bare name of the folder beside the checkpoint at `checkpoint` that holds, or is to hold, `config` and a copy of
// `companions`; and making it where it isn't there: then it is returned, so that who fails later can withdraw it.
std::string companions_name(Storage& storage, const std::string& companions, const Value& config,
                            const std::string& checkpoint);
std::unique_ptr<StagedOutput> keep_companions(Storage& storage, const std::string& companions, const Value& config,
                                              const std::string& folder);

}  // namespace shardsmith::cli
