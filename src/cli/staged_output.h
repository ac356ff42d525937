// What a verb writes: under a temporary name beside the target, then renamed, so that the target appears whole or not
// at all; whatever goes wrong, the temporary is removed and what was there stays.
//
// An old folder is exchanged with the new one. Where the file system can't do that, the old one becomes .{name}.old,
// the new one takes the name, and the old one is removed. A verb that dies between leaves:
//
//   {name} missing, .{name}.old, .{name}.tmp-{pid}    recover_output(), which the next verb that writes there begins
//                                                     with, gives the old content its name back
//   {name}, .{name}.old                               the new content; publish() removes .old
// One process writes to a target at a time.
#pragma once

#include <functional>
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

  // Gives it its name, durably; throws with all as it was before, unless published() says otherwise (a file took
  // another one's place, and its durability alone failed). What was there before is removed. From the moment that the
  // new content is durable this is success: old content that can't be removed is no error, which would say that there
  // is no new output, but a line for people, which is returned; "" where all went well.
  [[nodiscard]] std::string publish();
  bool published() const { return published_; }
  // Of a published target that was not there before: takes its name away again, and with this object it goes. Never
  // throws: what can't be taken back stays.
  void withdraw() noexcept;

 private:
  void sync_or(const std::function<void()>& undo);
  std::string discard(const std::string& path);

  Storage& storage_;
  std::string target_, temporary_, old_;
  bool leftover_ = false;   // .{name}.old is what a dead verb didn't get to remove
  bool published_ = false;  // nothing of ours is at temporary_
};

// Undoes what a dead verb left at `target`, a full checkpoint's files too, and removes the temporary folders and files
// of processes that are gone. Returns a line for people where old content has its name back, "" otherwise. Knows the
// dead verb by its temporary: without one nothing is touched.
std::string recover_output(Storage& storage, const std::string& target);
// Where the content of the missing `target` lies and how it comes back, as the end of an error's line; "" where no verb
// or save left any.
std::string where_old_lies(Storage& storage, const std::string& target);

// Absolute, links resolved, without a trailing slash.
std::string absolute_path(const std::string& path);
// Throws kInvalidArgument if `target` is one of `sources`, holds one or lies inside of one (all absolute).
void check_apart(const std::string& target, const std::vector<std::string>& sources);

}  // namespace shardsmith::cli
