#include "layout/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>

#include "base/error.h"
#include "reference_executor.h"

namespace shardsmith {
namespace {

using Random = std::mt19937_64;
int64_t pick(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

// Calls f(i) for every element of a box, in row-major order.
template <typename F>
void each(const Box& box, F&& f) {
  if (volume(box.extent) == 0) return;
  Shape i = box.offset;
  while (true) {
    f(i);
    size_t d = i.size();
    while (d-- > 0) {
      if (++i[d] < box.offset[d] + box.extent[d]) break;
      i[d] = box.offset[d];
    }
    if (d == SIZE_MAX) return;
  }
}

// A distinct value per element, as wide as the dtype allows.
std::string value_of(const TensorEntry& tensor, size_t number, const Shape& i) {
  uint64_t flat = 0;
  for (size_t d = 0; d < i.size(); ++d)
    flat = flat * static_cast<uint64_t>(tensor.shape[d]) + static_cast<uint64_t>(i[d]);
  uint64_t low = (flat + 1) * 0x9E3779B97F4A7C15ull + number, high = ~low;
  std::string bytes(reinterpret_cast<const char*>(&low), 8);
  bytes.append(reinterpret_cast<const char*>(&high), 8);
  return bytes.substr(0, static_cast<size_t>(size_of(tensor.dtype)));
}

// Strides of a tensor whose dimensions lie in a random order, sometimes with room between the rows.
Strides random_strides(const Shape& extent, Random& random) {
  std::vector<size_t> order(extent.size());
  std::iota(order.begin(), order.end(), 0u);
  if (pick(random, 0, 1)) std::shuffle(order.begin(), order.end(), random);
  Strides strides(extent.size());
  int64_t step = pick(random, 0, 5) ? 1 : 2;
  for (size_t k = order.size(); k-- > 0;) {
    strides[order[k]] = step;
    step *= extent[order[k]];
    if (pick(random, 0, 4) == 0) step += pick(random, 1, 9);
  }
  return strides;
}

int64_t elements_spanned(const Shape& extent, const Strides& strides) {
  int64_t last = 0;
  for (size_t d = 0; d < extent.size(); ++d) last += (extent[d] - 1) * strides[d];
  return last + 1;
}

// A grid of cuts along each dimension.
std::vector<Box> random_grid(const Shape& shape, Random& random) {
  std::vector<Box> boxes{whole(shape)};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<Box> next;
    for (const Box& box : boxes) {
      int64_t at = 0;
      while (at < shape[d]) {
        const int64_t n = pick(random, 0, 1) ? shape[d] - at : pick(random, 1, shape[d] - at);
        Box part = box;
        part.offset[d] = at, part.extent[d] = n;
        next.push_back(part);
        at += n;
      }
    }
    boxes = std::move(next);
  }
  std::shuffle(boxes.begin(), boxes.end(), random);
  return boxes;
}

struct Case {
  Index index;
  std::vector<std::string> files;
};

Case random_case(Random& random) {
  Case c;
  c.files.resize(static_cast<size_t>(pick(random, 1, 3)));
  for (size_t f = 0; f < c.files.size(); ++f) c.files[f].assign(static_cast<size_t>(pick(random, 0, 50)), '#');
  const int tensors = static_cast<int>(pick(random, 1, 4));
  for (int t = 0; t < tensors; ++t) {
    TensorEntry tensor{.name = "t" + std::to_string(t)};
    tensor.dtype = static_cast<Dtype>(pick(random, 0, static_cast<int64_t>(Dtype::kQI32)));
    for (int64_t d = pick(random, 0, 4); d > 0; --d) tensor.shape.push_back(pick(random, 1, 9));
    const uint64_t size = static_cast<uint64_t>(size_of(tensor.dtype));
    for (const Box& box : random_grid(tensor.shape, random)) {
      Slice slice{.box = box, .file = static_cast<uint32_t>(pick(random, 0, static_cast<int64_t>(c.files.size()) - 1))};
      std::string& file = c.files[slice.file];
      slice.strides = random_strides(box.extent, random);
      slice.offset = file.size();
      slice.encoding = pick(random, 0, 3) ? Encoding::kRaw : Encoding::kByteSwapped;
      file.append(static_cast<size_t>(elements_spanned(box.extent, slice.strides)) * size, '#');
      file.append(static_cast<size_t>(pick(random, 0, 40)), '#');
      each(box, [&](const Shape& i) {
        uint64_t at = slice.offset;
        for (size_t d = 0; d < i.size(); ++d)
          at += static_cast<uint64_t>((i[d] - box.offset[d]) * slice.strides[d]) * size;
        std::string bytes = value_of(tensor, static_cast<size_t>(t), i);
        if (slice.encoding == Encoding::kByteSwapped) std::reverse(bytes.begin(), bytes.end());
        file.replace(at, size, bytes);
      });
      tensor.slices.push_back(slice);
    }
    c.index.tensors.push_back(tensor);
  }
  for (size_t f = 0; f < c.files.size(); ++f)
    c.index.files.push_back({"f" + std::to_string(f), c.files[f].size(), nullptr});
  c.index.reindex();
  return c;
}

TEST(Plan, RandomSlicesReachRandomTargets) {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    SCOPED_TRACE(seed);
    Random random(seed);
    const Case c = random_case(random);
    ASSERT_NO_THROW(validate(c.index));
    Target target;
    std::vector<std::string> out(2);
    std::vector<std::vector<bool>> touched(c.files.size());
    for (size_t f = 0; f < c.files.size(); ++f) touched[f].resize(c.files[f].size());
    for (const TensorEntry& tensor : c.index.tensors) {
      for (int64_t w = pick(random, 1, 3); w > 0; --w) {
        Want want{.name = tensor.name, .dtype = tensor.dtype, .shape = tensor.shape, .box = whole(tensor.shape)};
        for (size_t d = 0; d < tensor.shape.size(); ++d) {
          want.box.offset[d] = pick(random, 0, tensor.shape[d] - 1);
          want.box.extent[d] = pick(random, 1, tensor.shape[d] - want.box.offset[d]);
        }
        want.buffer = static_cast<uint32_t>(pick(random, 0, 1));
        want.offset = out[want.buffer].size();
        want.strides = random_strides(want.box.extent, random);
        out[want.buffer].append(
            static_cast<size_t>(elements_spanned(want.box.extent, want.strides) * size_of(want.dtype)), '.');
        target.wants.push_back(want);
        for (const Slice& slice : tensor.slices) {
          const auto both = intersect(slice.box, want.box);
          if (!both) continue;
          each(*both, [&](const Shape& i) {
            uint64_t at = slice.offset;
            for (size_t d = 0; d < i.size(); ++d)
              at += static_cast<uint64_t>((i[d] - slice.box.offset[d]) * slice.strides[d] * size_of(tensor.dtype));
            for (int64_t b = 0; b < size_of(tensor.dtype); ++b)
              touched[slice.file][at + static_cast<uint64_t>(b)] = true;
          });
        }
      }
    }
    PlanOptions options;
    options.max_read = static_cast<uint64_t>(pick(random, 16, 300));
    options.max_gap = pick(random, 0, 1) ? 0 : static_cast<uint64_t>(pick(random, 0, 60));
    const Plan plan = make_plan(c.index, target, options);
    EXPECT_TRUE(plan.report.missing.empty());
    reference_execute(plan, c.files, out);

    for (const Want& want : target.wants) {
      const TensorEntry& tensor = *c.index.find(want.name);
      each(want.box, [&](const Shape& i) {
        uint64_t at = want.offset;
        for (size_t d = 0; d < i.size(); ++d)
          at += static_cast<uint64_t>((i[d] - want.box.offset[d]) * want.strides[d] * size_of(want.dtype));
        ASSERT_EQ(out[want.buffer].substr(at, static_cast<size_t>(size_of(want.dtype))),
                  value_of(tensor, static_cast<size_t>(&tensor - c.index.tensors.data()), i))
            << want.name << " " << to_string(i);
      });
    }
    // Ascending, of bounded length, no byte twice; without gaps nothing that isn't needed.
    uint64_t needed = 0;
    for (const auto& bytes : touched) needed += static_cast<uint64_t>(std::count(bytes.begin(), bytes.end(), true));
    for (size_t r = 0; r < plan.reads.size(); ++r) {
      const Read& read = plan.reads[r];
      EXPECT_LE(read.length, options.max_read);
      if (r && plan.reads[r - 1].file == read.file) {
        EXPECT_GE(read.offset, plan.reads[r - 1].offset + plan.reads[r - 1].length);
      }
    }
    if (options.max_gap == 0) {
      EXPECT_EQ(plan.report.bytes_read, needed);
    }
    EXPECT_GE(plan.report.bytes_read, needed);
  }
}

// GPT-2's c_attn is [in, 3h]: query | key | value along dimension 1, wanted as three [out, in] matrices.
TEST(Plan, FusedAndTransposedSourceIsReadOnceFromFrontToBack) {
  const int64_t h = 64;
  Index index;
  index.files.push_back({"f", static_cast<uint64_t>(h * 3 * h * 4), nullptr});
  Target target;
  const char* names[] = {"query", "key", "value"};
  for (int64_t p = 0; p < 3; ++p) {
    Slice slice{.box = whole({h, h}), .offset = static_cast<uint64_t>(p * h * 4), .strides = {1, 3 * h}};
    index.tensors.push_back({names[p], Dtype::kF32, {h, h}, {slice}, ""});
    target.wants.push_back({names[p], Dtype::kF32, {h, h}, whole({h, h}), static_cast<uint32_t>(p), 0, {h, 1}});
  }
  index.reindex();
  std::string file(static_cast<size_t>(h * 3 * h * 4), 0);
  for (int32_t i = 0; i < h * 3 * h; ++i) std::memcpy(file.data() + i * 4, &i, 4);
  for (uint64_t max_read : {uint64_t{1000}, uint64_t{4} << 20}) {
    PlanOptions options;
    options.max_read = max_read;
    const Plan plan = make_plan(index, target, options);
    EXPECT_EQ(plan.report.bytes_read, file.size());
    EXPECT_EQ(plan.report.bytes_needed, file.size());
    EXPECT_EQ(plan.reads.size(), (file.size() + max_read - 1) / max_read);
    uint64_t at = 0;
    for (const Read& read : plan.reads) {
      EXPECT_EQ(read.offset, at);
      at += read.length;
      EXPECT_LE(read.copies.size(), 12u);  // rows are loops, not copies
    }
    std::vector<std::string> out(3, std::string(static_cast<size_t>(h * h * 4), 0));
    reference_execute(plan, {file}, out);
    for (int32_t p = 0; p < 3; ++p) {
      for (int32_t o = 0; o < h; ++o) {
        for (int32_t i = 0; i < h; ++i) {
          int32_t value = 0;
          std::memcpy(&value, out[static_cast<size_t>(p)].data() + (o * h + i) * 4, 4);
          ASSERT_EQ(value, i * 3 * h + p * h + o);
        }
      }
    }
  }
}

Index simple() {
  Index index;
  index.format = "test";
  index.files.push_back({"a.safetensors", 4096, nullptr});
  index.tensors.push_back({"w", Dtype::kF32, {4, 4}, {{.box = whole({4, 4}), .strides = {4, 1}}}, ""});
  index.tensors.push_back({"v", Dtype::kF32, {4}, {{.box = whole({4}), .offset = 64, .strides = {1}}}, ""});
  index.tensors.push_back({"tied", Dtype::kF32, {4, 4}, {}, "w"});
  index.tensors.push_back({"count", Dtype::kI64, {}, {{.box = whole({}), .offset = 128}}, ""});
  index.reindex();
  return index;
}

Want want(const std::string& name, Shape shape, Dtype dtype = Dtype::kF32) {
  Strides strides = contiguous_strides(shape);
  return {name, dtype, shape, whole(shape), 0, 0, strides};
}

TEST(Plan, ReportsWhatIsMissingUnexpectedCastAndTied) {
  const Plan plan = make_plan(simple(), {{want("tied", {4, 4}, Dtype::kBF16), want("gone", {1}), want("gone", {1})}});
  EXPECT_EQ(plan.report.missing, std::vector<std::string>{"gone"});
  EXPECT_EQ(plan.report.unexpected, (std::vector<std::string>{"v", "count"}));
  EXPECT_EQ(plan.report.cast, std::vector<std::string>{"tied: float32 -> bfloat16"});
  EXPECT_EQ(plan.report.tied, std::vector<std::string>{"tied = w"});
  EXPECT_EQ(plan.reads.at(0).copies.at(0).extent, std::vector<int64_t>{16});  // one run
  EXPECT_THROW(require_complete(plan, "somewhere"), Error);
}

TEST(Plan, ATensorThatIsNotCoveredIsMissing) {
  Index index = simple();
  index.tensors[0].slices[0].box.extent = {3, 4};
  EXPECT_EQ(make_plan(index, {{want("w", {4, 4})}}).report.missing, std::vector<std::string>{"w"});
  Want part = want("w", {4, 4});
  part.box.extent = {2, 4};
  EXPECT_TRUE(make_plan(index, {{part}}).report.missing.empty());
}

TEST(Plan, AnotherShapeNamesBothAndTheFile) {
  try {
    make_plan(simple(), {{want("w", {4, 5})}});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kCorrupt);
    EXPECT_STREQ(e.what(), "a.safetensors: tensor 'w' has shape [4, 4], expected [4, 5]");
  }
  EXPECT_THROW(make_plan(simple(), {{want("count", {}, Dtype::kF32)}}), Error);  // integers are never cast
}

