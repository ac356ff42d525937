#include "cli/inspect.h"

#include <algorithm>
#include <iostream>

#include "base/error.h"
#include "cli/command_line.h"
#include "cli/describe.h"
#include "cli/html.h"
#include "cli/source.h"
#include "cli/values.h"
#include "cli/verbs.h"
#include "storage/storage.h"

namespace shardsmith::cli {
namespace {

struct Options {
  std::string filter, html;
  bool summary = false, slices = false;
  size_t depth = 1;
};

std::string padding_note(const TensorEntry& tensor) {
  const std::string padding = padding_of(tensor);
  return padding.empty() ? "" : dim(" padded: the last holds " + padding);
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

void print_totals(const char* title, const Totals& totals) {
  Table table({false, true, true, true});
  for (const auto& [key, total] : totals) {
    table.add({printable(key), str(total.tensors, total.tensors == 1 ? " tensor" : " tensors"),
               human_count(total.elements) + " elements", human_bytes(total.bytes)});
  }
  std::cout << "\n" << bold(title) << "\n" << table.text();
}

Value totals_value(const Totals& totals) {
  Dict value;
  for (const auto& [key, total] : totals) {
    Value entry;
    entry.set("tensors", total.tensors);
    entry.set("elements", total.elements);
    entry.set("bytes", static_cast<int64_t>(total.bytes));
    value.items.emplace_back(key, entry);
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

uint64_t file_bytes(const Index& index) {
  uint64_t bytes = 0;
  for (const auto& file : index.files) bytes += file.size;
  return bytes;
}

void print_json(const std::string& path, const Source& source, const Options& options, const Output& output) {
  const Sums sums = sum(source.index, options.depth);
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
  if (!options.html.empty()) object.set("html", options.html);
  output.print(object);
}

// Every slice, in the order of the tensors.
void print_slices(const Index& index) {
  Table table({false, false, false, true, true});
  for (const auto& tensor : index.tensors) {
    for (const auto& slice : tensor.slices) {
      table.add(
          {printable(tensor.name), to_string(slice.box), printable(base_name(index.files[slice.file].path)),
           str("@", slice.offset),
           human_bytes(static_cast<uint64_t>(volume(slice.box.extent)) * static_cast<uint64_t>(size_of(tensor.dtype))),
           dim(str(
               "strides ", to_string(slice.strides),
               slice.encoding == Encoding::kRaw ? std::string() : ", " + std::string(encoding_name(slice.encoding))))});
    }
  }
  std::cout << "\n" << bold("Slices") << "\n" << table.text();
}

void print_human(const std::string& path, const Source& source, const Options& options) {
  const Index& index = source.index;
  const Sums sums = sum(index, options.depth);
  std::cout << bold(printable(path)) << ": " << source.format << ", " << index.tensors.size() << " tensors, "
            << human_count(sums.all.elements) << " elements, " << human_bytes(file_bytes(index)) << " in "
            << index.files.size() << (index.files.size() == 1 ? " file" : " files") << "\n";
  if (source.manifest) {
    const Manifest& manifest = *source.manifest;
    std::cout << "step " << manifest.step << ", saved " << human_time(manifest.time) << " by " << layout_words(manifest)
              << "\n";
    const std::string picture = layout_picture(manifest);
    if (!picture.empty()) std::cout << "\n" << bold("Layout") << "\n" << picture;
  }
  if (!options.summary && !index.tensors.empty()) {
    Table table({});
    for (const auto& tensor : index.tensors) {
      table.add({printable(tensor.name), std::string(to_string(tensor.dtype)), to_string(tensor.shape),
                 dim(where(index, tensor)) + padding_note(tensor)});
    }
    std::cout << "\n" << bold("Tensors") << "\n" << table.text();
  }
  if (options.slices) print_slices(index);
  print_totals("By element type", sums.by_dtype);
  print_totals("By prefix", sums.by_prefix);
  const Value values = without_tensors(index.values);
  if (!is_empty(values))
    std::cout << "\n" << bold("Values") << "\n" << printable_lines(to_json(readable(values, index, 8), 2)) << "\n";
}

}  // namespace

std::string prefix_of(const std::string& name, size_t depth) {
  size_t end = 0;
  for (size_t part = 0; part < depth; ++part) {
    const size_t next = name.find_first_of("/.", end == 0 ? 0 : end + 1);
    if (next == std::string::npos) break;
    end = next;
  }
  return end == 0 ? "(top)" : name.substr(0, end);
}

uint64_t bytes_of(const TensorEntry& tensor) {
  return static_cast<uint64_t>(volume(tensor.shape)) * static_cast<uint64_t>(size_of(tensor.dtype));
}

Sums sum(const Index& index, size_t depth) {
  Sums sums;
  for (const auto& tensor : index.tensors) {
    if (!tensor.alias_of.empty()) continue;
    for (Total* total : {&sums.by_dtype[std::string(to_string(tensor.dtype))],
                         &sums.by_prefix[prefix_of(tensor.name, depth)], &sums.all}) {
      total->tensors += 1;
      // Strides of 0 let a small file claim any number.
      if (__builtin_add_overflow(total->elements, volume(tensor.shape), &total->elements)) total->elements = INT64_MAX;
      total->bytes += bytes_of(tensor);
    }
  }
  return sums;
}

std::string padding_of(const TensorEntry& tensor) {
  if (tensor.slices.size() < 2) return "";
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    int64_t full = 0, last = 0, last_at = -1;
    bool equal = true, along = true;
    for (const Slice& slice : tensor.slices) {
      full = std::max(full, slice.box.extent[d]);
      if (slice.box.offset[d] > last_at) last_at = slice.box.offset[d], last = slice.box.extent[d];
      for (size_t other = 0; other < tensor.shape.size(); ++other) {
        along = along && (other == d || slice.box.extent[other] == tensor.shape[other]);
      }
    }
    for (const Slice& slice : tensor.slices) {
      equal = equal && (slice.box.extent[d] == full || slice.box.offset[d] == last_at) && full > 0 &&
              slice.box.offset[d] % full == 0;
    }
    if (along && equal && last < full) return str(last, " of ", full, d == 0 ? " rows" : str(" along dimension ", d));
  }
  return "";
}

int run_inspect(const Arguments& arguments) {
  CommandLine line(
      "inspect",
      "What a checkpoint or model holds: a partial or full checkpoint, a Hugging Face folder, a .pt or .bin file, a\n"
      "safetensors file, a folder of torch.distributed.checkpoint. Recognised by content; nothing in it is executed.");
  std::string path;
  Options options;
  int64_t depth = 1;
  auto& app = line.app();
  app.add_option("PATH", path, "A file or folder")->required();
  app.add_option("--filter", options.filter, "Only tensors whose name contains this");
  app.add_flag("--summary", options.summary, "No list of tensors");
  app.add_flag("--slices", options.slices, "Also every slice: its box, file, place and strides");
  app.add_option("--depth", depth, "Parts of a name that make a prefix in the sums")->capture_default_str();
  app.add_option("--html", options.html, "Write it as a page that needs no other file: ranks, layers, sizes, tensors");
  if (!line.parse(arguments)) return 0;
  if (depth < 1) fail(ErrorKind::kInvalidArgument, "inspect: --depth is ", depth, ", it can be 1 or more");
  options.depth = static_cast<size_t>(depth);
  Storage& storage = local_storage();
  path = existing_path(storage, path);

  Source source = open_source(storage, path);
  if (!options.filter.empty()) {
    auto& tensors = source.index.tensors;
    // References in the values count in the whole list.
    source.index.values = readable(source.index.values, source.index, SIZE_MAX);
    std::erase_if(tensors,
                  [&](const TensorEntry& tensor) { return tensor.name.find(options.filter) == std::string::npos; });
    source.index.reindex();
  }
  if (!options.html.empty()) write_html(storage, options.html, path, source, options.depth);
  if (line.output().json) {
    print_json(path, source, options, line.output());
  } else if (!options.html.empty()) {
    std::cout << printable(options.html) << ": written\n";
  } else {
    print_human(path, source, options);
  }
  return 0;
}

}  // namespace shardsmith::cli
