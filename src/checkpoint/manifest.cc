#include "checkpoint/manifest.h"

#include <cmath>
#include <set>

#include "base/error.h"

namespace shardsmith {
namespace {

Value number_list(const std::vector<int>& numbers) {
  List list;
  for (int n : numbers) list.emplace_back(n);
  return list;
}

// Takes the manifest's fields out of the JSON, trusting nothing.
class Fields {
 public:
  Fields(const Value& value, const std::string& path) : value_(value), path_(path) {}

  const Value& get(const char* key) const {
    const Value* found = value_.find(key);
    if (!found) fail(ErrorKind::kCorrupt, path_, ": '", key, "' is missing");
    return *found;
  }
  int64_t integer(const char* key, int64_t least, int64_t most) const {
    const int64_t* n = get(key).get_if<int64_t>();
    if (!n || *n < least || *n > most) wrong(key, str("a whole number from ", least, " to ", most));
    return *n;
  }
  int degree(const char* key) const { return static_cast<int>(integer(key, 1, 1 << 24)); }
  double number(const char* key) const {
    const Value& found = get(key);
    if (const int64_t* n = found.get_if<int64_t>()) return static_cast<double>(*n);
    const double* n = found.get_if<double>();
    if (!n || !std::isfinite(*n)) wrong(key, "a number");
    return *n;
  }
  const std::string& text(const char* key) const {
    const std::string* s = get(key).get_if<std::string>();
    if (!s) wrong(key, "a text");
    return *s;
  }
  const List& list(const char* key) const {
    const List* l = get(key).get_if<List>();
    if (!l) wrong(key, "a list");
    return *l;
  }
  [[noreturn]] void wrong(const char* key, const std::string& expected) const {
    fail(ErrorKind::kCorrupt, path_, ": '", key, "' is ", to_json(get(key)), ", expected ", expected);
  }

 private:
  const Value& value_;
  const std::string& path_;
};

}  // namespace

bool is_bare_name(std::string_view name) {
  if (name.empty() || name == "." || name == "..") return false;
  for (char c : name) {
    if (c == '/' || static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return false;
  }
  return true;
}

Value to_value(const Manifest& m) {
  Value json;
  json.set("format_version", m.format_version);
  json.set("save_id", m.save_id);
  json.set("tag", m.tag);
  json.set("step", m.step);
  json.set("time", m.time);
  json.set("world_size", m.world_size);
  json.set("pp", m.pp);
  json.set("tp", m.tp);
  json.set("rdp", m.rdp);
  json.set("placement", m.placement);
  json.set("partition", number_list(m.partition.first));
  json.set("model_config", m.model_config);
  json.set("hf", m.hf);
  List files;
  for (const ManifestFile& file : m.files) {
    Value entry;
    entry.set("name", file.name);
    entry.set("size", static_cast<int64_t>(file.size));
    entry.set("digest", file.digest);
    entry.set("tail", file.tail);
    files.push_back(std::move(entry));
  }
  json.set("files", std::move(files));
  return json;
}

std::string to_json_text(const Manifest& manifest) { return to_json(to_value(manifest), 2) + "\n"; }

Manifest read_manifest(Storage& storage, const std::string& folder) {
  const std::string path = join(folder, kManifestName);
  return manifest_from(parse_json(read_text(storage, path), path), path);
}

Manifest manifest_from(const Value& json, const std::string& path) {
  const Fields fields(json, path);
  Manifest m;
  m.format_version = static_cast<int>(fields.integer("format_version", 1, 1 << 30));
  if (m.format_version > kFormatVersion) {
    fail(ErrorKind::kUnsupported, path, ": format version ", m.format_version, " is newer than this program's ",
         kFormatVersion, "; use a newer release");
  }
  m.save_id = fields.text("save_id");
  m.tag = fields.text("tag");
  m.step = fields.integer("step", INT64_MIN, INT64_MAX);
  m.time = fields.number("time");
  m.world_size = fields.degree("world_size");
  m.pp = fields.degree("pp"), m.tp = fields.degree("tp"), m.rdp = fields.degree("rdp");
  if (int64_t{m.pp} * m.tp > m.world_size || int64_t{m.pp} * m.tp * m.rdp != m.world_size) {
    fail(ErrorKind::kCorrupt, path, ": pp ", m.pp, " x tp ", m.tp, " x rdp ", m.rdp, " is not the world size ",
         m.world_size);
  }
  m.placement = fields.text("placement");
  for (const Value& first : fields.list("partition")) {
    const int64_t* n = first.get_if<int64_t>();
    const int64_t before = m.partition.first.empty() ? 0 : m.partition.first.back();
    if (!n || *n < before || *n > (1 << 24)) fields.wrong("partition", "ascending numbers of layers");
    m.partition.first.push_back(static_cast<int>(*n));
  }
  m.model_config = fields.get("model_config");
  m.hf = fields.text("hf");
  std::set<std::string> names;
  for (const Value& entry : fields.list("files")) {
    const Fields file(entry, path);
    ManifestFile f;
    f.name = file.text("name");
    // A manifest is no way out of its folder.
    if (!is_bare_name(f.name)) file.wrong("name", "a file name without folders");
    if (!names.insert(f.name).second) file.wrong("name", "each file once");
    f.size = static_cast<uint64_t>(file.integer("size", 0, INT64_MAX));
    f.digest = file.text("digest");
    f.tail = file.text("tail");
    m.files.push_back(std::move(f));
  }
  return m;
}

}  // namespace shardsmith