TEST(Plan, ADeflatedRecordIsReadOnceAsAWhole) {
  Index index = simple();
  for (int t : {0, 1}) {
    Slice& slice = index.tensors[static_cast<size_t>(t)].slices[0];
    slice.encoding = Encoding::kDeflated, slice.inner = slice.offset, slice.offset = 1000, slice.stored = 50;
  }
  const Plan plan = make_plan(index, {{want("w", {4, 4}), want("v", {4})}});
  ASSERT_EQ(plan.reads.size(), 1u);
  EXPECT_EQ(plan.reads[0].offset, 1000u);
  EXPECT_EQ(plan.reads[0].length, 50u);
  EXPECT_EQ(plan.reads[0].inflated, 80u);
  EXPECT_EQ(plan.reads[0].copies[1].source, 64u);
}

TEST(Plan, ManySlicesAndManyWantsStayQuick) {
  const int64_t n = 300;  // 90,000 slices and as many wants
  Index index;
  index.files.push_back({"f", static_cast<uint64_t>(n * n * 4 * 4), nullptr});
  TensorEntry tensor{.name = "w", .dtype = Dtype::kF32, .shape = {2 * n, 2 * n}};
  Target target;
  for (int64_t r = 0; r < n; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      const Box box{{2 * r, 2 * c}, {2, 2}};
      tensor.slices.push_back({.box = box, .offset = static_cast<uint64_t>((r * n + c) * 16), .strides = {2, 1}});
      target.wants.push_back({"w", Dtype::kF32, tensor.shape, box, 0, static_cast<uint64_t>((c * n + r) * 16), {2, 1}});
    }
  }
  index.tensors.push_back(tensor);
  index.reindex();
  const auto begin = std::chrono::steady_clock::now();
  const Plan plan = make_plan(index, target);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_EQ(plan.report.bytes_read, index.files[0].size);
  EXPECT_TRUE(plan.report.missing.empty());
}

}  // namespace
}  // namespace shardsmith
