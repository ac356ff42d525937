// SIGINT, SIGTERM and SIGHUP for verbs that have something to undo: a flag is set, and the work ends at its next check.
#pragma once

namespace shardsmith::cli {

// From now on the signals only set the flag; a second one of them ends the process at once.
void catch_signals();
// The signal that came, 0 where none did.
int stopped_by();
// Throws Error(kInterrupted) if one came.
void check_signals();

}  // namespace shardsmith::cli
