// The pure core: an Index and a Target made of the input; what validates is planned and executed, and each byte
// compared with what the words of Index and Want mean.
#include "layout/plan.h"

#include <zlib.h>

#include <algorithm>

#include "storage/transfer.h"
#include "support.h"

namespace shardsmith::fuzz {
namespace {

constexpr Dtype kDtypes[] = {Dtype::kU8, Dtype::kBF16, Dtype::kF32, Dtype::kF16, Dtype::kF64, Dtype::kC64};

// Numbers out of the input; zeros behind its end.
class Input {
 public:
  explicit Input(std::string_view bytes) : bytes_(bytes) {}
  bool done() const { return at_ >= bytes_.size(); }
  uint8_t byte() { return done() ? 0 : static_cast<uint8_t>(bytes_[at_++]); }
  int64_t below(int64_t n) { return n <= 1 ? 0 : byte() % n; }
  // Mostly small, sometimes anything.
  int64_t any() {
    const uint8_t first = byte();
    if (first < 240) return first % 32;
    uint64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | byte();
    return static_cast<int64_t>(value);
  }

 private:
  std::string_view bytes_;
  size_t at_ = 0;
};

// Strides that give each element of the box a place of its own, in any order of dimensions, perhaps with holes.
Strides some_strides(Input& input, const Shape& extent, int64_t& places) {
  std::vector<size_t> order(extent.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = d;
  for (size_t d = order.size(); d > 1; --d)
    std::swap(order[d - 1], order[static_cast<size_t>(input.below(static_cast<int64_t>(d)))]);
  Strides strides(extent.size(), 1);
  int64_t step = 1;
  for (const size_t d : order) {
    strides[d] = step;
    // An extent may be anything here; strides that no file holds are refused by the Index's own checks.
    if (__builtin_mul_overflow(step, std::max<int64_t>(extent[d], 1), &step) || step > INT64_MAX / 2) step = 1;
    if (input.byte() > 200) step += input.below(4);
  }
  places = step;
  return strides;
}

// Cuts `box` into pieces that cover it.
void cut(Input& input, const Box& box, int depth, std::vector<Box>& out) {
  const size_t rank = box.extent.size();
  if (depth == 0 || rank == 0 || input.byte() < 100) return out.push_back(box);
  const auto d = static_cast<size_t>(input.below(static_cast<int64_t>(rank)));
  if (box.extent[d] < 2) return out.push_back(box);
  const int64_t at = 1 + input.below(box.extent[d] - 1);
  Box low = box, high = box;
  low.extent[d] = at;
  high.offset[d] += at;
  high.extent[d] -= at;
  cut(input, low, depth - 1, out);
  cut(input, high, depth - 1, out);
}

std::string deflated(const std::string& bytes) {
  z_stream stream{};
  require(deflateInit2(&stream, 6, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY) == Z_OK, "zlib");
  std::string out(deflateBound(&stream, bytes.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  require(deflate(&stream, Z_FINISH) == Z_STREAM_END, "zlib");
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

std::string counted(size_t n) {
  std::string bytes(n, '\0');
  for (size_t i = 0; i < n; ++i) bytes[i] = static_cast<char>(i * 167 + i / 256);
  return bytes;
}

// Two files of bytes that are all different as far as a byte can tell, and a deflated record at the end of the second.
struct World {
  Files files;
  Index index;
  uint64_t record = 0, stored = 0, inflated = 2000;
  World() {
    index.format = "fuzz";
    files.add("a", counted(3000));
    const std::string packed = deflated(counted(inflated));
    files.add("b", counted(1000) + packed);
    index.files = {{"a", 3000, nullptr}, {"b", 1000 + packed.size(), nullptr}};
    record = 1000, stored = packed.size();
  }
};

void add_tensor(Input& input, World& world) {
  TensorEntry tensor;
  tensor.name = std::string(1, static_cast<char>('a' + input.below(8)));
  tensor.dtype = kDtypes[input.below(6)];
  const bool wild = input.byte() > 230;
  for (int64_t rank = input.below(5); rank > 0; --rank) tensor.shape.push_back(wild ? input.any() : input.below(7));
  if (input.byte() > 235) tensor.alias_of = std::string(1, static_cast<char>('a' + input.below(8)));
  std::vector<Box> boxes;
  if (tensor.alias_of.empty() && !wild) cut(input, whole(tensor.shape), 5, boxes);
  for (int64_t extra = input.byte() > 240 ? input.below(3) : 0; extra > 0; --extra) {
    Box box;
    for (size_t d = 0; d < tensor.shape.size(); ++d) {
      box.offset.push_back(input.any());
      box.extent.push_back(input.any());
    }
    boxes.push_back(std::move(box));
  }
  for (const Box& box : boxes) {
    Slice slice;
    slice.box = box;
    int64_t places = 0;
    slice.strides = wild ? Strides{} : some_strides(input, box.extent, places);
    for (size_t d = slice.strides.size(); d < tensor.shape.size(); ++d) slice.strides.push_back(input.any());
    slice.file = static_cast<uint32_t>(input.byte() > 250 ? 2 : input.below(2));
    slice.offset = static_cast<uint64_t>(input.below(256)) * static_cast<uint64_t>(1 + input.below(8));
    if (wild) slice.offset = static_cast<uint64_t>(input.any());
    const uint8_t encoding = input.byte();
    if (encoding > 200 && size_of(tensor.dtype) > 1) slice.encoding = Encoding::kByteSwapped;
    if (encoding < 40) {
      slice.encoding = Encoding::kDeflated;
      slice.inner = slice.offset % world.inflated;
      slice.file = 1, slice.offset = world.record, slice.stored = world.stored;
    }
    tensor.slices.push_back(std::move(slice));
  }
  world.index.tensors.push_back(std::move(tensor));
}

shardsmith::Target some_target(Input& input, const Index& index, std::vector<uint64_t>& sizes) {
  shardsmith::Target target;
  for (int64_t n = 1 + input.below(6); n > 0; --n) {
    const TensorEntry& tensor =
        index.tensors[static_cast<size_t>(input.below(static_cast<int64_t>(index.tensors.size())))];
    Want want;
    want.name = tensor.name;
    want.dtype = input.byte() > 230 ? kDtypes[input.below(6)] : tensor.dtype;
    want.shape = tensor.shape;
    if (!want.shape.empty() && input.byte() > 250) want.shape[0] = input.any();
    int64_t volume = size_of(want.dtype);
    for (const int64_t size : tensor.shape) {
      want.box.offset.push_back(input.byte() > 250 ? input.any() : input.below(size > 200 ? 200 : size));
      const int64_t left = std::max<int64_t>(0, size - std::max<int64_t>(0, want.box.offset.back()));
      want.box.extent.push_back(input.byte() > 250 ? input.any() : input.byte() > 128 ? left : input.below(left + 1));
      if (__builtin_mul_overflow(volume, std::max<int64_t>(want.box.extent.back(), 1), &volume) || volume > 1 << 16)
        volume = 1 << 17;
    }
    if (volume > 1 << 16) continue;
    int64_t places = 0;
    want.strides = some_strides(input, want.box.extent, places);
    want.buffer = static_cast<uint32_t>(sizes.size());
    want.offset = static_cast<uint64_t>(input.below(9));
    sizes.push_back(want.offset + static_cast<uint64_t>(std::max<int64_t>(places, 1) * size_of(want.dtype)));
    target.wants.push_back(std::move(want));
  }
  return target;
}

void run(std::string_view bytes) {
  Input input(bytes);
  World world;
  const PlanOptions options{static_cast<uint64_t>(1 + input.below(200)), static_cast<uint64_t>(input.below(100))};
  for (int64_t n = 1 + input.below(5); n > 0; --n) add_tensor(input, world);
  Index& index = world.index;
  if (!errors_only([&] { index.reindex(); })) return;
  if (!errors_only([&] { validate(index, false); })) return;
  read_everything(index, world.files);

  std::vector<uint64_t> sizes;
  const shardsmith::Target target = some_target(input, index, sizes);
  Plan plan;
  if (!errors_only([&] { plan = make_plan(index, target, options); })) return;
  for (size_t i = 0; i < plan.reads.size(); ++i) {
    const Read& read = plan.reads[i];
    require(read.offset + read.length <= index.files.at(read.file).size, "a read leaves its file");
    if (read.inflated != 0) continue;
    require(read.length <= std::max<uint64_t>(options.max_read, 16), "a read is longer than allowed");
    if (i > 0 && plan.reads[i - 1].file == read.file && plan.reads[i - 1].inflated == 0)
      require(read.offset >= plan.reads[i - 1].offset, "reads that are not in order");
  }
  std::vector<std::string> out;
  for (const uint64_t size : sizes) out.emplace_back(size, '\xa5');
  std::vector<Destination> destinations;
  for (std::string& buffer : out) destinations.push_back({std::as_writable_bytes(std::span(buffer))});
  if (!errors_only([&] { execute(plan, index, destinations, world.files, {.budget = 64 << 10, .threads = 1}); })) {
    // How long a deflated record is, only inflating it tells; anything else was checked before.
    const auto deflated_read = [](const Read& read) { return read.inflated != 0; };
    require(std::any_of(plan.reads.begin(), plan.reads.end(), deflated_read), "a sound plan could not be executed");
    return;
  }
  compare_wants(index, target, world.files, out);
}

const Registration registered("plan", run);

}  // namespace
}  // namespace shardsmith::fuzz
