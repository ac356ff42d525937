#include "format/pt_file.h"

#include <algorithm>
#include <cstring>

#include "base/checksum.h"
#include "base/error.h"
#include "format/pickle.h"

namespace shardsmith {
namespace {

constexpr uint64_t kBlock = StreamWriter::kBlock;

std::vector<PtSlice> slice_list(const PtContent& content, const std::vector<size_t>& order, const std::string& path) {
  std::vector<PtSlice> slices;
  std::vector<bool> written(content.tensors.size(), false);
  for (size_t number = 0; number < order.size(); ++number) {
    const PtTensor& tensor = content.tensors[order[number]];
    written[order[number]] = true;
    if (!tensor.name.empty()) slices.push_back({number, tensor.name, tensor.global, tensor.box});
  }
  for (size_t i = 0; i < written.size(); ++i)
    if (!written[i] && !content.tensors[i].name.empty())
      fail(ErrorKind::kInvalidArgument, path, ": tensor '", content.tensors[i].name, "' stands nowhere in the value");
  return slices;
}

std::string digest_of_bytes(std::string_view bytes, uint32_t before = 0) {
  char text[9];
  std::snprintf(text, sizeof text, "%08x", crc32(std::as_bytes(std::span(bytes)), before));
  return text;
}

}  // namespace

PtFile::PtFile(const PtContent& content, std::string path) : path_(std::move(path)), with_record_(content.with_slices) {
  std::vector<PickledTensor> tensors;
  for (size_t i = 0; i < content.tensors.size(); ++i) {
    const PtTensor& t = content.tensors[i];
    check_pt_tensor(content, i, path_);
    tensors.push_back({t.storage, t.dtype, t.offset, t.size, t.strides, t.requires_grad});
  }
  std::vector<PickledStorage> storages;
  for (size_t i = 0; i < content.storages.size(); ++i) {
    storages.push_back({std::to_string(i), content.storages[i].size});
    storage_sizes_.push_back(content.storages[i].size);
  }
  std::vector<size_t> order;
  pickle_ = write_pickle(content.value, tensors, storages, path_, &order);
  if (pickle_.size() > (256 << 20))
    fail(ErrorKind::kUnsupported, path_, ": ", pickle_.size(), " bytes of plain values; put large data into tensors");
  if (with_record_) slices_ = slice_list(content, order, path_);

  zip_.emplace(pickle_);
  for (const uint64_t size : storage_sizes_) zip_->add_storage({size, nullptr, {}});
  zip_->add_version();
  lay_out();
  TorchZip whole = *zip_;
  if (with_record_) {
    blank_record_ = make_pt_record(slices_, content.extra, covered_);
    whole.add(kPtRecordName, bytes_of(blank_record_), 64);
  }
  size_ = whole.size();
}

void PtFile::lay_out() {
  const ZipLayout& layout = zip_->layout();
  covered_ = layout.end();
  first_section_ = {0};
  for (size_t i = 0; i < storages(); ++i) {
    const uint64_t begin = storage_begin(i), end = begin + storage_size(i);
    const uint64_t blocks = begin == end ? 0 : (end + kBlock - 1) / kBlock - begin / kBlock;
    first_section_.push_back(first_section_.back() + blocks);
  }
  const std::vector<ZipRecord>& records = layout.records();
  const auto is_storage = [&](size_t r) { return r >= kBefore && r < kBefore + storages(); };
  headers_.reserve(records.size() + 3);  // so that views of short ones stay where they are
  for (size_t r = 0; r < records.size(); ++r) {
    const ZipRecord& record = records[r];
    const uint64_t data_end = record.data + record.size;
    const uint64_t end = r + 1 < records.size() ? records[r + 1].header : covered_;
    headers_.push_back(layout.local_header(r));
    pieces_.push_back({Piece::Kind::kFixed, record.header, record.data, 0, headers_.back()});
    if (is_storage(r)) {
      pieces_.push_back({Piece::Kind::kData, record.data, data_end, r - kBefore, {}});
      pieces_.push_back({Piece::Kind::kDescriptor, data_end, end, r - kBefore, {}});
    } else {
      const ByteSource& source = zip_->source(r);
      const std::string_view bytes(reinterpret_cast<const char*>(source.data), source.size);
      pieces_.push_back({Piece::Kind::kFixed, record.data, data_end, 0, bytes});
      headers_.push_back(layout.descriptor(r, crc32(std::as_bytes(std::span(bytes)))));
      pieces_.push_back({Piece::Kind::kFixed, data_end, end, 0, headers_.back()});
    }
  }
  std::erase_if(pieces_, [](const Piece& piece) { return piece.begin == piece.end; });
}

uint32_t PtFile::fingerprint() const {
  uint32_t crc = crc32(std::as_bytes(std::span(pickle_)));
  for (const ZipRecord& record : zip_->layout().records()) {
    const uint64_t place[] = {record.data, record.size};
    crc = crc32(std::as_bytes(std::span(place)), crc);
  }
  return crc32(std::as_bytes(std::span(blank_record_)), crc);
}

std::vector<PtFile::Section> PtFile::sections_in(uint64_t begin, uint64_t end) const {
  std::vector<Section> result;
  // The first storage that ends behind `begin`.
  size_t low = 0, high = storages();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (storage_begin(middle) + storage_size(middle) > begin)
      high = middle;
    else
      low = middle + 1;
  }
  for (size_t i = low; i < storages() && storage_begin(i) < end; ++i) {
    const uint64_t first = storage_begin(i), last = first + storage_size(i);
    for (uint64_t at = std::max(first, begin); at < std::min(last, end);) {
      const uint64_t stop = std::min({last, end, (at / kBlock + 1) * kBlock});
      result.push_back({first_section_[i] + (at / kBlock - first / kBlock), i, at - first, stop - at});
      at = stop;
    }
  }
  return result;
}

