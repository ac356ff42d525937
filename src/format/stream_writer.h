// Writes a file from its start to its end through two alternating buffers: while one is being filled and summed,
// a thread writes the other. Checksums are taken while the bytes are in cache. Used by one thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "format/source.h"
#include "storage/storage.h"

namespace shardsmith {

class StreamWriter {
 public:
  static constexpr uint64_t kBlock = 1 << 20;

  // `size` is the file's whole size, known beforehand. `file` must outlive this.
  StreamWriter(WriteFile& file, uint64_t size);
  ~StreamWriter();
  StreamWriter(const StreamWriter&) = delete;

  void append(std::span<const std::byte> bytes);
  void append(std::string_view bytes) { append(std::as_bytes(std::span(bytes))); }
  void append(const ByteSource& source);

  // CRC-32 of what was appended since the last call.
  uint32_t take_section_crc();
  // CRC-32 of each block of the file so far; the last block may be shorter. Ends that block: call it once.
  std::vector<uint32_t> take_block_crcs();
  uint64_t position() const { return position_; }
  // Goes on at a multiple of kBlock. (Block checksums are then those of the blocks in the order of writing.)
  void seek(uint64_t position);

  // All bytes are written (not synced) when it returns. Throws what the writing thread met.
  void finish();

 private:
  // Room for the next bytes: within the buffer and the block. Flushes a full buffer first.
  std::span<std::byte> room();
  void added(std::span<const std::byte> bytes);
  void fold();
  void hand_over();
  void write_loop();
  void wait_idle(std::unique_lock<std::mutex>& lock);

  WriteFile& file_;
  std::vector<AlignedBuffer> buffers_;
  size_t current_ = 0, filled_ = 0;
  uint64_t position_ = 0;

  uint32_t piece_crc_ = 0, section_crc_ = 0, block_crc_ = 0;
  uint64_t piece_length_ = 0;  // bytes that are in piece_crc_ only
  std::vector<uint32_t> block_crcs_;

  std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  struct Job {
    uint64_t offset;
    std::span<const std::byte> bytes;
  };
  std::optional<Job> job_;
  bool stop_ = false;
  std::exception_ptr error_;
  std::thread thread_;  // starts with the first full buffer
};

}  // namespace shardsmith
