#include "cli/signals.h"

#include <csignal>
#include <cstring>

#include "base/error.h"

namespace shardsmith::cli {
namespace {

volatile std::sig_atomic_t caught = 0;

void handle(int signal) { caught = signal; }

}  // namespace

void catch_signals() {
  struct sigaction action {};
  action.sa_handler = handle;
  action.sa_flags = SA_RESETHAND | SA_RESTART;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaction(signal, &action, nullptr);
}

int stopped_by() { return caught; }

void check_signals() {
  if (caught != 0) fail(ErrorKind::kInterrupted, "stopped by ", strsignal(caught), "; nothing was left behind");
}

}  // namespace shardsmith::cli
