// What a verb writes: under a temporary name beside the target, then renamed, so that the target appears whole or not
// at all; whatever goes wrong, the temporary is removed and what was there stays.
#pragma once

#include <string>
#include <vector>

#include "storage/storage.h"

namespace shardsmith::cli {

class StagedOutput {
 public:
  // `target`: a file or folder to be. With `overwrite` false, throws kInvalidArgument if it is there, unless it is an
  // empty folder. Makes nothing yet but the folders above it.
  StagedOutput(Storage& storage, std::string target, bool overwrite);
  ~StagedOutput();
  StagedOutput(const StagedOutput&) = delete;

  const std::string& target() const { return target_; }
  // Where to write; `make_folder` makes it.
  const std::string& temporary() const { return temporary_; }
  void make_folder();

  // Gives it its name, durably. What was there before is removed.
  void publish();

 private:
  Storage& storage_;
  std::string target_, temporary_;
  bool published_ = false;
};

// Absolute, links resolved, without a trailing slash.
std::string absolute_path(const std::string& path);
// Throws kInvalidArgument if `target` is one of `sources`, holds one or lies inside of one (all absolute).
void check_apart(const std::string& target, const std::vector<std::string>& sources);

}  // namespace shardsmith::cli
