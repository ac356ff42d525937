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
#include "cli/describe.h"
#include "cli/staged_output.h"
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
  cli::ConversionResult run(const Sources& sources, const Scenario& scenario, Storage& storage) const {
    Conversion request = scenario.request;
    request.from = sources.path(scenario.from);
    request.to = to;
    return cli::convert(storage, request);
  }

 private:
  Scratch folder_;

 public:
  const std::string to;
};

Tree after(const Sources& sources, const Scenario& scenario, FaultyStorage& storage, bool with_exchange = true) {
  const Place place(scenario);
  FaultyStorage plain(storage, {Fault::Kind::kNoExchange});
  place.run(sources, scenario, with_exchange ? storage : plain);
  return place.tree();
}

bool reads_ids(const Scenario& scenario) {
  return scenario.request.format == "partial" || scenario.request.format == "full";
}
bool same(const Scenario& scenario, const Tree& a, const Tree& b) {
  return reads_ids(scenario) ? outline(a) == outline(b) : a == b;
}

// Configuration and tokenizer of a partial checkpoint get their place beside it first, whole: of a process that is
// killed then they stay, and the next one takes them.
void drop_companions(Tree& now, const Tree& complete) {
  std::erase_if(now, [&](const auto& entry) {
    const bool companion = entry.first == "hf" || entry.first.starts_with("hf/");
    return companion && complete.contains(entry.first) && complete.at(entry.first) == entry.second;
  });
}

// Nothing has changed, or all of it.
bool old_or_new(const Scenario& scenario, const Tree& now, const Tree& before, const Tree& complete) {
  return same(scenario, now, complete) || now == before;
}

struct Tally {
  int points = 0, failed = 0, done = 0, told = 0;
};

