// The verbs that write (merge, convert, export, reshard: all of them convert()) on a disk that fails at every point: an
// Error that says what and where, the old output as it was, nothing temporary left.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <map>

#include "checkpoint_fixture.h"
#include "cli/conversion.h"
#include "format/safetensors.h"
#include "storage/faulty_storage.h"

namespace shardsmith {
namespace {

namespace fs = std::filesystem;
using cli::Conversion;
using Tree = std::map<std::string, std::string>;  // path below a folder -> bytes; of folders "/"

std::string bytes_of_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

Tree tree_of(const std::string& folder) {
  Tree tree;
  for (const auto& entry : fs::recursive_directory_iterator(folder))
    tree[fs::relative(entry.path(), folder).string()] = entry.is_directory() ? "/" : bytes_of_file(entry.path());
  return tree;
}

// A folder in memory where there is a file system there: each of the many conversions waits for the disk otherwise.
class Scratch {
 public:
  Scratch() {
    std::error_code none;
    const fs::path base = fs::is_directory("/dev/shm", none) ? "/dev/shm" : fs::temp_directory_path();
    std::string pattern = (base / "shardsmith-fault-XXXXXX").string();
    if (!::mkdtemp(pattern.data())) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~Scratch() {
    std::error_code none;
    fs::remove_all(path_, none);
  }
  Scratch(const Scratch&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// What two saves of the same content have in common, whose ids and times differ.
std::map<std::string, size_t> outline(const Tree& tree) {
  std::map<std::string, size_t> sizes;
  for (const auto& [path, bytes] : tree)
    sizes[path] = path.ends_with("manifest.json") ? 0 : bytes.size() / 64;  // a time has more digits or fewer
  return sizes;
}

// The sources: a Hugging Face folder of a small GPT-2, and a partial checkpoint with optimizer and user content.
class Sources {
 public:
  Sources() {
    const std::string fixtures = std::string(SHARDSMITH_SOURCE_DIR) + "/tests/core/fixtures/families.json";
    const Value cases = parse_json(bytes_of_file(fixtures), fixtures);
    const Value& gpt2 = cases.get_if<List>()->at(0);
    fs::create_directories(folder_.path() + "/hf");
    std::ofstream(folder_.path() + "/hf/config.json") << to_json(*gpt2.find("config"));
    std::vector<SafetensorsTensor> tensors;
    std::vector<std::unique_ptr<std::string>> bytes;
    for (const Value& item : *gpt2.find("tensors")->get_if<List>()) {
      SafetensorsTensor tensor;
      tensor.name = *item.get_if<List>()->at(0).get_if<std::string>();
      tensor.dtype = Dtype::kF32;
      for (const Value& n : *item.get_if<List>()->at(1).get_if<List>()) tensor.shape.push_back(*n.get_if<int64_t>());
      bytes.push_back(std::make_unique<std::string>(static_cast<size_t>(volume(tensor.shape)) * 4, '\0'));
      for (size_t i = 0; i < bytes.back()->size(); ++i)
        (*bytes.back())[i] = static_cast<char>(i * 31 + 7 * bytes.size());
      tensor.source = {bytes.back()->size(), reinterpret_cast<const std::byte*>(bytes.back()->data()), {}};
      tensors.push_back(std::move(tensor));
    }
    write_safetensors(local_storage(), folder_.path() + "/hf/model.safetensors", std::move(tensors),
                      {{"format", "pt"}});
    EXPECT_TRUE(save(local_storage(), {"a", 3, 2}, folder_.path()).succeeded());
  }
  std::string path(const std::string& name) const { return folder_.path() + "/" + name; }

 private:
  Scratch folder_;
};

struct Scenario {
  std::string name, from, to;
  Conversion request;
  bool overwrite = false;
};

std::vector<Scenario> scenarios() {
  std::vector<Scenario> all;
  for (const bool overwrite : {false, true}) {
    const auto add = [&](const char* from, const char* to, const char* format) -> Conversion& {
      Conversion request;
      request.format = format;
      request.overwrite = overwrite;
      request.threads = 1;
      request.memory_limit = 80 << 20;
      all.push_back({str(from, " to ", format, overwrite ? " over an older one" : ""), from, to, request, overwrite});
      return all.back().request;
    };
    add("hf", "new.pt", "pt");
    add("hf", "new.safetensors", "safetensors");
    add("hf", "sharded", "safetensors").max_shard_size = 1500;
    add("hf", "exported", "hf").names = cli::Names::kHuggingFace;
    add("hf", "distributed", "dcp");
    Conversion& partial = add("hf", "new_partial", "partial");
    partial.names = cli::Names::kLogical;
    partial.pp = 2;
    add("a_partial", "full", "full");
    Conversion& other = add("a_partial", "b_partial", "partial");
    other.names = cli::Names::kLogical;
    other.pp = 1;
  }
  return all;
}

// The folder in which a scenario's output is made, as it is before.
class Place {
 public:
  explicit Place(const Scenario& scenario) : to(join(folder_.path(), scenario.to)) {
    if (!scenario.overwrite) return;
    const bool is_file = scenario.to.find('.') != std::string::npos || scenario.request.format == "full";
    if (is_file) {
      std::ofstream(to) << "the old file";
      if (scenario.request.format == "full")
        std::ofstream(join(folder_.path(), "optimizer_" + scenario.to)) << "old too";
    } else {
      fs::create_directories(to + "/below");
      std::ofstream(to + "/below/old") << "an old file";
    }
  }
  Tree tree() const { return tree_of(folder_.path()); }
  void run(const Sources& sources, const Scenario& scenario, Storage& storage) const {
    Conversion request = scenario.request;
    request.from = sources.path(scenario.from);
    request.to = to;
    cli::convert(storage, request);
  }

 private:
  Scratch folder_;

 public:
  const std::string to;
};

Tree after(const Sources& sources, const Scenario& scenario, FaultyStorage& storage) {
  const Place place(scenario);
  place.run(sources, scenario, storage);
  return place.tree();
}

bool reads_ids(const Scenario& scenario) {
  return scenario.request.format == "partial" || scenario.request.format == "full";
}
bool same(const Scenario& scenario, const Tree& a, const Tree& b) {
  return reads_ids(scenario) ? outline(a) == outline(b) : a == b;
}

// Configuration and tokenizer of a partial checkpoint get their place beside it first, whole, and harm nobody there.
void drop_companions(Tree& now, const Tree& complete) {
  std::erase_if(now, [&](const auto& entry) {
    const bool companion = entry.first == "hf" || entry.first.starts_with("hf/");
    return companion && complete.contains(entry.first) && complete.at(entry.first) == entry.second;
  });
}

// Nothing has changed, or all of it.
bool old_or_new(const Scenario& scenario, Tree now, const Tree& before, const Tree& complete) {
  if (same(scenario, now, complete)) return true;
  drop_companions(now, complete);
  return now == before;
}

struct Tally {
  int points = 0, failed = 0, done = 0;
};

void expect_sound(const Sources& sources, const Scenario& scenario, const Tree& complete, const Fault& fault,
                  const std::string& call, bool with_exchange, Tally& tally) {
  const Place place(scenario);
  const Tree before = place.tree();
  FaultyStorage faulty(local_storage(), fault);
  FaultyStorage plain(faulty, {Fault::Kind::kNoExchange});
  std::optional<Error> error;
  try {
    place.run(sources, scenario, with_exchange ? static_cast<Storage&>(faulty) : plain);
  } catch (const Error& e) {
    error = e;
  }
  ++tally.points;
  Tree now = place.tree();
  if (call == "remove")  // what can't be removed stays, under its hidden name
    std::erase_if(now, [](const auto& entry) { return entry.first.starts_with('.'); });
  if (!error) {
    ++tally.done;
    EXPECT_TRUE(same(scenario, now, complete)) << "says that all is well, but wrote something else";
    return;
  }
  ++tally.failed;
  const std::string text = error->what();
  EXPECT_EQ(text.find('\n'), std::string::npos) << text;
  EXPECT_NE(text.find('/'), std::string::npos) << "names no path: " << text;
  if (fault.kind == Fault::Kind::kShortRead) {
    EXPECT_TRUE(error->kind() == ErrorKind::kCorrupt || error->kind() == ErrorKind::kUnsupported) << text;
  } else {
    EXPECT_EQ(error->kind(), ErrorKind::kIo) << text;
    EXPECT_NE(text.find(fault.kind == Fault::Kind::kNoSpace ? "ENOSPC" : "EIO"), std::string::npos) << text;
  }
  // All is as before, or it is the new output, whole, whose durability alone failed.
  EXPECT_TRUE(old_or_new(scenario, now, before, complete)) << "after: " << text;
  for (const auto& [path, bytes] : now) {
    if (before.contains(path)) continue;
    EXPECT_FALSE(path.starts_with('.')) << path << " is left, after: " << text;
  }
}

TEST(VerbFault, EveryCallOfAConversionMayFail) {
  const Sources sources;
  Tally tally;
  for (const Scenario& scenario : scenarios()) {
    for (const bool with_exchange : {true, false}) {
      if (!with_exchange && !scenario.overwrite) continue;
      FaultyStorage counting(local_storage());
      const Tree complete = after(sources, scenario, counting);
      const std::vector<std::string> log = counting.log();
      ASSERT_GT(log.size(), 3u) << scenario.name;
      for (const Fault::Kind kind : {Fault::Kind::kIoError, Fault::Kind::kNoSpace, Fault::Kind::kSyncFails}) {
        for (int64_t at = 0; at < static_cast<int64_t>(log.size()); ++at) {
          const std::string& call = log[static_cast<size_t>(at)];
          if (kind == Fault::Kind::kSyncFails && !call.starts_with("sync")) continue;
          SCOPED_TRACE(str(scenario.name, with_exchange ? "" : " without exchange", ", fault ", static_cast<int>(kind),
                           " at ", at, " ", call));
          expect_sound(sources, scenario, complete, {kind, at}, call, with_exchange, tally);
          if (HasFailure()) return;
        }
      }
    }
  }
  EXPECT_GT(tally.failed, 500);
  std::cout << "fault points of conversions: " << tally.points << ", of them " << tally.failed << " failed\n";
}

TEST(VerbFault, EveryReadOfAConversionMayBeShort) {
  const Sources sources;
  Tally tally;
  for (const Scenario& scenario : scenarios()) {
    if (scenario.overwrite) continue;
    FaultyStorage counting(local_storage());
    const Tree complete = after(sources, scenario, counting);
    // A probe for another format may pass a short read over; many in a row mean that there are no more reads.
    for (int64_t at = 0, in_a_row = 0; in_a_row < 8; ++at) {
      SCOPED_TRACE(str(scenario.name, ", short read ", at));
      const int done = tally.done;
      expect_sound(sources, scenario, complete, {Fault::Kind::kShortRead, at}, "read", true, tally);
      if (HasFailure()) return;
      in_a_row = tally.done > done ? in_a_row + 1 : 0;
    }
  }
  EXPECT_GT(tally.failed, 50);
  std::cout << "short reads of conversions: " << tally.points << ", of them " << tally.failed << " failed\n";
}

// A process that dies leaves the old output, or the new one, whole; what it began has a hidden name.
TEST(VerbFault, KilledAtEveryCallOfAConversion) {
  const Sources sources;
  int points = 0;
  for (const Scenario& scenario : scenarios()) {
    FaultyStorage counting(local_storage());
    const Tree complete = after(sources, scenario, counting);
    const std::vector<std::string> log = counting.log();
    for (int64_t at = 0; at < static_cast<int64_t>(log.size()); ++at) {
      SCOPED_TRACE(str(scenario.name, ", killed at ", at, " ", log[static_cast<size_t>(at)]));
      const Place place(scenario);
      const Tree before = place.tree();
      const pid_t child = ::fork();
      if (child == 0) {
        FaultyStorage faulty(local_storage(), {Fault::Kind::kKill, at});
        try {
          place.run(sources, scenario, faulty);
        } catch (...) {
          ::_exit(1);
        }
        ::_exit(0);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 137) << status;
      ++points;
      Tree now = place.tree();
      // A full checkpoint is several files: while they change places the old ones are in `.old`, and whoever reads the
      // weights, which come last, has all of it.
      std::erase_if(now, [](const auto& entry) { return entry.first.starts_with('.'); });
      if (scenario.request.format == "full" && !now.contains(scenario.to)) continue;
      EXPECT_TRUE(old_or_new(scenario, now, before, complete));
      if (HasFailure()) return;
    }
  }
  EXPECT_GT(points, 200);
  std::cout << "kill points of conversions: " << points << "\n";
}

}  // namespace
}  // namespace shardsmith
