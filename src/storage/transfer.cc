// Executing a Plan.
//
// The plan's raw reads are gathered into spans of one file that fit a buffer. Where block checksums are checked, the
// spans together cover every block that is needed, whole, and each byte of it once: a block that two spans share
// is checked in two pieces whose checksums are joined by arithmetic. Threads take spans in order; while one copies, the
// other reads.
#include "storage/transfer.h"

#include <zlib.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "base/checksum.h"
#include "base/error.h"

namespace shardsmith {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kMaxBuffer = 16 << 20;

uint64_t round_down(uint64_t value, uint64_t unit) { return value / unit * unit; }
uint64_t round_up(uint64_t value, uint64_t unit) { return round_down(value + unit - 1, unit); }

// Bytes [begin, end) of a file, and the reads that lie in them. [check_begin, end) is summed here.
struct Span {
  uint32_t file = 0;
  uint64_t begin = 0, check_begin = 0, end = 0;
  std::vector<const Read*> reads;
  bool shared = false;  // other ranks read it too: through the page cache
  bool deflated() const { return reads.front()->inflated != 0; }
};

const BlockChecksums* checksums_of(const FileEntry& file, const TransferOptions& options) {
  const BlockChecksums* sums = options.check && !options.ledger ? file.checksums.get() : nullptr;
  if (!sums) return nullptr;
  if (sums->block_size == 0 || sums->block_size > (64 << 20) || sums->covered > file.size ||
      sums->crc.size() != (sums->covered + sums->block_size - 1) / sums->block_size)
    fail(ErrorKind::kCorrupt, file.path, ": its list of block checksums doesn't fit the file");
  return sums;
}

// Where the check of bytes up to `end` must stop: the end of the block, or of what is covered.
uint64_t block_end(const BlockChecksums* sums, uint64_t end) {
  if (!sums || end >= sums->covered) return end;
  return std::min(round_up(end, sums->block_size), sums->covered);
}

uint64_t block_begin(const BlockChecksums* sums, uint64_t begin) {
  return !sums || begin >= sums->covered ? begin : round_down(begin, sums->block_size);
}

std::vector<Span> make_spans(const Plan& plan, const Index& index, const TransferOptions& options, uint64_t buffer) {
  std::vector<Span> spans;
  uint64_t summed = 0;  // up to here the bytes of this file belong to a span
  const BlockChecksums* sums = nullptr;
  const auto finish = [&](uint64_t next_begin) {
    if (spans.empty() || spans.back().deflated()) return;
    Span& span = spans.back();
    // The block's rest goes to the next span where that needs the same block.
    const uint64_t whole = block_end(sums, span.end);
    if (next_begin >= whole) span.end = std::max(span.end, whole);
    summed = span.end;
  };
  constexpr uint64_t kNever = ~uint64_t{0};
  for (const Read& read : plan.reads) {
    if (read.file >= index.files.size())
      fail(ErrorKind::kInvalidArgument, "a plan reads file ", read.file, " of ", index.files.size());
    const uint64_t end = read.offset + read.length;
    if (end < read.offset || end > index.files[read.file].size)
      fail(ErrorKind::kCorrupt, index.files[read.file].path, ": truncated: bytes ", read.offset, " to ", end,
           " are needed, the file has ", index.files[read.file].size);
    if (spans.empty() || spans.back().file != read.file) {
      finish(kNever);
      sums = checksums_of(index.files[read.file], options);
      summed = 0;
    }
    if (read.inflated != 0) {
      finish(kNever);
      spans.push_back({read.file, read.offset, read.offset, end, {&read}});
      continue;
    }
    if (!spans.empty() && spans.back().file == read.file && !spans.back().deflated()) {
      Span& last = spans.back();
      const uint64_t gap = read.offset > last.end ? read.offset - last.end : 0;
      const uint64_t first_page = round_down(last.begin, kPage);
      const bool near = gap <= kPage || block_begin(sums, read.offset) <= block_end(sums, last.end);
      if (read.offset >= last.begin && near &&
          round_up(block_end(sums, std::max(end, last.end)), kPage) - first_page <= buffer) {
        last.end = std::max(last.end, end);
        last.reads.push_back(&read);
        continue;
      }
      finish(block_begin(sums, read.offset));
    }
    const uint64_t check = std::max(summed, block_begin(sums, read.offset));
    spans.push_back({read.file, std::min(check, read.offset), check, std::max(end, check), {&read}});
  }
  finish(kNever);
  return spans;
}

class Transfer {
 public:
  Transfer(const Plan& plan, const Index& index, std::span<const Destination> destinations, Storage& storage,
           const TransferOptions& options)
      : plan_(plan), index_(index), destinations_(destinations), storage_(storage), options_(options) {}

