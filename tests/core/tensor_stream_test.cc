// A stream's bytes are the tensors', whatever its threads do and whenever they get to run.
#include "cli/tensor_stream.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <cstring>
#include <functional>
#include <thread>

#include "base/error.h"
#include "memory_storage.h"

namespace shardsmith::cli {
namespace {

// One file with a few tensors of counting elements, no value twice.
struct Source {
  MemoryStorage storage;
  Index index;
  std::vector<int64_t> values;

  Source(size_t tensors, int64_t elements) : values(tensors * static_cast<size_t>(elements)) {
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<int64_t>(i) + 1;
    const auto file = storage.create("f", Access::kBuffered, 0);
    file->write(0, std::as_bytes(std::span(values)));
    file->close();
    index.files.push_back({"f", values.size() * sizeof(int64_t), nullptr});
    for (size_t i = 0; i < tensors; ++i) {
      TensorEntry entry;
      entry.name = str("t", i);
      entry.dtype = Dtype::kI64;
      entry.shape = {elements};
      entry.slices.push_back({whole(entry.shape), 0, i * static_cast<size_t>(elements) * sizeof(int64_t), {1}});
      index.tensors.push_back(entry);
    }
    index.reindex();
  }
  std::vector<StreamTensor> wanted() const {
    std::vector<StreamTensor> all;
    for (const TensorEntry& entry : index.tensors) all.push_back(whole_tensor(entry, entry.dtype));
    return all;
  }
};

// Runs `body` on a thread that shares one processor with the threads that it starts, which do not interrupt it.
void before_its_threads(const std::function<void()>& body) {
  std::thread([&] {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(::sched_getcpu()), &set);
    const sched_param none{};
    EXPECT_EQ(::sched_setaffinity(0, sizeof(set), &set), 0);
    EXPECT_EQ(::sched_setscheduler(0, SCHED_BATCH, &none), 0);
    body();
  }).join();
}

TEST(TensorStream, GivesEveryByteHoweverLateItsThreadsStart) {
  Source source(8, 1000);
  StreamMemory memory(StreamMemory::kLeast, 2);
  std::vector<int64_t> out(1000);
  int wrong = 0;
  before_its_threads([&] {
    for (size_t round = 0; round < 200; ++round) {
      std::vector<StreamTensor> one{source.wanted()[round % 8]};  // never the one that the memory still holds
      TensorStream stream(source.index.files, one, memory, source.storage);
      const auto bytes = std::as_writable_bytes(std::span(out));
      stream.read(0, 0, bytes);
      wrong += std::memcmp(bytes.data(), &source.values[round % 8 * 1000], bytes.size()) != 0;
    }
  });
  EXPECT_EQ(wrong, 0);
}

TEST(TensorStream, GivesEveryByteOfManyWindows) {
  Source source(3, 1 << 20);
  std::vector<int64_t> out(1 << 16);
  for (const int threads : {1, 2, 9}) {
    StreamMemory memory(StreamMemory::kLeast, threads);
    TensorStream stream(source.index.files, source.wanted(), memory, source.storage);
    for (size_t at = 0; at < source.values.size(); at += out.size()) {
      const auto bytes = std::as_writable_bytes(std::span(out));
      const uint64_t tensor = at >> 20, offset = at % (1 << 20) * sizeof(int64_t);
      stream.read(tensor, offset, bytes);
      ASSERT_EQ(std::memcmp(bytes.data(), &source.values[at], bytes.size()), 0) << threads << " threads, from " << at;
    }
  }
}

TEST(TensorStream, AfterAFailedReadNothingOldIsGivenOut) {
  Source source(3, 1 << 20);
  StreamMemory memory(StreamMemory::kLeast, 2);
  source.index.files[0].size += 1;  // "someone is writing to it"
  TensorStream stream(source.index.files, source.wanted(), memory, source.storage);
  std::vector<std::byte> out(64);
  for (int i = 0; i < 2; ++i) EXPECT_THROW(stream.read(0, 0, out), Error);
}

}  // namespace
}  // namespace shardsmith::cli
