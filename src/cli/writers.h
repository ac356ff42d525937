// The targets of a conversion, each a function that writes what a Job holds.
#pragma once

#include <string>
#include <vector>

#include "cli/conversion.h"
#include "cli/file_builder.h"
#include "cli/staged_output.h"

namespace shardsmith::cli {

struct Job {
  Storage& storage;
  const Conversion& request;
  const Content& content;
  Feed& feed;
  ConversionResult& result;

  // Before the first byte: sums up what will be read and written, says it, and throws kNoSpace where `bytes` more than
  // the target's disk has are needed.
  void announce(uint64_t bytes, size_t files);
  // After the last byte, before anything gets its name: ends the checks of what was read.
  void finish();
  // The name, and a line for what it leaves behind.
  void publish(StagedOutput& out);
};

void write_safetensors_target(Job& job);
void write_hf_target(Job& job);
void write_pt_target(Job& job);
void write_dcp_target(Job& job);
void write_partial_target(Job& job);
void write_full_target(Job& job);

}  // namespace shardsmith::cli