void expect_sound(const Sources& sources, const Scenario& scenario, const Tree& complete, const Fault& fault,
                  const std::string& call, bool with_exchange, Tally& tally) {
  const Place place(scenario);
  const Tree before = place.tree();
  FaultyStorage faulty(local_storage(), fault);
  FaultyStorage plain(faulty, {Fault::Kind::kNoExchange});
  std::optional<Error> error;
  std::vector<std::string> told;
  try {
    told = place.run(sources, scenario, with_exchange ? static_cast<Storage&>(faulty) : plain).left_behind;
  } catch (const Error& e) {
    error = e;
  }
  ++tally.points;
  Tree now = place.tree();
  const Tree all = now;
  if (call == "remove")  // what can't be removed stays, under its hidden name
    std::erase_if(now, [](const auto& entry) { return entry.first.starts_with('.'); });
  if (!error) {
    ++tally.done;
    tally.told += !told.empty();
    EXPECT_EQ(told.empty(), all.size() == now.size()) << "what is left behind is told, and nothing else";
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
      const Tree complete = after(sources, scenario, counting, with_exchange);
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
  EXPECT_GT(tally.told, 10);
  std::cout << "fault points of conversions: " << tally.points << ", of them " << tally.failed << " failed\n";
}

// A probe for another format may pass a failing read over; many in a row mean that there are no more reads.
Tally each_read_fails(Fault::Kind kind, const char* words) {
  const Sources sources;
  Tally tally;
  for (const Scenario& scenario : scenarios()) {
    if (scenario.overwrite) continue;
    FaultyStorage counting(local_storage());
    const Tree complete = after(sources, scenario, counting);
    for (int64_t at = 0, in_a_row = 0; in_a_row < 8; ++at) {
      SCOPED_TRACE(str(scenario.name, ", ", words, " ", at));
      const int done = tally.done;
      expect_sound(sources, scenario, complete, {kind, at}, "read", true, tally);
      if (testing::Test::HasFailure()) return tally;
      in_a_row = tally.done > done ? in_a_row + 1 : 0;
    }
  }
  std::cout << words << "s of conversions: " << tally.points << ", of them " << tally.failed << " failed\n";
  return tally;
}

TEST(VerbFault, EveryReadOfAConversionMayBeShort) {
  EXPECT_GT(each_read_fails(Fault::Kind::kShortRead, "short read").failed, 50);
}

TEST(VerbFault, EveryReadOfAConversionMayFail) {
  EXPECT_GT(each_read_fails(Fault::Kind::kReadError, "failing read").failed, 50);
}

bool is_hidden(const std::string& path) { return path.starts_with('.'); }

Tree without_hidden(Tree tree) {
  std::erase_if(tree, [](const auto& entry) { return is_hidden(entry.first); });
  return tree;
}

// The exit code of a process that does `work` and is killed at storage call `at`: 137, or 0 if there is no such call.
template <typename Work>
int killed_at(int64_t at, const Work& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    FaultyStorage faulty(local_storage(), {Fault::Kind::kKill, at});
    try {
      work(faulty);
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void kill_at(const Place& place, const Sources& sources, const Scenario& scenario, int64_t at, bool with_exchange) {
  const int code = killed_at(at, [&](Storage& storage) {
    FaultyStorage plain(storage, {Fault::Kind::kNoExchange});
    place.run(sources, scenario, with_exchange ? storage : plain);
  });
  ASSERT_EQ(code, 137);
}

// What a missing output's error says, of which the old content lies hidden.
void expect_told(const Place& place) {
  const std::string old = parent(place.to) + "/." + base_name(place.to) + ".old";
  try {
    cli::existing_path(local_storage(), place.to);
    ADD_FAILURE() << place.to << " is missing, and no error says so";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kNotFound);
    EXPECT_NE(std::string(e.what()).find("the old content is in " + old), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("mv " + old), std::string::npos) << e.what();
  }
}

// A process that dies leaves the old output, or the new one, whole, or an error that says where the old one is; the
// next process that writes there puts it back, whether or not it succeeds itself, and leaves nothing hidden if it does.
TEST(VerbFault, KilledAtEveryCallOfAConversion) {
  const Sources sources;
  int points = 0, missing = 0;
  for (const Scenario& scenario : scenarios()) {
    for (const bool with_exchange : {true, false}) {
      if (!with_exchange && !scenario.overwrite) continue;
      FaultyStorage counting(local_storage());
      const Tree complete = after(sources, scenario, counting, with_exchange);
      const std::vector<std::string> log = counting.log();
      for (int64_t at = 0; at < static_cast<int64_t>(log.size()); ++at) {
        SCOPED_TRACE(str(scenario.name, with_exchange ? "" : " without exchange", ", killed at ", at, " ",
                         log[static_cast<size_t>(at)]));
        const Place place(scenario);
        const Tree before = place.tree();
        ASSERT_NO_FATAL_FAILURE(kill_at(place, sources, scenario, at, with_exchange));
        ++points;
        Tree now = without_hidden(place.tree());
        const bool full = scenario.request.format == "full";
        if (scenario.overwrite && !now.contains(base_name(place.to))) {
          EXPECT_TRUE(full || !with_exchange) << "an exchange leaves no gap";
          ++missing;
          expect_told(place);
        } else if (!full || now.contains(base_name(place.to))) {
          Tree undone = now;
          drop_companions(undone, complete);
          EXPECT_TRUE(same(scenario, now, complete) || undone == before);
        }
        cli::recover_output(local_storage(), place.to);
        now = without_hidden(place.tree());
        Tree undone = now;
        if (scenario.request.format == "partial") drop_companions(undone, complete);
        EXPECT_TRUE(same(scenario, now, complete) || undone == before) << "after recovery";

        Scenario again = scenario;
        again.request.overwrite = true;
        FaultyStorage plain(local_storage(), {Fault::Kind::kNoExchange});
        place.run(sources, again, with_exchange ? local_storage() : plain);
        EXPECT_TRUE(same(scenario, place.tree(), complete)) << "after the next run";
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_GT(points, 200);
  EXPECT_GE(missing, 6);
  std::cout << "kill points of conversions: " << points << ", " << missing << " with the old content hidden\n";
}

// Whoever puts the old content back may die as well: the next one goes on from there.
TEST(VerbFault, KilledWhileAnEarlierDeathIsMended) {
  const Sources sources;
  int points = 0;
  for (const Scenario& scenario : scenarios()) {
    if (!scenario.overwrite) continue;
    FaultyStorage counting(local_storage());
    const Tree complete = after(sources, scenario, counting, false);
    const auto calls = static_cast<int64_t>(counting.log().size());
    for (int64_t at = 0; at < calls; ++at) {
      for (int64_t second = 0;; ++second) {
        SCOPED_TRACE(str(scenario.name, ", killed at ", at, ", its recovery at ", second));
        const Place place(scenario);
        const Tree before = place.tree();
        ASSERT_NO_FATAL_FAILURE(kill_at(place, sources, scenario, at, false));
        if (without_hidden(place.tree()).contains(base_name(place.to))) break;  // nothing is mended
        const int code = killed_at(second, [&](Storage& storage) { cli::recover_output(storage, place.to); });
        ASSERT_TRUE(code == 137 || code == 0) << code;
        if (!without_hidden(place.tree()).contains(base_name(place.to))) expect_told(place);
        cli::recover_output(local_storage(), place.to);
        const Tree now = without_hidden(place.tree());
        Tree undone = now;
        if (scenario.request.format == "partial") drop_companions(undone, complete);
        EXPECT_TRUE(same(scenario, now, complete) || undone == before) << "after the second recovery";
        if (HasFailure()) return;
        if (code == 0) break;
        ++points;
      }
    }
  }
  EXPECT_GT(points, 20);
  std::cout << "kill points of recoveries: " << points << "\n";
}

// An `.old` without the temporary that tells whose it is: nothing is promised that only a person can do.
TEST(VerbFault, AnOldContentThatNobodyPutsBackIsNamedWithTheWayBack) {
  const Scenario scenario = scenarios()[10];
  const Place place(scenario);
  const std::string old = parent(place.to) + "/." + base_name(place.to) + ".old";
  fs::rename(place.to, old);
  try {
    cli::existing_path(local_storage(), place.to);
    FAIL() << "it is missing";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(old + " (back to its name: mv " + old + " " + place.to + ")"),
              std::string::npos)
        << e.what();
    EXPECT_EQ(std::string(e.what()).find("gives it its name back"), std::string::npos) << e.what();
  }
}

// What no verb left there is nobody's to remove or to rename.
TEST(VerbFault, ForeignOldNamesStay) {
  const Sources sources;
  const Scenario onto_file = scenarios()[8], onto_folder = scenarios()[10];
  ASSERT_TRUE(onto_file.overwrite && onto_file.request.format == "pt" && onto_folder.to == "sharded");
  {
    const Place place(onto_file);
    const std::string foreign = parent(place.to) + "/.new.pt.old";
    std::ofstream(foreign) << "mine";
    place.run(sources, onto_file, local_storage());
    EXPECT_EQ(bytes_of_file(foreign), "mine");
  }
  {
    const Place place(onto_folder);
    fs::remove_all(place.to);
    const std::string foreign = parent(place.to) + "/.sharded.old";
    fs::create_directories(foreign);
    EXPECT_EQ(cli::recover_output(local_storage(), place.to), "");
    place.run(sources, onto_folder, local_storage());
    EXPECT_TRUE(fs::is_directory(foreign));
  }
}

}  // namespace
}  // namespace shardsmith
