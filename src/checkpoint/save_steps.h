// What partial and full saves have in common: agreeing, making room, going back.
#pragma once

#include <string>
#include <vector>

#include "base/value.h"
#include "checkpoint/manifest.h"
#include "format/pt.h"
#include "storage/storage.h"

namespace shardsmith {

// kInvalidArgument for a path or a tag that can't be.
void check_place(const std::string& path, const std::string& tag);

// What must be the same on all ranks, in words that make sense in an error; and the check of it over all announcements,
// each with its "essentials": kInvalidArgument that names the first differing rank. Every rank comes to the same
// verdict. `kind`: "a partial checkpoint", "a full checkpoint".
Value essentials(const std::string& kind, const std::string& path, const std::string& tag, const Manifest& manifest);
void check_essentials(const std::vector<Value>& announcements);
// kInvalidArgument; says that nothing was written.
[[noreturn]] void fail_differing(size_t rank, const std::string& text);

// The folder and those above it, durable.
void make_durable_directory(Storage& storage, const std::string& path);
// kNoSpace where `bytes` don't fit, old and new together.
void check_room(Storage& storage, const std::string& path, uint64_t bytes);
// The next save sweeps what can't be removed now.
void remove_quietly(Storage& storage, const std::string& folder) noexcept;
// `newest` as it was: "" removes it. Never throws.
void set_back_newest(Storage& storage, const std::string& path, const std::string& before) noexcept;

// With the id in its extra record.
PtContent with_save_id(PtContent content, const std::string& save_id);

// Names the machine that this process runs on: equal on all its ranks. Processes on one machine may write one file.
std::string host_identity();

std::vector<std::string> texts(const Value& list);
Value list_of(const std::vector<std::string>& texts);

}  // namespace shardsmith