  void run() {
    const int threads = std::max(1, options_.threads);
    buffer_size_ = round_up(std::min<uint64_t>(kMaxBuffer, options_.budget / threads), kPage);
    uint64_t longest = 0, block = 0;
    for (const Read& read : plan_.reads) {
      if (read.inflated == 0) longest = std::max(longest, read.length);
      if (read.file < index_.files.size())
        if (const BlockChecksums* sums = checksums_of(index_.files[read.file], options_))
          block = std::max(block, sums->block_size);
    }
    buffer_size_ = std::max(buffer_size_, round_up(longest + 2 * block, kPage) + 2 * kPage);
    spans_ = make_spans(plan_, index_, options_, buffer_size_);
    if (options_.shared) order();
    for (const Span& span : spans_) {
      total_ += span.end - span.begin;
      ++files_[key_of(span)].left;
    }
    const size_t workers = std::min<size_t>(threads, spans_.size());
    std::vector<std::thread> others;
    for (size_t i = 1; i < workers; ++i) others.emplace_back([this] { work(); });
    work();
    for (std::thread& thread : others) thread.join();
    if (error_) std::rethrow_exception(error_);
  }

 private:
  struct OpenFile {
    std::shared_ptr<ReadFile> file;
    size_t left = 0;  // spans that still need it
  };
  using FileKey = std::pair<uint32_t, bool>;  // shared spans have the file open for themselves
  static FileKey key_of(const Span& span) { return {span.file, span.shared}; }

  struct Piece {
    uint64_t begin, length;
    uint32_t crc;
  };

  // What others read too comes first, while they are at it.
  void order() {
    const SharedReads& shared = *options_.shared;
    for (Span& span : spans_) span.shared = shared.is_shared(span.file, span.begin, span.end);
    std::stable_sort(spans_.begin(), spans_.end(), [&](const Span& a, const Span& b) {
      if (a.shared != b.shared) return a.shared;
      return a.shared && shared.turn(a.file, a.begin) < shared.turn(b.file, b.begin);
    });
  }

  void work() {
    try {
      TransferBuffers own;
      TransferBuffers& pool = options_.buffers ? *options_.buffers : own;
      AlignedBuffer buffer = pool.take(buffer_size_);
      for (size_t i = next_++; i < spans_.size() && !stop_; i = next_++) {
        const Span& span = spans_[i];
        const std::shared_ptr<ReadFile> file = open(span);
        if (span.deflated())
          inflate_span(span, *file, buffer);
        else
          copy_span(span, *file, buffer);
        finished(span);
      }
      pool.give_back(std::move(buffer));
    } catch (...) {
      std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      stop_ = true;
    }
  }

  std::shared_ptr<ReadFile> open(const Span& span) {
    std::lock_guard lock(mutex_);
    OpenFile& open = files_[key_of(span)];
    if (!open.file) {
      const FileEntry& entry = index_.files[span.file];
      open.file = storage_.open_read(entry.path, span.shared ? Access::kBuffered : Access::kDirect);
      if (open.file->size() != entry.size)
        fail(ErrorKind::kCorrupt, entry.path, ": has ", open.file->size(), " bytes, but had ", entry.size,
             " when its header was read: someone is writing to it");
    }
    return open.file;
  }

