// A file system in memory that knows what is durable: bytes after a sync of their file, names after a sync of their
// folder. cut_power_at(n) ends it before changing call n; reboot() then shows what a disk could hold: of each folder a
// prefix of its unsynced changes (none, or as many as `random` says), of each unsynced file its old, its new, or half
// of its new bytes. Thread-safe.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "base/error.h"
#include "storage/storage.h"

namespace shardsmith {

// No std::exception, so that nobody takes it for an error to be handled.
struct PowerCut {};

class MemoryStorage final : public Storage {
 public:
  explicit MemoryStorage(bool with_exchange = true) : with_exchange_(with_exchange), root_(new_folder()) {}

  void cut_power_at(int64_t call) { cut_at_ = call, calls_ = 0; }
  int64_t calls() const { return calls_; }
  void reboot(std::mt19937* random = nullptr) {
    std::lock_guard lock(mutex_);
    cut_at_ = -1;
    dead_ = false;
    std::set<Node*> seen;
    if (random) keep_some(*root_, *random, seen);
    revert(*root_, random);
  }

  // Whether all that is at `path` now would be there after a power cut, its names and all bytes below.
  bool is_durable(const std::string& path) {
    std::lock_guard lock(mutex_);
    NodePtr node = root_;
    for (const std::string& part : parts(path)) {
      const auto now = node->entries.find(part), then = node->durable_entries.find(part);
      if (now == node->entries.end() || then == node->durable_entries.end() || now->second != then->second)
        return false;
      node = now->second;
    }
    return is_durable(*node);
  }
  // Whether this name, and none that it had before, would be its name after a power cut, whatever it holds.
  bool has_durable_name(const std::string& path) {
    std::lock_guard lock(mutex_);
    const NodePtr node = find(path), folder = need_folder(parent(path));
    const auto& names = folder->durable_entries;
    return std::all_of(names.begin(), names.end(),
                       [&](const auto& entry) { return (entry.second == node) == (entry.first == base_name(path)); });
  }
  // The bytes of a file, whatever its name.
  bool has_durable_bytes(const std::string& file) {
    std::lock_guard lock(mutex_);
    const NodePtr node = find(file);
    return node && node->bytes == node->durable_bytes;
  }

  std::unique_ptr<ReadFile> open_read(const std::string& path, Access) override {
    std::lock_guard lock(mutex_);
    const auto node = find(path);
    if (!node) fail(ErrorKind::kNotFound, path, ": opening failed: No such file or directory (ENOENT)");
    if (node->folder) fail(ErrorKind::kIo, path, ": opening failed: Is a directory (EISDIR)");
    return std::make_unique<Reader>(*this, path, node);
  }
  std::unique_ptr<WriteFile> create(const std::string& path, Access, uint64_t) override {
    std::lock_guard lock(mutex_);
    step();
    auto folder = need_folder(parent(path));
    auto& entry = folder->entries[base_name(path)];
    if (!entry) {
      entry = std::make_shared<Node>();
      folder->unsynced.push_back(Change({{base_name(path), entry}}));
    }
    entry->bytes.clear();
    return std::make_unique<Writer>(*this, path, entry);
  }
  std::unique_ptr<WriteFile> open_write(const std::string& path, Access) override {
    std::lock_guard lock(mutex_);
    const auto node = find(path);
    if (!node) fail(ErrorKind::kNotFound, path, ": opening for writing failed: No such file or directory (ENOENT)");
    return std::make_unique<Writer>(*this, path, node);
  }
  Stat stat(const std::string& path) override {
    std::lock_guard lock(mutex_);
    const auto node = find(path);
    if (!node) return {};
    return {.exists = true, .is_directory = node->folder, .is_link = false, .size = node->bytes.size()};
  }
  std::vector<std::string> list(const std::string& directory) override {
    std::lock_guard lock(mutex_);
    std::vector<std::string> names;
    for (const auto& [name, node] : need_folder(directory)->entries) names.push_back(name);
    return names;
  }
  void make_directory(const std::string& path) override {
    std::lock_guard lock(mutex_);
    step();
    make(path);
  }
  void rename(const std::string& from, const std::string& to) override {
    std::lock_guard lock(mutex_);
    step();
    const auto node = find(from);
    if (!node) fail(ErrorKind::kNotFound, from, ": renaming failed: No such file or directory (ENOENT)");
    const auto there = find(to);
    if (there && there->folder && !there->entries.empty()) fail(ErrorKind::kIo, from, ": renaming failed (ENOTEMPTY)");
    move(from, to, node);
  }
  bool exchange(const std::string& a, const std::string& b) override {
    std::lock_guard lock(mutex_);
    step();
    if (!with_exchange_) return false;
    const auto one = find(a), other = find(b);
    if (!one || !other) fail(ErrorKind::kNotFound, a, ": exchanging failed (ENOENT)");
    change(a, b, Change({{base_name(a), other}, {base_name(b), one}}));
    return true;
  }
  void remove_file(const std::string& path) override { remove(path); }
  void remove_directory(const std::string& path) override { remove(path); }
  void sync_directory(const std::string& path) override {
    std::lock_guard lock(mutex_);
    step();
    make_durable(*need_folder(path), SIZE_MAX);
  }
  uint64_t free_bytes(const std::string&) override { return uint64_t{1} << 40; }

