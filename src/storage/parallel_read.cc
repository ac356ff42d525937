#include "storage/parallel_read.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>

namespace shardsmith {
namespace {

constexpr uint64_t kPage = 4096;

}  // namespace

ParallelReader::ParallelReader(int threads, uint64_t unit)
    : unit_(unit), threads_(static_cast<size_t>(std::max(1, threads))) {}

void ParallelReader::read(ReadFile& file, uint64_t begin, uint64_t end, const Look& look) {
  if (begin >= end) return;
  // Whole pages, so that the reads can go around the page cache.
  const uint64_t first = begin / kPage * kPage;
  const uint64_t last = std::max(end, std::min((end + kPage - 1) / kPage * kPage, file.size()));
  const uint64_t units = (last - first + unit_ - 1) / unit_;
  const auto workers = static_cast<size_t>(std::min<uint64_t>(threads_, units));
  while (buffers_.size() < workers) buffers_.emplace_back(static_cast<size_t>(unit_));

  std::atomic<uint64_t> next{0}, stop{units};  // units from `stop` on need not be read any more
  std::mutex mutex;                            // guards the two below
  std::exception_ptr error;
  uint64_t failed = units;
  const auto work = [&](size_t worker) {
    for (uint64_t unit = next++; unit < stop; unit = next++) {
      try {
        const uint64_t at = first + unit * unit_;
        const std::span<std::byte> bytes(buffers_[worker].data(), static_cast<size_t>(std::min(unit_, last - at)));
        file.read(at, bytes);
        const uint64_t from = std::max(at, begin), to = std::min(at + bytes.size(), end);
        if (from < to) look(from, bytes.subspan(static_cast<size_t>(from - at), static_cast<size_t>(to - from)));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (unit < failed) {
          failed = unit;
          error = std::current_exception();
          stop = unit;
        }
      }
    }
  };
  std::vector<std::thread> others;
  for (size_t i = 1; i < workers; ++i) others.emplace_back(work, i);
  work(0);
  for (std::thread& thread : others) thread.join();
  if (error) std::rethrow_exception(error);
}

}  // namespace shardsmith