  void finished(const Span& span) {
    std::lock_guard lock(mutex_);
    OpenFile& open = files_[key_of(span)];
    if (--open.left == 0) open.file.reset();
    done_ += span.end - span.begin;
    if (options_.progress) options_.progress({"read", done_, total_, "bytes"});
  }

  void copy_span(const Span& span, ReadFile& file, AlignedBuffer& buffer) {
    const uint64_t first = round_down(span.begin, kPage);
    const uint64_t last = std::min(round_up(span.end, kPage), file.size());
    file.read(first, {buffer.data(), static_cast<size_t>(last - first)});
    if (options_.buffers) options_.buffers->count(last - first);
    if (options_.check && options_.ledger)
      options_.ledger->see(span.file, span.begin,
                           {buffer.data() + (span.begin - first), static_cast<size_t>(span.end - span.begin)});
    if (const BlockChecksums* sums = checksums_of(index_.files[span.file], options_))
      check(span, *sums, buffer.data() - first);
    for (const Read* read : span.reads)
      copy_all(*read, {buffer.data() + (read->offset - first), static_cast<size_t>(read->length)});
  }

  void copy_all(const Read& read, std::span<const std::byte> bytes) {
    for (const Copy& copy : read.copies) {
      if (copy.buffer >= destinations_.size())
        fail(ErrorKind::kInvalidArgument, "a plan writes to buffer ", copy.buffer, " of ", destinations_.size());
      try {
        run_copy(copy, bytes, destinations_[copy.buffer].bytes);
      } catch (const Error& e) {
        const std::string name = copy.tensor < index_.tensors.size() ? index_.tensors[copy.tensor].name : "?";
        throw Error(e.kind(), str("tensor '", name, "': ", e.what()), e.rank());
      }
    }
  }

  // `base` + n is the file's byte n.
  void check(const Span& span, const BlockChecksums& sums, const std::byte* base) {
    uint64_t at = span.check_begin;
    const uint64_t end = std::min(span.end, sums.covered);
    while (at < end) {
      const uint64_t block = at / sums.block_size;
      const uint64_t begin = block * sums.block_size;
      const uint64_t whole = std::min(begin + sums.block_size, sums.covered);
      const uint64_t stop = std::min(end, whole);
      const uint32_t crc = crc32({base + at, static_cast<size_t>(stop - at)});
      if (at == begin && stop == whole)
        compare(span.file, sums, block, crc);
      else
        add_piece(span.file, sums, block, {at, stop - at, crc}, whole - begin);
      at = stop;
    }
  }

  void add_piece(uint32_t file, const BlockChecksums& sums, uint64_t block, Piece piece, uint64_t whole) {
    std::vector<Piece> pieces;
    {
      std::lock_guard lock(mutex_);
      std::vector<Piece>& known = pieces_[{file, block}];
      known.push_back(piece);
      uint64_t length = 0;
      for (const Piece& p : known) length += p.length;
      if (length < whole) return;
      pieces = std::move(known);
      pieces_.erase({file, block});
    }
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
    uint32_t crc = 0;
    for (const Piece& p : pieces) crc = crc32_combine(crc, p.crc, p.length);
    compare(file, sums, block, crc);
  }

  void compare(uint32_t file, const BlockChecksums& sums, uint64_t block, uint32_t crc) {
    if (crc == sums.crc[block]) return;
    const uint64_t begin = block * sums.block_size, end = begin + sums.block_size;
    std::set<std::string> names;
    for (const Read& read : plan_.reads) {
      if (read.file != file || read.inflated != 0) continue;
      for (const Copy& copy : read.copies) {
        uint64_t last = read.offset + copy.source + static_cast<uint64_t>(size_of(copy.from));
        for (size_t d = 0; d < copy.extent.size(); ++d)
          last += static_cast<uint64_t>((copy.extent[d] - 1) * copy.source_step[d]);
        if (read.offset + copy.source < end && last > begin && copy.tensor < index_.tensors.size() && names.size() < 8)
          names.insert(index_.tensors[copy.tensor].name);
      }
    }
    std::string list;
    for (const std::string& name : names) list += (list.empty() ? "'" : ", '") + name + "'";
    fail(ErrorKind::kCorrupt, index_.files[file].path, ": damaged: bytes ", begin, " to ", std::min(end, sums.covered),
         " don't match their checksum; they hold tensor ", list.empty() ? "data" : list);
  }

