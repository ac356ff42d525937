// What the tests of storage and formats share: a folder that goes away, errors as values, a distinct value an element.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "layout/plan.h"
#include "storage/storage.h"
#include "storage/transfer.h"

namespace shardsmith {

class TestFolder {
 public:
  TestFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "shardsmith-test-XXXXXX").string();
    if (!::mkdtemp(name.data())) throw std::runtime_error("no temporary folder");
    path_ = name;
  }
  ~TestFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TestFolder(const TestFolder&) = delete;
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// The error that the call throws; kind kInterrupted and "nothing was thrown" if there is none.
inline Error thrown(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& e) {
    return e;
  }
  return Error(ErrorKind::kInterrupted, "nothing was thrown");
}

inline void put_file(const std::string& path, std::string_view bytes) {
  std::filesystem::remove(path);  // ext4 flushes a file that is truncated and rewritten
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

inline std::string get_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// n different bytes patterns: element i of type T is i + 1, as far as T can tell them apart.
template <typename T>
std::vector<T> counted(size_t n) {
  std::vector<T> values(n);
  for (size_t i = 0; i < n; ++i) values[i] = static_cast<T>(i + 1);
  return values;
}

// Reads one whole tensor of an index, packed, in its own dtype.
template <typename T>
std::vector<T> read_tensor(const Index& index, const std::string& name, Storage& storage = local_storage(),
                           const TransferOptions& options = {}) {
  const TensorEntry* entry = index.find(name);
  if (!entry) throw Error(ErrorKind::kNotFound, "no tensor " + name);
  std::vector<T> values(static_cast<size_t>(volume(entry->shape)));
  Target target;
  target.wants.push_back(
      {name, entry->dtype, entry->shape, whole(entry->shape), 0, 0, contiguous_strides(entry->shape)});
  const Plan plan = make_plan(index, target);
  require_complete(plan, "test");
  const Destination destination{std::as_writable_bytes(std::span(values))};
  execute(plan, index, {&destination, 1}, storage, options);
  return values;
}

}  // namespace shardsmith