 private:
  struct Node;
  using NodePtr = std::shared_ptr<Node>;
  // Happens as one; across folders together with the other folder's change of the same number.
  struct Change {
    std::vector<std::pair<std::string, NodePtr>> entries;
    Node* other = nullptr;
    int64_t number = 0;
    Change(std::vector<std::pair<std::string, NodePtr>> e, Node* o = nullptr, int64_t n = 0)
        : entries(std::move(e)), other(o), number(n) {}
  };
  struct Node {
    bool folder = false;
    std::string bytes, durable_bytes;
    std::map<std::string, NodePtr> entries, durable_entries;
    std::vector<Change> unsynced;
  };

  class Reader final : public ReadFile {
   public:
    Reader(MemoryStorage& storage, std::string path, NodePtr node)
        : storage_(storage), path_(std::move(path)), node_(std::move(node)) {}
    uint64_t size() const override { return node_->bytes.size(); }
    const std::string& path() const override { return path_; }
    void read(uint64_t offset, std::span<std::byte> out) override {
      std::lock_guard lock(storage_.mutex_);
      if (offset + out.size() > node_->bytes.size()) fail(ErrorKind::kCorrupt, path_, ": truncated");
      std::copy_n(reinterpret_cast<const std::byte*>(node_->bytes.data()) + offset, out.size(), out.data());
    }

   private:
    MemoryStorage& storage_;
    std::string path_;
    NodePtr node_;
  };

  class Writer final : public WriteFile {
   public:
    Writer(MemoryStorage& storage, std::string path, NodePtr node)
        : storage_(storage), path_(std::move(path)), node_(std::move(node)) {}
    const std::string& path() const override { return path_; }
    void write(uint64_t offset, std::span<const std::byte> bytes) override {
      std::lock_guard lock(storage_.mutex_);
      storage_.step();
      if (node_->bytes.size() < offset + bytes.size()) node_->bytes.resize(offset + bytes.size());
      std::copy(bytes.begin(), bytes.end(), reinterpret_cast<std::byte*>(node_->bytes.data()) + offset);
    }
    void truncate(uint64_t size) override {
      std::lock_guard lock(storage_.mutex_);
      storage_.step();
      node_->bytes.resize(size);
    }
    void sync() override {
      std::lock_guard lock(storage_.mutex_);
      storage_.step();
      node_->durable_bytes = node_->bytes;
    }
    void close() override {}

   private:
    MemoryStorage& storage_;
    std::string path_;
    NodePtr node_;
  };

  static bool is_durable(const Node& node) {
    if (!node.folder) return node.bytes == node.durable_bytes;
    return node.entries == node.durable_entries &&
           std::all_of(node.entries.begin(), node.entries.end(),
                       [](const auto& entry) { return is_durable(*entry.second); });
  }
  static NodePtr new_folder() {
    auto node = std::make_shared<Node>();
    node->folder = true;
    return node;
  }

  void step() {
    if (calls_++ == cut_at_) dead_ = true;
    if (dead_) throw PowerCut();
  }

