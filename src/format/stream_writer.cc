#include "format/stream_writer.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"

namespace shardsmith {
namespace {

constexpr uint64_t kBuffer = 8 << 20;
constexpr uint64_t kInCache = 128 << 10;  // copied, then summed while it is in the second-level cache

}  // namespace

StreamWriter::StreamWriter(WriteFile& file, uint64_t size) : file_(file) {
  const uint64_t one = std::min(kBuffer, (size + kBlock - 1) / kBlock * kBlock);
  buffers_.emplace_back(one);
  if (size > one) buffers_.emplace_back(one);
}

StreamWriter::~StreamWriter() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

std::span<std::byte> StreamWriter::room() {
  if (filled_ == buffers_[current_].size()) hand_over();
  const uint64_t in_buffer = buffers_[current_].size() - filled_;
  const uint64_t in_block = kBlock - position_ % kBlock;
  return {buffers_[current_].data() + filled_, static_cast<size_t>(std::min(in_buffer, in_block))};
}

void StreamWriter::added(std::span<const std::byte> bytes) {
  piece_crc_ = crc32(bytes, piece_crc_);
  piece_length_ += bytes.size();
  position_ += bytes.size();
  filled_ += bytes.size();
  if (position_ % kBlock == 0) {
    fold();
    block_crcs_.push_back(block_crc_);
    block_crc_ = 0;
  }
}

void StreamWriter::fold() {
  section_crc_ = crc32_combine(section_crc_, piece_crc_, piece_length_);
  block_crc_ = crc32_combine(block_crc_, piece_crc_, piece_length_);
  piece_crc_ = 0;
  piece_length_ = 0;
}

void StreamWriter::append(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const auto out = room();
    const size_t n = std::min({bytes.size(), out.size(), static_cast<size_t>(kInCache)});
    std::memcpy(out.data(), bytes.data(), n);
    added(out.first(n));
    bytes = bytes.subspan(n);
  }
}

void StreamWriter::append(const ByteSource& source) {
  if (source.size == 0) return;
  if (source.data) return append({source.data, static_cast<size_t>(source.size)});
  for (uint64_t done = 0; done < source.size;) {
    const auto space = room();
    const auto out = space.first(std::min<uint64_t>(source.size - done, space.size()));
    source.fill(done, out);
    added(out);
    done += out.size();
  }
}

void StreamWriter::seek(uint64_t position) {
  if (position == position_) return;
  if (filled_ > 0) hand_over();
  fold();
  block_crc_ = 0;
  position_ = position;
}

uint32_t StreamWriter::take_section_crc() {
  fold();
  const uint32_t crc = section_crc_;
  section_crc_ = 0;
  return crc;
}

std::vector<uint32_t> StreamWriter::take_block_crcs() {
  fold();
  std::vector<uint32_t> crcs = block_crcs_;
  if (position_ % kBlock != 0) crcs.push_back(block_crc_);
  return crcs;
}

void StreamWriter::wait_idle(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [&] { return !job_; });
  if (error_) std::rethrow_exception(error_);
}

void StreamWriter::hand_over() {
  std::unique_lock lock(mutex_);
  wait_idle(lock);
  job_ = Job{position_ - filled_, {buffers_[current_].data(), filled_}};
  if (!thread_.joinable()) thread_ = std::thread([this] { write_loop(); });
  changed_.notify_all();
  current_ = (current_ + 1) % buffers_.size();
  filled_ = 0;
  if (buffers_.size() == 1) wait_idle(lock);
}

void StreamWriter::write_loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return job_ || stop_; });
    if (stop_) return;
    const Job job = *job_;
    lock.unlock();
    std::exception_ptr error;
    try {
      file_.write(job.offset, job.bytes);
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    if (error) error_ = error;
    job_.reset();
    changed_.notify_all();
  }
}

void StreamWriter::finish() {
  std::unique_lock lock(mutex_);
  wait_idle(lock);
  if (filled_ > 0) file_.write(position_ - filled_, {buffers_[current_].data(), filled_});
  filled_ = 0;
}

}  // namespace shardsmith