uint32_t PtFile::storage_crc(size_t storage, const std::vector<uint32_t>& sections) const {
  const uint64_t begin = storage_begin(storage), end = begin + storage_size(storage);
  uint32_t crc = 0;
  size_t number = first_section_[storage];
  for (uint64_t at = begin; at < end; ++number) {
    const uint64_t stop = std::min(end, (at / kBlock + 1) * kBlock);
    crc = crc32_combine(crc, sections[number], stop - at);
    at = stop;
  }
  return crc;
}

std::string PtFile::descriptor(size_t storage, uint32_t crc) const {
  return zip_->layout().descriptor(kBefore + storage, crc);
}

PtFile::Tail PtFile::finish(const std::vector<uint32_t>& sections, const Value& extra) const {
  std::vector<uint32_t> storage_crcs;
  for (size_t i = 0; i < storages(); ++i) storage_crcs.push_back(storage_crc(i, sections));
  // Of each block, from its pieces in their order.
  std::vector<uint32_t> blocks((covered_ + kBlock - 1) / kBlock, 0);
  for (const Piece& piece : pieces_) {
    std::string bytes;
    if (piece.kind == Piece::Kind::kDescriptor) bytes = descriptor(piece.storage, storage_crcs[piece.storage]);
    const std::string_view known = piece.kind == Piece::Kind::kDescriptor ? std::string_view(bytes) : piece.fixed;
    size_t number = piece.kind == Piece::Kind::kData ? first_section_[piece.storage] : 0;
    for (uint64_t at = piece.begin; at < piece.end; ++number) {
      const uint64_t stop = std::min(piece.end, (at / kBlock + 1) * kBlock);
      uint32_t& block = blocks[at / kBlock];
      if (piece.kind == Piece::Kind::kData)
        block = crc32_combine(block, sections[number], stop - at);
      else
        block = crc32(std::as_bytes(std::span(known.substr(at - piece.begin, stop - at))), block);
      at = stop;
    }
  }

  TorchZip whole = *zip_;
  std::vector<uint32_t> crcs;
  for (size_t r = 0; r < zip_->records(); ++r) {
    const bool is_storage = r >= kBefore && r < kBefore + storages();
    const ByteSource& source = zip_->source(r);
    crcs.push_back(is_storage ? storage_crcs[r - kBefore] : crc32({source.data, static_cast<size_t>(source.size)}));
  }
  Tail tail;
  if (with_record_) {
    std::string record = make_pt_record(slices_, extra, covered_);
    if (record.size() != blank_record_.size())
      fail(ErrorKind::kInvalidArgument, path_, ": the extra record has ", record.size(), " bytes, it was to have ",
           blank_record_.size());
    set_crcs(record, blocks);
    whole.add(kPtRecordName, bytes_of(record), 64);
    const size_t last = whole.records() - 1;
    crcs.push_back(crc32(std::as_bytes(std::span(record))));
    tail.bytes = whole.layout().local_header(last) + record + whole.layout().descriptor(last, crcs[last]);
    tail.digest = digest_of(record);
  }
  tail.bytes += whole.layout().directory(crcs);
  tail.tail_digest = digest_of_bytes(tail.bytes);
  return tail;
}