  static std::vector<std::string> parts(const std::string& path) {
    std::vector<std::string> result;
    std::string part;
    for (char c : path + "/") {
      if (c != '/')
        part += c;
      else if (!part.empty())
        result.push_back(std::exchange(part, ""));
    }
    if (!result.empty() && result[0] == ".") result.erase(result.begin());
    return result;
  }
  NodePtr find(const std::string& path) const {
    NodePtr node = root_;
    for (const std::string& part : parts(path)) {
      const auto it = node->entries.find(part);
      if (it == node->entries.end()) return nullptr;
      node = it->second;
    }
    return node;
  }
  NodePtr need_folder(const std::string& path) const {
    const NodePtr node = find(path);
    if (!node || !node->folder) fail(ErrorKind::kNotFound, path, ": No such file or directory (ENOENT)");
    return node;
  }
  void make(const std::string& path) {
    NodePtr node = root_;
    for (const std::string& part : parts(path)) {
      NodePtr& next = node->entries[part];
      if (!next) {
        next = new_folder();
        node->unsynced.push_back(Change({{part, next}}));
      }
      node = next;
    }
  }
  void remove(const std::string& path) {
    std::lock_guard lock(mutex_);
    step();
    const auto folder = find(parent(path));
    if (!folder || folder->entries.erase(base_name(path)) == 0) return;
    folder->unsynced.push_back(Change({{base_name(path), nullptr}}));
  }
  static void apply(std::map<std::string, NodePtr>& entries, const Change& change) {
    for (const auto& [name, node] : change.entries) {
      if (node)
        entries[name] = node;
      else
        entries.erase(name);
    }
  }
  void move(const std::string& from, const std::string& to, const NodePtr& node) {
    if (parent(from) == parent(to))
      return change(from, to, Change({{base_name(from), nullptr}, {base_name(to), node}}));
    const auto source = need_folder(parent(from)), target = need_folder(parent(to));
    const int64_t number = ++crossings_;
    Change leaves({{base_name(from), nullptr}}, target.get(), number),
        comes({{base_name(to), node}}, source.get(), number);
    apply(source->entries, leaves);
    apply(target->entries, comes);
    source->unsynced.push_back(std::move(leaves));
    target->unsynced.push_back(std::move(comes));
  }
  static size_t place_of(const Node& folder, int64_t number) {
    for (size_t i = 0; i < folder.unsynced.size(); ++i)
      if (folder.unsynced[i].number == number) return i;
    return SIZE_MAX;
  }
  // The first `count` unsynced changes of a folder, and what happened in other folders with them or before.
  static void make_durable(Node& folder, size_t count) {
    std::vector<Change> changes = std::move(folder.unsynced);
    count = std::min(count, changes.size());
    folder.unsynced.assign(changes.begin() + static_cast<std::ptrdiff_t>(count), changes.end());
    for (size_t i = 0; i < count; ++i) {
      apply(folder.durable_entries, changes[i]);
      if (!changes[i].other) continue;
      const size_t place = place_of(*changes[i].other, changes[i].number);
      if (place != SIZE_MAX) make_durable(*changes[i].other, place + 1);
    }
  }
  void change(const std::string& from, const std::string& to, Change change) {
    if (parent(from) != parent(to)) throw std::logic_error("an exchange across folders");
    const auto folder = need_folder(parent(from));
    apply(folder->entries, change);
    folder->unsynced.push_back(std::move(change));
  }
  static void revert(Node& node, std::mt19937* random) {
    if (!node.folder) {
      if (node.bytes != node.durable_bytes) {
        const unsigned choice = random ? (*random)() % 3 : 0;
        if (choice == 1) node.bytes.resize(node.bytes.size() / 2);
        if (choice == 0) node.bytes = node.durable_bytes;
      }
      node.durable_bytes = node.bytes;
      return;
    }
    node.unsynced.clear();
    node.entries = node.durable_entries;
    for (auto& [name, child] : node.entries) revert(*child, random);
  }
  // Of each folder a prefix of its unsynced changes gets durable after all.
  static void keep_some(Node& folder, std::mt19937& random, std::set<Node*>& seen) {
    if (!folder.folder || !seen.insert(&folder).second) return;
    const std::map<std::string, NodePtr> entries = folder.entries, durable = folder.durable_entries;
    make_durable(folder, random() % (folder.unsynced.size() + 1));
    for (const auto& [name, node] : entries) keep_some(*node, random, seen);
    for (const auto& [name, node] : durable) keep_some(*node, random, seen);
  }

  const bool with_exchange_;
  std::mutex mutex_;
  NodePtr root_;
  int64_t calls_ = 0, cut_at_ = -1, crossings_ = 0;
  bool dead_ = false;
};

// Passes everything on; tests override what they need.
class ForwardingStorage : public Storage {
 public:
  explicit ForwardingStorage(Storage& b) : base(b) {}
  std::unique_ptr<ReadFile> open_read(const std::string& p, Access a) override { return base.open_read(p, a); }
  std::unique_ptr<WriteFile> create(const std::string& p, Access a, uint64_t s) override {
    return base.create(p, a, s);
  }
  std::unique_ptr<WriteFile> open_write(const std::string& p, Access a) override { return base.open_write(p, a); }
  Stat stat(const std::string& p) override { return base.stat(p); }
  std::vector<std::string> list(const std::string& p) override { return base.list(p); }
  void make_directory(const std::string& p) override { base.make_directory(p); }
  void rename(const std::string& a, const std::string& b) override { base.rename(a, b); }
  bool exchange(const std::string& a, const std::string& b) override { return base.exchange(a, b); }
  void remove_file(const std::string& p) override { base.remove_file(p); }
  void remove_directory(const std::string& p) override { base.remove_directory(p); }
  void sync_directory(const std::string& p) override { base.sync_directory(p); }
  uint64_t free_bytes(const std::string& p) override { return base.free_bytes(p); }

 protected:
  Storage& base;
};

}  // namespace shardsmith
