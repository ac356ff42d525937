#include "format/pt_write.h"

namespace shardsmith {
namespace {

constexpr uint64_t kLargeRecord = 64 << 10;
constexpr std::string_view kLittle = "little", kVersion = "3\n";

}  // namespace

TorchZip::TorchZip(std::string_view pickle) {
  add("data.pkl", bytes_of(pickle), 64);
  add("byteorder", bytes_of(kLittle), 64);
}

void TorchZip::add_storage(const ByteSource& source) {
  add("data/" + std::to_string(storages_++), source, source.size >= kLargeRecord ? 4096 : 64);
}

void TorchZip::add_version() { add("version", bytes_of(kVersion), 64); }

void TorchZip::add(const std::string& name, const ByteSource& source, uint64_t alignment) {
  layout_.add("archive/" + name, source.size, alignment);
  sources_.push_back(source);
}

uint64_t TorchZip::size() const {
  return layout_.end() + layout_.directory(std::vector<uint32_t>(sources_.size(), 0)).size();
}

void TorchZip::write(StreamWriter& out, const std::function<void(size_t record)>& before) const {
  std::vector<uint32_t> crcs(sources_.size(), 0);
  for (size_t i = 0; i < sources_.size(); ++i) {
    if (before) before(i);
    out.append(layout_.local_header(i));
    out.take_section_crc();
    out.append(sources_[i]);
    crcs[i] = out.take_section_crc();
    out.append(layout_.descriptor(i, crcs[i]));
  }
  out.append(layout_.directory(crcs));
}

}  // namespace shardsmith