  // The stored bytes go through `buffer`; the inflated ones need memory of their own, as long as the record.
  void inflate_span(const Span& span, ReadFile& file, AlignedBuffer& buffer) {
    const Read& read = *span.reads.front();
    const auto bytes = std::make_unique_for_overwrite<std::byte[]>(read.inflated);
    z_stream stream{};
    if (inflateInit2(&stream, -MAX_WBITS) != Z_OK) throw std::bad_alloc();
    const std::unique_ptr<z_stream, decltype(&inflateEnd)> guard(&stream, inflateEnd);
    uint64_t in = 0, out = 0;
    int result = Z_OK;
    while (out < read.inflated && result != Z_STREAM_END) {  // a plan may need less than the whole record
      if (stream.avail_in == 0 && in < read.length) {
        const uint64_t n = std::min<uint64_t>(read.length - in, buffer.size());
        file.read(read.offset + in, {buffer.data(), static_cast<size_t>(n)});
        in += n;
        if (options_.buffers) options_.buffers->count(n);
        stream.next_in = reinterpret_cast<Bytef*>(buffer.data());
        stream.avail_in = static_cast<uInt>(n);
      }
      const uInt room = static_cast<uInt>(std::min<uint64_t>(read.inflated - out, 1 << 30));
      stream.next_out = reinterpret_cast<Bytef*>(bytes.get() + out);
      stream.avail_out = room;
      result = inflate(&stream, Z_NO_FLUSH);
      out += room - stream.avail_out;
      const bool stuck = result == Z_BUF_ERROR && (stream.avail_in != 0 || in == read.length);
      if ((result != Z_OK && result != Z_STREAM_END && result != Z_BUF_ERROR) || stuck) break;
    }
    if (out != read.inflated)
      fail(ErrorKind::kCorrupt, file.path(), ": the deflated record at ", read.offset,
           " is damaged, or shorter than the ", read.inflated, " bytes that are needed of it");
    copy_all(read, {bytes.get(), static_cast<size_t>(read.inflated)});
  }

  const Plan& plan_;
  const Index& index_;
  std::span<const Destination> destinations_;
  Storage& storage_;
  const TransferOptions& options_;

  uint64_t buffer_size_ = 0;
  std::vector<Span> spans_;
  std::atomic<size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;  // guards all below
  std::map<FileKey, OpenFile> files_;
  std::map<std::pair<uint32_t, uint64_t>, std::vector<Piece>> pieces_;  // of blocks that spans share
  uint64_t done_ = 0, total_ = 0;
  std::exception_ptr error_;
};

}  // namespace

AlignedBuffer TransferBuffers::take(uint64_t size) {
  {
    std::lock_guard lock(mutex_);
    for (AlignedBuffer& buffer : free_) {
      if (buffer.size() < size) continue;
      std::swap(buffer, free_.back());
      AlignedBuffer taken = std::move(free_.back());
      free_.pop_back();
      return taken;
    }
    free_.clear();  // too small for what is read now
  }
  return AlignedBuffer(size);
}

void TransferBuffers::give_back(AlignedBuffer buffer) {
  std::lock_guard lock(mutex_);
  free_.push_back(std::move(buffer));
}

void execute(const Plan& plan, const Index& index, std::span<const Destination> destinations, Storage& storage,
             const TransferOptions& options) {
  Transfer(plan, index, destinations, storage, options).run();
}

}  // namespace shardsmith
