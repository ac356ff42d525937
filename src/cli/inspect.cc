#include <algorithm>
#include <iostream>
#include <map>

#include "base/error.h"
#include "cli/command_line.h"
#include "cli/describe.h"
#include "cli/source.h"
#include "cli/verbs.h"
#include "storage/storage.h"

namespace shardsmith::cli {
namespace {

struct Total {
  int64_t tensors = 0, elements = 0;
  uint64_t bytes = 0;
};
using Totals = std::map<std::string, Total>;

// The first part of a name that says something: "model", "optimizer", "transformer", ...
std::string prefix(const std::string& name) {
  const std::string first = name.substr(0, name.find_first_of("/."));
  return first == name ? "(top)" : first;
}

void count(Totals& totals, const std::string& key, const TensorEntry& tensor) {
  Total& total = totals[key];
  const int64_t elements = volume(tensor.shape);
  total.tensors += 1;
  total.elements += elements;
  total.bytes += static_cast<uint64_t>(elements * size_of(tensor.dtype));
}

std::string where(const Index& index, const TensorEntry& tensor) {
  if (!tensor.alias_of.empty()) return "= " + printable(tensor.alias_of);
  std::string result;
  for (size_t i = 0; i < tensor.slices.size(); ++i) {
    const Slice& slice = tensor.slices[i];
    if (i == 4 && tensor.slices.size() > 5) return result + str(", and ", tensor.slices.size() - i, " more");
    result += str(i ? ", " : "", printable(base_name(index.files[slice.file].path)), "@", slice.offset);
    if (tensor.slices.size() > 1) result += " " + to_string(slice.box);
  }
  return result;
}

std::string_view encoding_name(Encoding encoding) {
  return encoding == Encoding::kRaw ? "raw" : encoding == Encoding::kByteSwapped ? "byte_swapped" : "deflated";
}

// Plain values for people: tensors by their names, long lists cut.
Value readable(const Value& value, const Index& index, size_t longest) {
  const auto cut = [&](const List& items) {
    List result;
    for (const auto& item : items) {
      if (result.size() == longest) {
        result.emplace_back(str("... ", items.size() - longest, " more"));
        break;
      }
      result.push_back(readable(item, index, longest));
    }
    return result;
  };
  if (const auto* reference = value.get_if<TensorRef>()) {
    if (reference->index >= index.tensors.size()) return "<tensor>";
    return str("<tensor ", index.tensors[reference->index].name, ">");
  }
  if (const auto* list = value.get_if<List>()) return cut(*list);
  if (const auto* tuple = value.get_if<Tuple>()) return cut(tuple->items);
  if (const auto* set = value.get_if<Set>()) return cut(set->items);
  if (const auto* dict = value.get_if<Dict>()) {
    Dict result;
    for (const auto& [key, item] : dict->items) result.items.emplace_back(key, readable(item, index, longest));
    return result;
  }
  if (const auto* text = value.get_if<std::string>(); text && text->size() > 200 && longest < text->size()) {
    return text->substr(0, 200) + str("... ", text->size() - 200, " more");
  }
  if (const auto* opaque = value.get_if<Opaque>()) return str("<", opaque->class_name, ", not rebuilt>");
  return value;
}

// Whether a value says nothing but where tensors are: those are listed already.
bool only_tensors(const Value& value) {
  if (value.get_if<TensorRef>()) return true;
  if (const auto* list = value.get_if<List>()) {
    return !list->empty() && std::all_of(list->begin(), list->end(), only_tensors);
  }
  if (const auto* dict = value.get_if<Dict>()) {
    return !dict->items.empty() && std::all_of(dict->items.begin(), dict->items.end(),
                                               [](const auto& item) { return only_tensors(item.second); });
  }
  return false;
}

// The value without its branches of tensors.
Value without_tensors(const Value& value) {
  if (only_tensors(value)) return {};
  if (const auto* list = value.get_if<List>()) {
    List rest;
    for (const auto& item : *list) {
      if (!only_tensors(item)) rest.push_back(without_tensors(item));
    }
    return rest;
  }
  if (const auto* dict = value.get_if<Dict>()) {
    Dict rest;
    for (const auto& [key, item] : dict->items) {
      if (!only_tensors(item)) rest.items.emplace_back(key, without_tensors(item));
    }
    return rest;
  }
  return value;
}

void print_totals(const char* title, const Totals& totals) {
  Table table({false, true, true, true});
  for (const auto& [key, total] : totals) {
    table.add({printable(key), str(total.tensors, total.tensors == 1 ? " tensor" : " tensors"),
               human_count(total.elements) + " elements", human_bytes(total.bytes)});
  }
  std::cout << "\n" << bold(title) << "\n" << table.text();
}

Value totals_value(const Totals& totals) {
  Value value = Dict{};
  for (const auto& [key, total] : totals) {
    Value entry;
    entry.set("tensors", total.tensors);
    entry.set("elements", total.elements);
    entry.set("bytes", static_cast<int64_t>(total.bytes));
    value.set(key, entry);
  }
  return value;
}

Value tensor_value(const Index& index, const TensorEntry& tensor) {
  Value value;
  value.set("name", tensor.name);
  value.set("dtype", std::string(to_string(tensor.dtype)));
  value.set("shape", List(tensor.shape.begin(), tensor.shape.end()));
  if (!tensor.alias_of.empty()) value.set("alias_of", tensor.alias_of);
  List slices;
  for (const auto& slice : tensor.slices) {
    Value entry;
    entry.set("file", base_name(index.files[slice.file].path));
    entry.set("offset", static_cast<int64_t>(slice.offset));
    entry.set("begin", List(slice.box.offset.begin(), slice.box.offset.end()));
    entry.set("extent", List(slice.box.extent.begin(), slice.box.extent.end()));
    entry.set("strides", List(slice.strides.begin(), slice.strides.end()));
    entry.set("encoding", std::string(encoding_name(slice.encoding)));
    slices.push_back(entry);
  }
  value.set("slices", slices);
  return value;
}

struct Sums {
  Totals by_dtype, by_prefix;
  Total all;
};

Sums sum(const Index& index) {
  Sums sums;
  Totals all;
  for (const auto& tensor : index.tensors) {
    if (!tensor.alias_of.empty()) continue;  // its elements are counted once
    count(sums.by_dtype, std::string(to_string(tensor.dtype)), tensor);
    count(sums.by_prefix, prefix(tensor.name), tensor);
    count(all, "", tensor);
  }
  sums.all = all[""];
  return sums;
}

uint64_t file_bytes(const Index& index) {
  uint64_t bytes = 0;
  for (const auto& file : index.files) bytes += file.size;
  return bytes;
}

bool empty(const Value& value) {
  const auto* dict = value.get_if<Dict>();
  return value.is_none() || (dict && dict->items.empty());
}

void print_json(const std::string& path, const Source& source, const Output& output) {
  const Sums sums = sum(source.index);
  Value object;
  object.set("path", path);
  object.set("format", source.format);
  if (source.manifest) object.set("manifest", manifest_value(*source.manifest));
  List files, tensors;
  for (const auto& file : source.index.files) {
    Value entry;
    entry.set("path", file.path);
    entry.set("bytes", static_cast<int64_t>(file.size));
    entry.set("checksums", file.checksums != nullptr);
    files.push_back(entry);
  }
  for (const auto& tensor : source.index.tensors) tensors.push_back(tensor_value(source.index, tensor));
  object.set("files", files);
  object.set("tensors", tensors);
  object.set("by_dtype", totals_value(sums.by_dtype));
  object.set("by_prefix", totals_value(sums.by_prefix));
  object.set("values", readable(source.index.values, source.index, SIZE_MAX));
  output.print(object);
}

void print_human(const std::string& path, const Source& source, bool tensors) {
  const Index& index = source.index;
  const Sums sums = sum(index);
  std::cout << bold(printable(path)) << ": " << source.format << ", " << index.tensors.size() << " tensors, "
            << human_count(sums.all.elements) << " elements, " << human_bytes(file_bytes(index)) << " in "
            << index.files.size() << (index.files.size() == 1 ? " file" : " files") << "\n";
  if (source.manifest) {
    const Manifest& manifest = *source.manifest;
    std::cout << "step " << manifest.step << ", saved " << human_time(manifest.time) << " by " << layout_words(manifest)
              << "\n\n"
              << bold("Layout") << "\n"
              << layout_picture(manifest);
  }
  if (tensors && !index.tensors.empty()) {
    Table table({});
    for (const auto& tensor : index.tensors) {
      table.add({printable(tensor.name), std::string(to_string(tensor.dtype)), to_string(tensor.shape),
                 dim(where(index, tensor))});
    }
    std::cout << "\n" << bold("Tensors") << "\n" << table.text();
  }
  print_totals("By element type", sums.by_dtype);
  print_totals("By prefix", sums.by_prefix);
  const Value values = without_tensors(index.values);
  if (!empty(values)) std::cout << "\n" << bold("Values") << "\n" << to_json(readable(values, index, 8), 2) << "\n";
}

}  // namespace

int run_inspect(const Arguments& arguments) {
  CommandLine line(
      "inspect",
      "What a checkpoint or model holds: a partial checkpoint, a Hugging Face folder, a .pt or .bin file,\n"
      "a safetensors file. Recognised by content; nothing in it is executed.");
  std::string path, filter;
  bool summary = false;
  line.app().add_option("PATH", path, "A file or folder")->required();
  line.app().add_option("--filter", filter, "Only tensors whose name contains this");
  line.app().add_flag("--summary", summary, "No list of tensors");
  if (!line.parse(arguments)) return 0;
  path = given_path(path);

  Source source = open_source(local_storage(), path);
  if (!filter.empty()) {
    auto& tensors = source.index.tensors;
    // References in the values count in the whole list.
    source.index.values = readable(source.index.values, source.index, SIZE_MAX);
    std::erase_if(tensors, [&](const TensorEntry& tensor) { return tensor.name.find(filter) == std::string::npos; });
    source.index.reindex();
  }
  if (line.output().json) {
    print_json(path, source, line.output());
  } else {
    print_human(path, source, !summary);
  }
  return 0;
}

}  // namespace shardsmith::cli
