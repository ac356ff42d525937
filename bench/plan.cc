// How long an Index is checked and a Plan is made, from 10^3 to 10^6 slices, and in how much memory. Two shapes of it:
// many tensors of one slice each, and one tensor cut into all of them. Nothing may grow faster than n log n.
//
//     build/bench_plan        bar: 10^6 slices in under 3 s and 1 GB
#include <sys/resource.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>

#include "layout/index.h"
#include "layout/plan.h"

using namespace shardsmith;

namespace {

constexpr int64_t kSide = 16;  // of a slice: 16 x 16 elements

Slice slice_at(int64_t number, Shape offset) {
  Slice slice;
  slice.box = {std::move(offset), {kSide, kSide}};
  slice.offset = static_cast<uint64_t>(number * kSide * kSide * 4);
  slice.strides = {kSide, 1};
  return slice;
}

Index many_tensors(int64_t n) {
  Index index;
  index.files.push_back({"file", static_cast<uint64_t>(n * kSide * kSide * 4), nullptr});
  index.tensors.reserve(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i)
    index.tensors.push_back(
        {"layer." + std::to_string(i) + ".weight", Dtype::kF32, {kSide, kSide}, {slice_at(i, {0, 0})}, ""});
  index.reindex();
  return index;
}

Index one_tensor(int64_t n) {
  const auto rows = static_cast<int64_t>(std::sqrt(static_cast<double>(n)));
  Index index;
  index.files.push_back({"file", static_cast<uint64_t>(rows * rows * kSide * kSide * 4), nullptr});
  TensorEntry tensor{"weight", Dtype::kF32, {rows * kSide, rows * kSide}, {}, ""};
  for (int64_t i = 0; i < rows * rows; ++i) tensor.slices.push_back(slice_at(i, {i / rows * kSide, i % rows * kSide}));
  index.tensors.push_back(std::move(tensor));
  index.reindex();
  return index;
}

// All of it, in as many wants as there are tensors, but at least two, as two ranks do.
Target parts_of(const Index& index) {
  Target target;
  target.wants.reserve(index.tensors.size() + 1);
  const int64_t parts = index.tensors.size() == 1 ? 2 : 1;
  for (const TensorEntry& tensor : index.tensors) {
    for (int64_t part = 0; part < parts; ++part) {
      Box box = whole(tensor.shape);
      box.extent[0] /= parts;
      box.offset[0] = part * box.extent[0];
      target.wants.push_back({tensor.name, tensor.dtype, tensor.shape, box, 0, 0, contiguous_strides(box.extent)});
    }
  }
  return target;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void measure(const char* name, Index (*build)(int64_t)) {
  double before = 0;
  for (int64_t n = 1000; n <= 1000000; n *= 10) {
    const auto begin = std::chrono::steady_clock::now();
    const Index index = build(n);
    validate(index);
    const double built = seconds_since(begin);
    const Target target = parts_of(index);
    const auto middle = std::chrono::steady_clock::now();
    const Plan plan = make_plan(index, target);
    const double planned = seconds_since(middle), all = built + planned;
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    std::printf(
        "%-14s %8lld slices  index %7.3f s  plan %7.3f s  all %7.3f s  growth x%5.1f  peak %6.0f MiB  %zu reads\n",
        name, static_cast<long long>(n), built, planned, all, before > 0 ? all / before : 0.0,
        static_cast<double>(usage.ru_maxrss) / 1024, plan.reads.size());
    std::fflush(stdout);
    before = all;
  }
}

}  // namespace

int main() {
  measure("one tensor", one_tensor);
  measure("many tensors", many_tensors);
}
