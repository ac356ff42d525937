#include "checkpoint/shared_files.h"

#include <algorithm>
#include <map>
#include <optional>

#include "base/error.h"
#include "checkpoint/save_steps.h"
#include "checkpoint/written_shares.h"

namespace shardsmith {
namespace {

constexpr uint64_t kBlock = StreamWriter::kBlock;

uint64_t blocks_for(uint64_t bytes) { return (bytes + kBlock - 1) / kBlock; }

uint64_t number_of(const Value& entry, const char* key) {
  const Value* found = entry.find(key);
  const int64_t* number = found ? found->get_if<int64_t>() : nullptr;
  return number && *number >= 0 ? static_cast<uint64_t>(*number) : 0;
}

// All that the ranks say of the files of one name.
struct Announced {
  std::string name;
  std::vector<int> ranks;
  std::vector<size_t> numbers;  // among that rank's files
  std::vector<const Value*> entries;
};

std::vector<Announced> by_name(const std::vector<List>& entries) {
  std::vector<Announced> result;
  std::map<std::string, size_t> places;
  for (size_t rank = 0; rank < entries.size(); ++rank) {
    for (size_t number = 0; number < entries[rank].size(); ++number) {
      const Value& entry = entries[rank][number];
      const std::string& name = *entry.find("name")->get_if<std::string>();
      const auto [place, is_new] = places.emplace(name, result.size());
      if (is_new) result.push_back({name, {}, {}, {}});
      Announced& announced = result[place->second];
      const bool shared = entry.find("layout") && (is_new || announced.entries[0]->find("layout"));
      if (!is_new && (!shared || announced.ranks.back() == static_cast<int>(rank)))
        fail_differing(rank, str("rank ", rank, " saves ", name, ", which another file is called too"));
      announced.ranks.push_back(static_cast<int>(rank));
      announced.numbers.push_back(number);
      announced.entries.push_back(&entry);
    }
  }
  return result;
}

// Of the holders those that may write together: where machines hold it alike, those of the one with the least to do.
std::vector<int> writers_among(const std::vector<int>& ranks, const std::vector<std::string>& hosts, bool across_hosts,
                               const std::vector<uint64_t>& load) {
  if (across_hosts) return ranks;
  std::vector<int> best;
  uint64_t least = 0;
  for (const int first : ranks) {
    std::vector<int> there;
    uint64_t busiest = 0;
    for (const int rank : ranks) {
      if (hosts[static_cast<size_t>(rank)] != hosts[static_cast<size_t>(first)]) continue;
      there.push_back(rank);
      busiest = std::max(busiest, load[static_cast<size_t>(rank)]);
    }
    if (there.size() < best.size() || (there.size() == best.size() && busiest >= least)) continue;
    best = std::move(there);
    least = busiest;
  }
  return best;
}

}  // namespace

SharedFiles::SharedFiles(const std::vector<SaveFile>& files) : files_(files), own_(files.size(), true) {
  for (const SaveFile& file : files_) {
    layouts_.push_back(nullptr);
    // The id is not known yet, but its length is.
    if (file.shared)
      layouts_.back() = std::make_unique<PtFile>(with_save_id(file.content, std::string(16, '0')), file.name);
  }
}

void SharedFiles::announce(size_t number, Value& entry) const {
  const PtFile* layout = layouts_[number].get();
  if (!layout) return;
  entry.set("layout", static_cast<int64_t>(layout->fingerprint()));
  entry.set("size", static_cast<int64_t>(layout->size()));
  entry.set("covered", static_cast<int64_t>(layout->covered()));
}

void SharedFiles::plan(const std::vector<List>& entries, const std::vector<std::string>& hosts, int rank,
                       bool across_hosts, std::vector<std::string>& warnings) {
  rank_ = rank;
  std::vector<uint64_t> load(entries.size(), 0);
  std::vector<Stretch> stretches;
  std::vector<Announced> split;
  std::vector<Announced> all = by_name(entries);
  for (const Announced& one : all) {
    const uint64_t bytes = number_of(*one.entries[0], "bytes");
    bytes_ += bytes;
    if (one.ranks.size() == 1) load[static_cast<size_t>(one.ranks[0])] += blocks_for(bytes);
  }
  for (Announced& one : all) {
    if (one.ranks.size() == 1) continue;  // its holder's own
    std::vector<int> writers = writers_among(one.ranks, hosts, across_hosts, load);
    const auto differing = std::find_if(one.entries.begin(), one.entries.end(), [&](const Value* entry) {
      return number_of(*entry, "layout") != number_of(*one.entries[0], "layout") ||
             number_of(*entry, "size") != number_of(*one.entries[0], "size");
    });
    if (differing != one.entries.end()) {
      const int other = one.ranks[static_cast<size_t>(differing - one.entries.begin())];
      warnings.push_back(str(one.name, " is not the same on ranks ", one.ranks[0], " and ", other,
                             ", which should hold it alike: rank ", one.ranks[0], "'s is saved"));
      writers = {one.ranks[0]};
    }
    const bool alone = writers.size() == 1;
    if (alone) load[static_cast<size_t>(writers[0])] += blocks_for(number_of(*one.entries[0], "size"));
    for (size_t i = 0; i < one.ranks.size(); ++i)
      if (one.ranks[i] == rank) own_[one.numbers[i]] = alone && writers[0] == rank;
    if (alone) continue;
    stretches.push_back({blocks_for(number_of(*one.entries[0], "covered")), std::move(writers)});
    split.push_back(std::move(one));
  }
  any_ = !split.empty();
  // In each file's own blocks again.
  const std::vector<Share> shares = share_out(stretches, load);
  auto share = shares.begin();
  uint64_t first = 0;
  for (size_t i = 0; i < split.size(); ++i) {
    const uint64_t end = first + stretches[i].blocks;
    File file;
    file.name = split[i].name;
    file.size = number_of(*split[i].entries[0], "size");
    for (auto at = share; at != shares.end() && at->begin < end; ++at) {
      file.shares.push_back({std::max(at->begin, first) - first, std::min(at->end, end) - first, at->rank});
      share = at;  // it may go on in the next file
    }
    for (size_t k = 0; k < split[i].ranks.size(); ++k) {
      if (split[i].ranks[k] != rank) continue;
      file.file = &files_[split[i].numbers[k]];
      file.layout = std::move(layouts_[split[i].numbers[k]]);
    }
    first = end;
    while (share != shares.end() && share->end <= first) ++share;
    split_.push_back(std::move(file));
  }
}

void SharedFiles::create(Storage& storage, const std::string& folder) const {
  for (const File& file : split_) storage.create(join(folder, file.name), Access::kDirect, file.size)->close();
}

Value SharedFiles::write(Storage& storage, const std::string& folder, const Progress& progress) {
  Value result{Dict{}};
  uint64_t total = 0, done = 0;
  for (const File& file : split_) total += blocks_of(file.shares, rank_) * kBlock;
  for (File& file : split_) {
    if (!file.layout) continue;
    const uint64_t blocks = blocks_of(file.shares, rank_);
    file.ranges = std::make_unique<PtRanges>(*file.layout);
    if (blocks == 0) continue;
    file.out = storage.open_write(join(folder, file.name), Access::kDirect);
    StreamWriter out(*file.out, blocks * kBlock);
    ContentSource source(file.file->content);
    for (const Share& share : file.shares) {
      if (share.rank != rank_) continue;
      file.ranges->write(out, share.begin * kBlock, std::min(share.end * kBlock, file.layout->covered()), source);
      done += (share.end - share.begin) * kBlock;
      if (progress) progress({"write", done, total, "bytes"});
    }
    out.finish();
    result.set(file.name, checksums_of(*file.layout, file.shares, rank_, *file.ranges));
  }
  return result;
}

List SharedFiles::finish(const std::vector<Value>& written, const std::string& save_id) {
  List entries;
  for (File& file : split_) {
    if (!file.out) continue;
    take_checksums(*file.layout, file.shares, written, file.name, *file.ranges);
    file.ranges->write_rest(*file.out);
    if (file.shares.back().rank == rank_) {
      const PtFile::Tail tail =
          file.layout->finish(file.ranges->crcs(), with_save_id(file.file->content, save_id).extra);
      file.out->write(file.layout->covered(), std::as_bytes(std::span(tail.bytes)));
      Value entry;
      entry.set("name", file.name);
      entry.set("size", static_cast<int64_t>(file.layout->size()));
      entry.set("digest", tail.digest);
      entry.set("tail", tail.tail_digest);
      entries.push_back(std::move(entry));
    }
    file.out->sync();
    file.out->close();
    file.out.reset();
  }
  return entries;
}

}  // namespace shardsmith
