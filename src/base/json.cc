// JSON text <-> Value.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_set>

#include "base/error.h"
#include "base/json_items.h"
#include "base/utf8.h"
#include "base/value.h"

namespace shardsmith {
namespace {

constexpr size_t kMaxDepth = 256;

std::string_view without_prefix(std::string_view message) {
  // nlohmann: "[json.exception.parse_error.101] parse error at line 1, column 2: ..."
  const size_t end = message.find("] ");
  return end == std::string_view::npos ? message : message.substr(end + 2);
}

// Builds Values without an intermediate tree. Open containers are kept on a stack of their own, so depth costs no
// machine stack here, and is limited for those who walk the result.
class Builder {
 public:
  using json = nlohmann::json;
  using Take = std::function<void(const Value&)>;
  // `key`, `take`: of parse_json_items.
  explicit Builder(std::string_view where, std::string_view key = {}, const Take* take = nullptr)
      : where_(where), key_(key), take_(take) {}

  bool null() { return add(Value()); }
  bool boolean(bool v) { return add(Value(v)); }
  bool number_integer(json::number_integer_t v) { return add(Value(static_cast<int64_t>(v))); }
  bool number_unsigned(json::number_unsigned_t v) {
    if (v > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return add(Value(BigInt{std::to_string(v)}));
    return add(Value(static_cast<int64_t>(v)));
  }
  bool number_float(json::number_float_t v, const std::string& text) {
    if (text.find_first_of(".eE") == std::string::npos && !text.empty()) return add(Value(BigInt{text}));
    return add(Value(static_cast<double>(v)));
  }
  bool string(std::string& v) { return add(Value(std::move(v))); }
  bool binary(json::binary_t&) { return false; }
  bool start_object(size_t) { return open(Value(Dict{})); }
  bool start_array(size_t) { return open(Value(List{})); }
  bool key(std::string& k) {
    Open& object = stack_.back();
    if (!object.is_new(k)) fail(ErrorKind::kCorrupt, where_, ": the key '", k, "' stands twice in one object");
    object.key = std::move(k);
    return true;
  }
  bool end_object() { return close(); }
  bool end_array() { return close(); }
  bool parse_error(size_t position, const std::string&, const json::exception& e) {
    fail(ErrorKind::kCorrupt, where_, ": not JSON at byte ", position, ": ", without_prefix(e.what()));
  }

  Value take() { return std::move(*root_); }

 private:
  struct Open {
    Value value;
    std::string key;
    std::unordered_set<std::string> keys;  // of a large object; of a small one the items are looked through

    bool is_new(const std::string& k) {
      constexpr size_t kSmall = 16;
      const Dict& dict = *value.get_if<Dict>();
      if (dict.items.size() < kSmall)
        return std::none_of(dict.items.begin(), dict.items.end(),
                            [&](const auto& item) { return *item.first.template get_if<std::string>() == k; });
      if (keys.empty())
        for (const auto& [name, item] : dict.items) keys.insert(*name.get_if<std::string>());
      return keys.insert(k).second;
    }
  };

  bool open(Value container) {
    if (stack_.size() >= kMaxDepth) fail(ErrorKind::kCorrupt, where_, ": nested deeper than ", kMaxDepth, " levels");
    stack_.push_back({std::move(container), {}, {}});
    return true;
  }
  bool close() {
    Value done = std::move(stack_.back().value);
    stack_.pop_back();
    return add(std::move(done));
  }
  bool add(Value value) {
    if (stack_.empty()) {
      root_ = std::move(value);
    } else if (Dict* dict = stack_.back().value.get_if<Dict>()) {
      dict->items.emplace_back(Value(std::move(stack_.back().key)), std::move(value));
    } else if (take_ && stack_.size() == 2 && stack_.front().key == key_) {
      (*take_)(value);
    } else {
      stack_.back().value.get_if<List>()->push_back(std::move(value));
    }
    return true;
  }

  std::string_view where_, key_;
  const Take* take_;
  std::vector<Open> stack_;
  std::optional<Value> root_;
};

class Printer {
 public:
  explicit Printer(int indent) : indent_(indent) {}
  std::string take() { return std::move(out_); }

