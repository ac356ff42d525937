#include "layout/cut.h"

#include <algorithm>
#include <numeric>
#include <queue>

namespace shardsmith {
namespace {

// The wish whose outermost loop runs from iteration `first` for `count` steps.
Wish part(const Wish& wish, int64_t first, int64_t count) {
  Wish result = wish;
  result.begin += static_cast<uint64_t>(first * wish.copy.source_step[0]);
  result.copy.offset += static_cast<uint64_t>(first * wish.copy.destination_step[0]);
  result.copy.extent[0] = count;
  return result;
}

// One iteration of the outermost loop, without that loop.
Wish inner(const Wish& wish, int64_t iteration) {
  Wish result = part(wish, iteration, 1);
  Copy& copy = result.copy;
  if (copy.extent.size() > 1) {
    copy.extent.erase(copy.extent.begin());
    copy.source_step.erase(copy.source_step.begin());
    copy.destination_step.erase(copy.destination_step.begin());
  }
  return result;
}

// How many of a wish's loops, from the outermost on, have to be unrolled so that no hole of more than `max_gap` bytes
// is left in what is worth one sequential read: only a loop whose own step jumps over such a hole, and all around it.
size_t loops_to_unroll(const Wish& wish, uint64_t max_gap) {
  size_t unroll = 0;
  for (size_t d = 0; d < wish.copy.extent.size(); ++d) {
    const uint64_t step = static_cast<uint64_t>(wish.copy.source_step[d]);
    if (wish.copy.extent[d] > 1 && step > span(wish.copy, d + 1) + max_gap) unroll = d + 1;
  }
  return unroll;
}

void unroll(const Wish& wish, size_t loops, std::vector<Wish>& out) {
  for (int64_t i = 0; i < wish.copy.extent[0]; ++i) {
    if (loops == 1)
      out.push_back(inner(wish, i));
    else
      unroll(inner(wish, i), loops - 1, out);
  }
}

// Splits wishes at their holes; those without any, most often all, stay where they are.
void split_at_holes(std::vector<Wish>& wishes, uint64_t max_gap) {
  std::vector<Wish> parts;
  size_t kept = 0;
  for (Wish& wish : wishes) {
    const size_t loops = loops_to_unroll(wish, max_gap);
    if (loops > 0)
      unroll(wish, loops, parts);
    else if (Wish& place = wishes[kept++]; &place != &wish)
      place = std::move(wish);
  }
  wishes.resize(kept);
  std::move(parts.begin(), parts.end(), std::back_inserter(wishes));
}

struct Later {
  bool operator()(const Wish& a, const Wish& b) const { return a.begin > b.begin; }
};
using Queue = std::priority_queue<Wish, std::vector<Wish>, Later>;

// Moves of `wish` what ends at or before `end` to `read`; the rest goes back to the queue.
void take(Wish wish, uint64_t end, Read& read, uint64_t& taken_to, Queue& rest) {
  while (true) {
    const uint64_t length = span(wish.copy);
    if (wish.begin + length <= end) {
      taken_to = std::max(taken_to, wish.begin + length);
      wish.copy.source = wish.begin - read.offset;
      read.copies.push_back(std::move(wish.copy));
      return;
    }
    const uint64_t one = span(wish.copy, 1);
    const uint64_t step = static_cast<uint64_t>(wish.copy.source_step[0]);
    const int64_t count = wish.copy.extent[0];
    int64_t fit = 0;
    if (wish.begin + one <= end && step > 0) {
      fit = std::min(count, static_cast<int64_t>((end - wish.begin - one) / step) + 1);
    }
    if (fit > 0) take(part(wish, 0, fit), end, read, taken_to, rest);
    if (fit + 1 < count) rest.push(part(wish, fit + 1, count - fit - 1));
    if (fit == count) return;
    // The iteration that crosses the end is itself split where it has loops left and begins before the end.
    Wish crossing = inner(wish, fit);
    if (crossing.begin >= end || one <= static_cast<uint64_t>(size_of(crossing.copy.from)) ||
        wish.copy.extent.size() == 1) {
      rest.push(std::move(crossing));
      return;
    }
    wish = std::move(crossing);
  }
}

}  // namespace

void normalise(Copy& copy) {
  std::vector<size_t> order;
  for (size_t d = 0; d < copy.extent.size(); ++d) {
    if (copy.extent[d] != 1) order.push_back(d);
  }
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return copy.source_step[a] != copy.source_step[b] ? copy.source_step[a] > copy.source_step[b]
                                                      : copy.destination_step[a] > copy.destination_step[b];
  });
  std::vector<int64_t> extent, from, to;
  for (size_t d : order) {
    const int64_t n = copy.extent[d], s = copy.source_step[d], t = copy.destination_step[d];
    if (!extent.empty() && from.back() == s * n && to.back() == t * n) {
      extent.back() *= n, from.back() = s, to.back() = t;
    } else {
      extent.push_back(n), from.push_back(s), to.push_back(t);
    }
  }
  if (extent.empty()) extent = {1}, from = {size_of(copy.from)}, to = {size_of(copy.to)};
  copy.extent = std::move(extent), copy.source_step = std::move(from), copy.destination_step = std::move(to);
}

uint64_t span(const Copy& copy, size_t loop) {
  uint64_t length = static_cast<uint64_t>(size_of(copy.from));
  for (size_t d = loop; d < copy.extent.size(); ++d) {
    length += static_cast<uint64_t>((copy.extent[d] - 1) * copy.source_step[d]);
  }
  return length;
}

std::vector<Read> cut(std::vector<Wish> wishes, uint32_t file, const PlanOptions& options) {
  split_at_holes(wishes, options.max_gap);
  std::vector<Wish>& atoms = wishes;
  // A read must hold an element, whatever was asked for.
  const uint64_t max_read = std::max<uint64_t>(options.max_read, 16);
  std::sort(atoms.begin(), atoms.end(), [](const Wish& a, const Wish& b) { return a.begin < b.begin; });

  std::vector<Read> reads;
  Queue rest;       // remainders of atoms that were begun
  size_t next = 0;  // first atom not begun
  while (next < atoms.size() || !rest.empty()) {
    uint64_t begin = next < atoms.size() ? atoms[next].begin : rest.top().begin;
    if (!rest.empty()) begin = std::min(begin, rest.top().begin);
    Read read{.file = file, .offset = begin};
    const uint64_t end = begin + max_read;
    uint64_t taken_to = begin;
    Queue later;
    while (true) {
      const bool from_rest = !rest.empty() && (next == atoms.size() || rest.top().begin <= atoms[next].begin);
      if (!from_rest && next == atoms.size()) break;
      const uint64_t at = from_rest ? rest.top().begin : atoms[next].begin;
      if (at >= end || at > taken_to + options.max_gap) break;
      Wish wish = from_rest ? rest.top() : std::move(atoms[next]);
      from_rest ? rest.pop() : void(++next);
      take(std::move(wish), end, read, taken_to, later);
    }
    for (; !later.empty(); later.pop()) rest.push(later.top());
    read.length = taken_to - begin;
    read.copies.shrink_to_fit();
    reads.push_back(std::move(read));
  }
  return reads;
}

}  // namespace shardsmith
