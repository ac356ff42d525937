// What the fuzz targets share. A target is a function that reads bytes as one reader of ours would; only an Error may
// come out of that, which `errors_only` swallows. Whatever a reader lets through is then believed, and checked.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "layout/plan.h"
#include "storage/storage.h"

namespace shardsmith::fuzz {

// Each target file registers itself; a fuzzer is linked with one, the replay of the corpus with all.
struct Target {
  const char* name;
  void (*run)(std::string_view input);
};
std::vector<Target>& targets();
struct Registration {
  Registration(const char* name, void (*run)(std::string_view)) { targets().push_back({name, run}); }
};

// Ends the process, so that the fuzzer keeps the input.
[[noreturn]] void broken(std::string_view what);
inline void require(bool holds, std::string_view what) {
  if (!holds) broken(what);
}

// Runs `call`; false if it threw an Error.
template <typename Call>
bool errors_only(const Call& call) {
  try {
    call();
    return true;
  } catch (const Error&) {
    return false;
  }
}

// Files in memory that are only read.
class Files final : public Storage {
 public:
  void add(const std::string& path, std::string bytes) { files_[path] = std::move(bytes); }
  void add_link(const std::string& path, std::string target) { links_[path] = std::move(target); }
  const std::string& bytes(const std::string& path) const { return files_.at(path); }
  // Null where `path` is a folder, a link or nothing.
  const std::string* find(const std::string& path) const {
    const auto found = files_.find(path);
    return found == files_.end() ? nullptr : &found->second;
  }

  std::unique_ptr<ReadFile> open_read(const std::string& path, Access access = Access::kBuffered) override;
  Stat stat(const std::string& path) override;
  std::string read_link(const std::string& path) override;
  std::vector<std::string> list(const std::string& directory) override;
  uint64_t free_bytes(const std::string&) override { return 0; }

  std::unique_ptr<WriteFile> create(const std::string&, Access, uint64_t) override {
    broken("a reader creates a file");
  }
  std::unique_ptr<WriteFile> open_write(const std::string&, Access) override { broken("a reader opens to write"); }
  void make_directory(const std::string&) override { broken("a reader makes a folder"); }
  void rename(const std::string&, const std::string&) override { broken("a reader renames"); }
  bool exchange(const std::string&, const std::string&) override { broken("a reader exchanges"); }
  void remove_file(const std::string&) override { broken("a reader removes a file"); }
  void remove_directory(const std::string&) override { broken("a reader removes a folder"); }
  void sync_directory(const std::string&) override { broken("a reader syncs"); }

 private:
  std::map<std::string, std::string> files_, links_;
};

// Several files in one input, each after a line "@@@@NAME\n":
//   NAME            a file of `folder`, as it is; of zips the checksums are forgotten, or nothing would get past them
//   link:NAME       a link; its bytes are where it leads
//   NAME!RECORD     a record of the torch archive NAME, which is put together from them
void unpack(std::string_view input, const std::string& folder, Files& files);
inline bool is_packed(std::string_view input) { return input.starts_with("@@@@"); }

// Sets the CRC-32 of each record in a zip's directory to 0, which says that there is none.
void forget_checksums(std::string& bytes);

// The Index of a reader: bounds must hold, always. If it is small, all of it is planned, executed and compared with
// what the Index's words mean, element by element.
void read_everything(const Index& index, Files& files);

// `out` (filled with 0xa5 before) is what executing a plan for `target` must have made of it. Elements that no slice
// holds, or more than one, or that were cast, are not looked at; places that nobody wants must be as before.
void compare_wants(const Index& index, const shardsmith::Target& target, const Files& files,
                   const std::vector<std::string>& out);

}  // namespace shardsmith::fuzz
