// The simplest thing that carries out a Plan: files and destinations are strings, one element at a time, no cast.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "layout/plan.h"

namespace shardsmith {

inline void reference_execute(const Plan& plan, const std::vector<std::string>& files, std::vector<std::string>& out) {
  for (const Read& read : plan.reads) {
    const std::string bytes = files.at(read.file).substr(read.offset, read.length);
    for (const Copy& copy : read.copies) {
      std::vector<int64_t> at(copy.extent.size(), 0);
      const size_t size = static_cast<size_t>(size_of(copy.from));
      for (bool more = true; more;) {
        size_t from = copy.source, to = copy.offset;
        for (size_t d = 0; d < at.size(); ++d) {
          from += static_cast<size_t>(at[d] * copy.source_step[d]);
          to += static_cast<size_t>(at[d] * copy.destination_step[d]);
        }
        if (from + size > bytes.size()) throw std::out_of_range("a copy reads beyond its read");
        if (to + size > out.at(copy.buffer).size()) throw std::out_of_range("a copy writes beyond its buffer");
        std::string element = bytes.substr(from, size);
        if (copy.byte_swapped) element = std::string(element.rbegin(), element.rend());
        std::memcpy(out[copy.buffer].data() + to, element.data(), size);
        more = false;
        for (size_t d = at.size(); d-- > 0 && !more;) {
          if (++at[d] < copy.extent[d])
            more = true;
          else
            at[d] = 0;
        }
      }
    }
  }
}

}  // namespace shardsmith
