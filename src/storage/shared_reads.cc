#include "storage/shared_reads.h"

#include <algorithm>

#include "base/checksum.h"
#include "base/error.h"

namespace shardsmith {
namespace {

// An announcement: "host\n", then "digest of the files\n", then a line for each file, empty where nothing is read of
// it, else a digit ('a' to 'p') for every four blocks.
struct Announcement {
  std::string host, files;
  std::vector<std::vector<bool>> blocks;

  bool has(size_t file, size_t block) const { return block < blocks[file].size() && blocks[file][block]; }
};

std::string digest_of(const Index& index) {
  std::string text;
  for (const FileEntry& file : index.files) text += std::to_string(file.size) + " ";
  return str(index.files.size(), " ", crc32(std::as_bytes(std::span(text.data(), text.size()))));
}

Announcement parse(const std::string& message) {
  Announcement result;
  const size_t host = message.find('\n');
  const size_t files = host == std::string::npos ? host : message.find('\n', host + 1);
  if (files == std::string::npos)
    fail(ErrorKind::kInvalidArgument, "what a rank tells of its reads can't be understood");
  result.host = message.substr(0, host);
  result.files = message.substr(host + 1, files - host - 1);
  size_t at = files + 1;
  while (at < message.size()) {
    const size_t end = message.find('\n', at);
    if (end == std::string::npos) fail(ErrorKind::kInvalidArgument, "what a rank tells of its reads is cut off");
    std::vector<bool>& blocks = result.blocks.emplace_back();
    for (; at < end; ++at)
      for (int bit = 0; bit < 4; ++bit) blocks.push_back(((message[at] - 'a') >> bit) & 1);
    at = end + 1;
  }
  return result;
}

}  // namespace

std::string SharedReads::announce(const Plan& plan, const Index& index, const std::string& host) {
  std::vector<std::string> digits(index.files.size());
  for (const Read& read : plan.reads) {
    if (read.length == 0 || read.file >= index.files.size()) continue;
    std::string& own = digits[read.file];
    if (own.empty()) own.assign(index.files[read.file].size / kBlock / 4 + 1, 'a');
    const uint64_t last = std::min<uint64_t>((read.offset + read.length - 1) / kBlock, own.size() * 4 - 1);
    for (uint64_t block = read.offset / kBlock; block <= last; ++block)
      own[block / 4] = static_cast<char>('a' + ((own[block / 4] - 'a') | 1 << block % 4));
  }
  std::string result = str(host, "\n", digest_of(index), "\n");
  for (const std::string& file : digits) result += file + "\n";
  return result;
}

SharedReads::SharedReads(const std::vector<std::string>& announcements, int rank) {
  const auto self = static_cast<size_t>(rank);
  if (self >= announcements.size()) fail(ErrorKind::kInvalidArgument, "there is no announcement of rank ", rank);
  const Announcement own = parse(announcements[self]);
  std::vector<Announcement> here;  // of the ranks on this machine
  size_t me = 0;
  for (size_t other = 0; other < announcements.size(); ++other) {
    Announcement told = other == self ? own : parse(announcements[other]);
    if (told.host != own.host || told.files != own.files || told.blocks.size() != own.blocks.size()) continue;
    if (other == self) me = here.size();
    here.push_back(std::move(told));
  }

  std::vector<bool> shares(here.size());
  uint32_t place = 0;
  for (size_t file = 0; file < own.blocks.size(); ++file) {
    size_t count = 0;
    for (const Announcement& one : here) count = std::max(count, one.blocks[file].size());
    shared_.emplace_back(count);
    place_.emplace_back(count);
    for (size_t block = 0; block < count; ++block) {
      const auto reads = [&](const Announcement& one) { return one.has(file, block); };
      place_[file][block] = place;
      if (std::count_if(here.begin(), here.end(), reads) < 2) continue;
      ++place;
      shared_[file][block] = reads(own);
      for (size_t i = 0; i < here.size(); ++i) shares[i] = shares[i] || reads(here[i]);
    }
  }
  for (size_t i = 0; i < me; ++i) own_ += shares[i];
  ranks_ = std::max<uint64_t>(1, static_cast<uint64_t>(std::count(shares.begin(), shares.end(), true)));
}

bool SharedReads::is_shared(uint32_t file, uint64_t begin, uint64_t end) const {
  if (file >= shared_.size() || begin >= end) return false;
  const std::vector<bool>& blocks = shared_[file];
  const uint64_t last = std::min<uint64_t>((end - 1) / kBlock + 1, blocks.size());
  for (uint64_t block = begin / kBlock; block < last; ++block)
    if (blocks[block]) return true;
  return false;
}

uint64_t SharedReads::turn(uint32_t file, uint64_t offset) const {
  const uint64_t block = offset / kBlock;
  const uint64_t at = file < place_.size() && block < place_[file].size() ? place_[file][block] : 0;
  const uint64_t part = at / (kPart / kBlock);
  const uint64_t round = part / ranks_;  // a round: each rank begins with another part of it
  return (round * ranks_ + (part % ranks_ + ranks_ - own_ % ranks_) % ranks_) * (kPart / kBlock) +
         at % (kPart / kBlock);
}

}  // namespace shardsmith
