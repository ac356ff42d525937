// The one exception type of Shardsmith.
//
// `kind` is for programs (it decides the exit code), `what()` is for people: it names the
// file, the tensor, what was expected, what was found and what to do, in one line.
// A broken invariant of our own is not an Error: that is an assertion.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace shardsmith {

enum class ErrorKind {
  kInvalidArgument,  // the request is wrong: usage, configuration, degrees, foreign folder
  kNotFound,         // a path that was asked for is not there
  kUnsupported,      // understood, but not something we or the target can hold
  kCorrupt,          // what is there is no valid checkpoint or model: truncated, hostile, a tensor missing
  kMismatch,         // verify or diff found a difference or damage
  kIo,               // the operating system refused: EIO, ENOSPC, EACCES
  kNoSpace,          // would not fit, found out before anything was written
  kTimeout,          // a peer was late; the text names it
  kPeer,             // another rank failed; `rank()` says which
  kInterrupted,      // a signal
};

// The blueprint's exit codes: 1 failed while running, 2 request wrong, 3 would not fit,
// 4 verify or diff found something, 5 no valid checkpoint or model, 130 interrupted.
int exit_code(ErrorKind kind);

// "invalid_argument", "corrupt", ...: the word used in JSON output and in Python.
std::string_view to_string(ErrorKind kind);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message, int rank = -1)
      : std::runtime_error(message), kind_(kind), rank_(rank) {}
  ErrorKind kind() const { return kind_; }
  // Global rank on which it happened, or -1 where there is only one process.
  int rank() const { return rank_; }

 private:
  ErrorKind kind_;
  int rank_;
};

// Concatenates its arguments through operator<<.
template <typename... Args>
std::string str(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}

template <typename... Args>
[[noreturn]] void fail(ErrorKind kind, const Args&... args) {
  throw Error(kind, str(args...));
}

// The candidate nearest to `word` by edit distance, or "" where none is near.
std::string nearest(std::string_view word, const std::vector<std::string>& candidates);

}  // namespace shardsmith
