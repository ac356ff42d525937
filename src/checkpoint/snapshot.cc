#include "checkpoint/snapshot.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <new>
#include <thread>

#include "storage/large_pages.h"
#include "storage/streaming_copy.h"

namespace shardsmith {
namespace {

constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kAlignment = 64;
// Less is copied faster than a thread is started.
constexpr uint64_t kWorthAThread = 4 << 20;
// What a thread takes at a time: while the other is held up it goes on alone.
constexpr uint64_t kShare = 16 << 20;

uint64_t rounded(uint64_t size, uint64_t unit) { return (size + unit - 1) / unit * unit; }

using Key = std::pair<const std::byte*, uint64_t>;

struct CopyJob {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  uint64_t size = 0;
};

// Bytes [begin, end) of all jobs, counted through.
void run(const std::vector<CopyJob>& jobs, uint64_t begin, uint64_t end) {
  uint64_t at = 0;
  for (const CopyJob& job : jobs) {
    const uint64_t first = std::max(begin, at), last = std::min(end, at + job.size);
    if (first < last) streaming_copy(job.to + (first - at), job.from + (first - at), last - first);
    at += job.size;
  }
}

}  // namespace

SnapshotBuffer::~SnapshotBuffer() {
  if (data_) ::munmap(data_, capacity_);
}

std::byte* SnapshotBuffer::reserve(uint64_t size) {
  if (size <= capacity_) return data_;
  if (data_) ::munmap(data_, capacity_);  // first: old and new together may be more than there is
  data_ = nullptr;
  capacity_ = 0;
  const uint64_t wanted = rounded(size, kHugePage);
  void* memory = ::mmap(nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
  prefer_large_pages({data_, static_cast<size_t>(wanted)});
  capacity_ = wanted;
  return data_;
}

uint64_t snapshot_bytes(const std::vector<const PtContent*>& contents) {
  uint64_t bytes = 0;
  std::map<Key, bool> seen;
  for (const PtContent* content : contents) {
    for (const ByteSource& source : content->storages) {
      if (source.data && !seen.emplace(Key{source.data, source.size}, true).second) continue;
      bytes += rounded(source.size, kAlignment);
    }
  }
  return bytes;
}

void take_snapshot(const std::vector<PtContent*>& contents, SnapshotBuffer& buffer) {
  std::byte* const memory = buffer.reserve(snapshot_bytes({contents.begin(), contents.end()}));
  std::vector<CopyJob> jobs;
  std::vector<const std::byte*> places;  // of all storages, in order
  std::map<Key, const std::byte*> seen;
  uint64_t at = 0, bytes = 0;
  for (const PtContent* content : contents) {
    for (const ByteSource& source : content->storages) {
      std::byte* to = memory + at;
      if (source.data) {
        const auto [place, is_new] = seen.emplace(Key{source.data, source.size}, to);
        places.push_back(place->second);
        if (!is_new) continue;
        jobs.push_back({source.data, to, source.size});
        bytes += source.size;
      } else {
        if (source.size > 0) source.fill(0, {to, static_cast<size_t>(source.size)});
        places.push_back(to);
      }
      at += rounded(source.size, kAlignment);
    }
  }
  if (bytes < kWorthAThread) {
    run(jobs, 0, bytes);
  } else {
    std::atomic<uint64_t> next{0};
    const auto work = [&] {
      for (uint64_t begin; (begin = next.fetch_add(kShare)) < bytes;) run(jobs, begin, std::min(bytes, begin + kShare));
    };
    std::thread other(work);
    work();
    other.join();
  }
  auto place = places.begin();
  for (PtContent* content : contents)
    for (ByteSource& source : content->storages) source = {source.size, *place++, {}};
}

}  // namespace shardsmith
