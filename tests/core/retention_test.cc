// Random sequences of partial and full saves with retention: whatever comes, nothing that is needed is ever pruned.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <tuple>

#include "full_fixture.h"
#include "memory_storage.h"

namespace shardsmith {
namespace {

// Of one kind what a folder must hold, by plain rules.
template <typename State>
struct Expected {
  std::map<std::string, State> states;  // by tag
  std::map<std::string, int> order;     // when it was saved
  std::string last;                     // saved last, of whatever kind, if it is of this one

  // What a resume takes: what was saved last, else the highest step that does not lie beyond `step`, else the highest.
  std::string newest(int64_t step) const {
    if (!last.empty()) return last;
    const auto rank = [&](const std::string& tag) {
      const int64_t at = states.at(tag).step;
      return std::tuple(at <= step, at, order.at(tag));
    };
    std::string best;
    for (const auto& [tag, state] : states)
      if (best.empty() || rank(tag) > rank(best)) best = tag;
    return best;
  }
};

class Sequence {
 public:
  Sequence(uint32_t seed, bool with_exchange) : random_(seed), storage_(with_exchange) {}

  void run(int saves) {
    for (int i = 0; i < saves; ++i) {
      if (pick(8) == 0) go_back();
      step_ += pick(3);  // 0: two saves of one step
      const bool full = pick(3) == 0;
      const std::string tag = full ? "w" + std::to_string(pick(3)) : "t" + std::to_string(pick(6));  // reused often
      const int number = pick(5) - 1;                                                                // -1: keep all
      const std::optional<int> keep = number < 0 ? std::nullopt : std::optional(number);
      SCOPED_TRACE(str("save ", i, ": ", tag, " at step ", step_, ", keeping ", number));
      const std::set<std::string> before = partials();
      full ? save_one_full(tag, keep) : save_one_partial(tag, keep);
      if (testing::Test::HasFatalFailure()) return;
      check_pruned(before, full ? "" : partial_name(tag), keep);
      check_newest();
      if (testing::Test::HasFailure()) return;
    }
  }

 private:
  int pick(int count) { return static_cast<int>(random_() % static_cast<uint32_t>(count)); }

  // As a script that resumes from an older one, or begins again in the same folder.
  void go_back() { step_ = pick(3) == 0 ? 0 : std::max<int64_t>(0, step_ - pick(10)); }

  void save_one_partial(const std::string& tag, std::optional<int> keep) {
    const TestState state{tag, step_, 1 + pick(2)};
    const SaveOutcome outcome =
        save(storage_, state, "out", [&](int, SaveRequest& r) { r.num_kept_partial_checkpoints = keep; });
    ASSERT_TRUE(outcome.succeeded());
    pruned_ = outcome.results[0]->pruned;
    partial_.states[tag] = state;
    partial_.order[tag] = ++saves_;
    partial_.last = tag, full_.last.clear();
  }

  void save_one_full(const std::string& tag, std::optional<int> keep) {
    const FullState state{tag, step_, 1, pick(2) == 0};
    const SaveOutcome outcome =
        save_whole(storage_, state, "out", [&](int, FullRequest& r) { r.num_kept_partial_checkpoints = keep; });
    ASSERT_TRUE(outcome.succeeded());
    pruned_ = outcome.results[0]->pruned;
    full_.states[tag] = state;
    full_.order[tag] = ++saves_;
    full_.last = tag, partial_.last.clear();
  }

  std::set<std::string> partials() {
    std::set<std::string> names;
    if (!storage_.stat("out").exists) return names;
    for (const Found& found : scan(storage_, "out"))
      if (found.kind == CheckpointKind::kPartial) names.insert(found.name);
    return names;
  }

  // What is gone was told; of the others as many stay as were asked for, and all where nothing was.
  void check_pruned(const std::set<std::string>& before, const std::string& saved, std::optional<int> keep) {
    std::set<std::string> expected = before, gone(pruned_.begin(), pruned_.end());
    if (!saved.empty()) expected.insert(saved);
    const size_t there = expected.size();
    for (const std::string& name : gone) EXPECT_EQ(expected.erase(name), 1u) << name << " was not there";
    EXPECT_EQ(partials(), expected);
    const size_t asked = keep ? static_cast<size_t>(std::max(*keep, 1)) : there;
    EXPECT_EQ(expected.size(), std::min(there, asked));
    const std::string needed = partial_.newest(step_);
    EXPECT_FALSE(gone.contains(partial_name(needed))) << "what a resume takes is gone";
    for (const std::string& name : gone) partial_.states.erase(name.substr(0, name.size() - 8));
    EXPECT_EQ(leftovers(storage_, "out"), std::vector<std::string>{});
  }

  void check_newest() {
    const auto partial = find_checkpoint(storage_, "out", "", nullptr, CheckpointKind::kPartial);
    const auto full = find_checkpoint(storage_, "out", "", nullptr, CheckpointKind::kFull);
    ASSERT_EQ(partial.has_value(), !partial_.states.empty());
    ASSERT_EQ(full.has_value(), !full_.states.empty());
    if (partial) {
      EXPECT_EQ(partial->name, partial_name(partial_.newest(step_)));
      expect_whole(storage_, *partial, partial_.states.at(partial->manifest->tag));
    }
    if (full) {
      EXPECT_EQ(full->name, full_.newest(step_));
      expect_whole(storage_, *full, full_.states.at(full->name));
    }
    // By name each finds what was saved there last; a full one is never pruned.
    for (const auto& [tag, state] : full_.states) check_named(tag, state.step, CheckpointKind::kFull);
    for (const auto& [tag, state] : partial_.states) check_named(tag, state.step, CheckpointKind::kPartial);
  }

  void check_named(const std::string& tag, int64_t step, CheckpointKind kind) {
    const auto found = find_checkpoint(storage_, "out", tag, nullptr, kind);
    ASSERT_TRUE(found) << tag;
    EXPECT_EQ(found->manifest->step, step) << tag;
  }

  std::mt19937 random_;
  MemoryStorage storage_;
  Expected<TestState> partial_;
  Expected<FullState> full_;
  int saves_ = 0;
  std::vector<std::string> pruned_;
  int64_t step_ = 1;
};

TEST(Retention, NothingNeededIsPrunedWhateverIsSavedInWhateverOrder) {
  const uint32_t sequences = std::getenv("SHARDSMITH_LONG") ? 200 : 12;
  for (uint32_t seed = 0; seed < sequences; ++seed) {
    SCOPED_TRACE(str("seed ", seed));
    Sequence(seed, seed % 2 == 0).run(16);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace shardsmith