  void print(const Value& value, int depth) {
    std::visit([&](const auto& v) { put(v, depth); }, value.variant());
  }

 private:
  void put(const None&, int) { out_ += "null"; }
  void put(bool v, int) { out_ += v ? "true" : "false"; }
  void put(int64_t v, int) { out_ += std::to_string(v); }
  void put(double v, int depth) {
    if (!std::isfinite(v)) {
      put_kind("float", {{"value", Value(std::isnan(v) ? "nan" : v > 0 ? "inf" : "-inf")}}, depth);
      return;
    }
    char text[40];
    const auto end = std::to_chars(text, text + sizeof(text), v).ptr;
    const std::string_view digits(text, end - text);
    out_ += digits;
    if (digits.find_first_of(".e") == std::string_view::npos) out_ += ".0";  // stays a float when read back
  }
  void put(const std::string& v, int) { put_string(v); }
  void put(const Bytes& v, int depth) {
    static const char* hex = "0123456789abcdef";
    std::string digits;
    for (unsigned char c : v.data) {
      digits += hex[c >> 4];
      digits += hex[c & 15];
    }
    put_kind("bytes", {{"hex", Value(digits)}}, depth);
  }
  void put(const List& v, int depth) { put_items(v, depth); }
  void put(const Tuple& v, int depth) { put_items(v.items, depth); }
  void put(const Set& v, int depth) { put_items(v.items, depth); }
  void put(const Dict& v, int depth) {
    if (v.items.empty()) {
      out_ += "{}";
      return;
    }
    out_ += '{';
    bool first = true;
    for (const auto& [key, item] : v.items) {
      if (!first) out_ += ',';
      first = false;
      line(depth + 1);
      if (const std::string* text = key.get_if<std::string>())
        put_string(*text);
      else
        put_string(to_json(key));
      out_ += indent_ < 0 ? ":" : ": ";
      print(item, depth + 1);
    }
    line(depth);
    out_ += '}';
  }
  void put(const TensorRef& v, int depth) {
    put_kind("tensor", {{"index", Value(static_cast<int64_t>(v.index))}}, depth);
  }
  void put(const Opaque& v, int depth) {
    put_kind("object", {{"class", Value(v.class_name)}, {"state", Value(List(v.state))}}, depth);
  }
  void put(const BigInt& v, int) { out_ += v.digits; }
  void put(const Complex& v, int depth) {
    put_kind("complex", {{"real", Value(v.real)}, {"imag", Value(v.imag)}}, depth);
  }
  void put(const DtypeName& v, int depth) { put_kind("dtype", {{"name", Value(v.name)}}, depth); }

  void put_kind(const char* kind, std::vector<std::pair<const char*, Value>> fields, int depth) {
    Dict dict;
    dict.items.emplace_back(Value("__kind__"), Value(kind));
    for (auto& [name, value] : fields) dict.items.emplace_back(Value(name), std::move(value));
    put(dict, depth);
  }
  void put_items(const List& items, int depth) {
    if (items.empty()) {
      out_ += "[]";
      return;
    }
    out_ += '[';
    for (size_t i = 0; i < items.size(); ++i) {
      if (i) out_ += ',';
      line(depth + 1);
      print(items[i], depth + 1);
    }
    line(depth);
    out_ += ']';
  }
  void put_string(std::string_view text) {
    static const char* hex = "0123456789abcdef";
    out_ += '"';
    for (size_t i = 0; i < text.size();) {
      const unsigned char c = text[i];
      const size_t n = utf8_length(text, i);
      if (n == 0) {
        out_ += "\\ufffd";
        ++i;
        continue;
      }
      if (c == '"' || c == '\\') {
        out_ += '\\';
        out_ += static_cast<char>(c);
      } else if (const char* short_form = short_escape(c)) {
        out_ += short_form;
      } else if (c < 0x20) {
        out_ += "\\u00";
        out_ += hex[c >> 4];
        out_ += hex[c & 15];
      } else {
        out_ += text.substr(i, n);
      }
      i += n;
    }
    out_ += '"';
  }
  static const char* short_escape(unsigned char c) {
    switch (c) {
      case '\b':
        return "\\b";
      case '\f':
        return "\\f";
      case '\n':
        return "\\n";
      case '\r':
        return "\\r";
      case '\t':
        return "\\t";
      default:
        return nullptr;
    }
  }
  void line(int depth) {
    if (indent_ < 0) return;
    out_ += '\n';
    out_.append(static_cast<size_t>(indent_) * depth, ' ');
  }

