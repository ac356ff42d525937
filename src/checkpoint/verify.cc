#include "checkpoint/verify.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <optional>

#include "base/checksum.h"
#include "base/error.h"
#include "checkpoint/load.h"
#include "format/pt.h"

namespace shardsmith {
namespace {

// One file of the manifest. What is wrong with it is added to `damage`; `done` counts its bytes.
void verify_file(Storage& storage, const std::string& path, const ManifestFile& file, ParallelReader& reader,
                 std::vector<std::string>& damage, const std::function<void(uint64_t)>& done) {
  check_file(storage, path, file);
  const PtRecord record = read_pt_record(storage, path);
  std::optional<Index> index;
  try {
    index = read_pt(storage, path);
  } catch (const Error& e) {
    damage.push_back(e.what());
  }
  if (!record.checksums) return;
  auto blocks = verify_blocks(storage, path, *record.checksums, index ? &*index : nullptr, 0, reader, done);
  std::move(blocks.begin(), blocks.end(), std::back_inserter(damage));
  if (tail_digest(storage, path) != file.tail) {
    damage.push_back(str(path, ": bytes ", record.checksums->covered, " to ", file.size,
                         " (slice list, checksums and directory) don't match the manifest"));
  }
  done(file.size - std::min(file.size, record.checksums->covered));
}

}  // namespace

std::string tensors_in(const Index& index, uint32_t number, uint64_t begin, uint64_t end) {
  std::string names;
  int count = 0;
  for (const TensorEntry& tensor : index.tensors) {
    for (const Slice& slice : tensor.slices) {
      if (slice.file != number) continue;
      uint64_t last = slice.offset;
      for (size_t d = 0; d < slice.strides.size(); ++d) {
        last += static_cast<uint64_t>(std::max<int64_t>(slice.box.extent[d] - 1, 0) * slice.strides[d] *
                                      size_of(tensor.dtype));
      }
      if (slice.encoding == Encoding::kDeflated) last = slice.offset + slice.stored;
      if (slice.offset >= end || last + static_cast<uint64_t>(size_of(tensor.dtype)) <= begin) continue;
      if (++count <= 4) names += (names.empty() ? "'" : ", '") + tensor.name + "'";
      break;
    }
  }
  if (count == 0) return "no tensor";
  return str(count == 1 ? "tensor " : "tensors ", names, count > 4 ? str(" and ", count - 4, " more") : "");
}

std::vector<std::string> verify_blocks(Storage& storage, const std::string& path, const BlockChecksums& sums,
                                       const Index* index, uint32_t number, ParallelReader& reader,
                                       const std::function<void(uint64_t)>& done) {
  if (sums.block_size == 0 || reader.unit() % sums.block_size != 0)
    fail(ErrorKind::kUnsupported, path, ": checksums of blocks of ", sums.block_size, " bytes");
  std::mutex mutex;  // guards the two below, and `done`
  std::vector<uint64_t> bad;
  const auto file = storage.open_read(path, Access::kDirect);
  reader.read(*file, 0, sums.covered, [&](uint64_t at, std::span<const std::byte> bytes) {
    std::vector<uint64_t> here;
    for (uint64_t in = 0; in < bytes.size(); in += sums.block_size) {
      const uint64_t block = (at + in) / sums.block_size;
      const auto size = static_cast<size_t>(std::min<uint64_t>(sums.block_size, bytes.size() - in));
      if (crc32(bytes.subspan(static_cast<size_t>(in), size)) != sums.crc.at(static_cast<size_t>(block)))
        here.push_back(block);
    }
    const std::lock_guard lock(mutex);
    bad.insert(bad.end(), here.begin(), here.end());
    done(bytes.size());
  });

  std::sort(bad.begin(), bad.end());
  std::vector<std::string> damage;
  for (size_t i = 0; i < bad.size();) {
    size_t next = i + 1;
    while (next < bad.size() && bad[next] == bad[next - 1] + 1) ++next;
    const uint64_t from = bad[i], to = bad[next - 1];
    const uint64_t begin = from * sums.block_size, end = std::min((to + 1) * sums.block_size, sums.covered);
    damage.push_back(str(
        path, ": bytes ", begin, " to ", end, " (block", to > from ? "s " : " ", from, to > from ? str(" to ", to) : "",
        ") don't match their checksum: ", index ? tensors_in(*index, number, begin, end) : "tensors unknown"));
    i = next;
  }
  return damage;
}

std::vector<std::string> verify_partial(Storage& storage, const std::string& folder, const Manifest& manifest,
                                        const VerifyOptions& options) {
  std::vector<std::string> damage;
  uint64_t total = 0, done = 0;
  for (const ManifestFile& file : manifest.files) total += file.size;
  ParallelReader reader(options.threads, kVerifyUnit);
  for (const ManifestFile& file : manifest.files) {
    try {
      verify_file(storage, join(folder, file.name), file, reader, damage, [&](uint64_t bytes) {
        done += bytes;
        if (options.progress) options.progress({"verify", done, total, "bytes"});
      });
    } catch (const Error& e) {
      damage.push_back(e.what());
    }
  }
  if (!damage.empty()) return damage;
  try {  // each file is sound; together they must hold every tensor
    read_partial(storage, folder, manifest);
  } catch (const Error& e) {
    damage.push_back(e.what());
  }
  return damage;
}

std::vector<std::string> verify_partial(Storage& storage, const std::string& folder, const Manifest& manifest,
                                        const Progress& progress) {
  return verify_partial(storage, folder, manifest, VerifyOptions{2, progress});
}

}  // namespace shardsmith