const std::byte* ContentSource::memory(const PtFile::Section& section) {
  const std::byte* data = content_.storages[section.storage].data;
  return data ? data + section.offset : nullptr;
}

void ContentSource::fill(const PtFile::Section& section, std::span<std::byte> out) {
  content_.storages[section.storage].fill(section.offset, out);
}

PtRanges::PtRanges(const PtFile& file) : file_(file), crcs_(file.sections(), 0), known_(file.sections(), false) {}

bool PtRanges::is_known(size_t storage) const {
  const auto begin = known_.begin() + static_cast<std::ptrdiff_t>(file_.first_section(storage));
  const auto end = known_.begin() + static_cast<std::ptrdiff_t>(file_.first_section(storage + 1));
  return std::find(begin, end, false) == end;
}

void PtRanges::write(StreamWriter& out, uint64_t begin, uint64_t end, SectionSource& source) {
  out.seek(begin);
  const std::vector<PtFile::Section> sections = file_.sections_in(begin, end);
  auto section = sections.begin();
  const auto& pieces = file_.pieces();
  auto piece = std::partition_point(pieces.begin(), pieces.end(), [&](const auto& p) { return p.end <= begin; });
  for (; piece != pieces.end() && piece->begin < end; ++piece) {
    const uint64_t from = std::max(piece->begin, begin), to = std::min(piece->end, end);
    switch (piece->kind) {
      case PtFile::Piece::Kind::kFixed:
        out.append(piece->fixed.substr(from - piece->begin, to - from));
        break;
      case PtFile::Piece::Kind::kDescriptor: {
        std::string bytes(piece->end - piece->begin, '\0');
        if (is_known(piece->storage))
          bytes = file_.descriptor(piece->storage, file_.storage_crc(piece->storage, crcs_));
        else
          holes_.push_back({piece->storage, from, to});
        out.append(std::string_view(bytes).substr(from - piece->begin, to - from));
        break;
      }
      case PtFile::Piece::Kind::kData:
        for (; section != sections.end() && section->storage == piece->storage; ++section) {
          out.take_section_crc();
          if (const std::byte* memory = source.memory(*section))
            out.append(std::span(memory, static_cast<size_t>(section->length)));
          else
            out.append(ByteSource{section->length, nullptr, [&](uint64_t done, std::span<std::byte> bytes) {
                                    PtFile::Section part = *section;
                                    part.offset += done;
                                    part.length = bytes.size();
                                    source.fill(part, bytes);
                                  }});
          crcs_[section->number] = out.take_section_crc();
          known_[section->number] = true;
        }
        break;
    }
  }
}

void PtRanges::write_rest(WriteFile& file) {
  for (const Hole& hole : holes_) {
    const std::string bytes = file_.descriptor(hole.storage, file_.storage_crc(hole.storage, crcs_));
    const uint64_t begin = file_.storage_begin(hole.storage) + file_.storage_size(hole.storage);
    file.write(hole.begin, std::as_bytes(std::span(bytes)).subspan(hole.begin - begin, hole.end - hole.begin));
  }
  holes_.clear();
}

}  // namespace shardsmith