  int indent_;
  std::string out_;
};

const std::string* text_of(const Value& value, std::string_view key) {
  const Value* found = value.find(key);
  return found ? found->get_if<std::string>() : nullptr;
}

double number_of(const Value* value) {
  if (!value) return 0;
  if (const double* d = value->get_if<double>()) return *d;
  return 0;
}

std::optional<std::string> unhex(const std::string& digits) {
  const auto nibble = [](char c) { return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; };
  std::string bytes;
  if (digits.size() % 2) return {};
  for (size_t i = 0; i < digits.size(); i += 2) {
    const int high = nibble(digits[i]), low = nibble(digits[i + 1]);
    if (high < 0 || low < 0) return {};
    bytes += static_cast<char>(high * 16 + low);
  }
  return bytes;
}

}  // namespace

Value parse_json(std::string_view text, std::string_view where) {
  Builder builder(where);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

Value parse_json_items(std::string_view text, std::string_view where, std::string_view key,
                       const std::function<void(const Value& item)>& take) {
  Builder builder(where, key, &take);
  nlohmann::json::sax_parse(text.begin(), text.end(), &builder);
  return builder.take();
}

std::string to_json(const Value& value, int indent) {
  Printer printer(indent);
  printer.print(value, 0);
  return printer.take();
}

Value restore_kinds(Value value) {
  if (List* list = value.get_if<List>()) {
    for (Value& item : *list) item = restore_kinds(std::move(item));
    return value;
  }
  Dict* dict = value.get_if<Dict>();
  if (!dict) return value;
  for (auto& [key, item] : dict->items) item = restore_kinds(std::move(item));
  const std::string* kind = text_of(value, "__kind__");
  if (!kind) return value;
  if (*kind == "float") {
    const std::string* text = text_of(value, "value");
    if (text && *text == "nan") return Value(std::numeric_limits<double>::quiet_NaN());
    if (text && *text == "inf") return Value(std::numeric_limits<double>::infinity());
    if (text && *text == "-inf") return Value(-std::numeric_limits<double>::infinity());
  } else if (*kind == "bytes") {
    if (const std::string* digits = text_of(value, "hex"))
      if (auto bytes = unhex(*digits)) return Value(Bytes{*bytes});
  } else if (*kind == "complex") {
    return Value(Complex{number_of(value.find("real")), number_of(value.find("imag"))});
  } else if (*kind == "dtype") {
    if (const std::string* name = text_of(value, "name")) return Value(DtypeName{*name});
  } else if (*kind == "tensor") {
    const Value* index = value.find("index");
    if (index && index->get_if<int64_t>()) return Value(TensorRef{static_cast<size_t>(*index->get_if<int64_t>())});
  } else if (*kind == "object") {
    const std::string* name = text_of(value, "class");
    const Value* state = value.find("state");
    if (name && state && state->get_if<List>()) return Value(Opaque{*name, *state->get_if<List>()});
  }
  return value;
}

}  // namespace shardsmith
