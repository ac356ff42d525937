// The operations of pickle protocol 2, one by one, with its memo for texts and names.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace shardsmith {

// Shortest little-endian two's complement; nothing for text that is no integer or needs more than 255 bytes.
std::optional<std::string> pickle_long(const std::string& digits);

class PickleEmitter {
 public:
  // `where` begins errors' texts.
  explicit PickleEmitter(std::string_view where) : where_(where) {}

  void put(std::string_view operations) { out_ += operations; }  // as they are
  void put_integer(int64_t value);
  void put_float(double value);
  void put_long(const std::string& bytes);
  // kInvalidArgument for what is not UTF-8.
  void put_text(std::string_view text);
  void put_global(std::string_view module, std::string_view name);
  void put_integers(const std::vector<int64_t>& values);  // a tuple
  void put_get(uint32_t slot);
  uint32_t put_memo();  // remembers what is on top of the stack
  const std::string& bytes() const { return out_; }

 protected:
  std::string_view where_;
  std::string out_;

 private:
  void put_slot(uint32_t slot);

  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  using Memo = std::unordered_map<std::string, uint32_t, Hash, std::equal_to<>>;

  uint32_t memo_ = 0;
  Memo text_memo_, global_memo_;
  std::string line_;  // of put_global, whose memory is kept
};

}  // namespace shardsmith
