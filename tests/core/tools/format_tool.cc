// A door for tests/python/test_formats.py into the formats:
//
//   format_tool read PATH                 what is there, as JSON: format, values, tensors (name, dtype, shape, CRC-32
//                                         of the packed little-endian bytes, alias_of)
//   format_tool dump PATH DIR             the same, and each tensor's bytes into DIR/{number}
//   format_tool copy PATH OUT [--plain]   reads a .pt and writes it again with our writer
//   format_tool dcp PATH OUT              any source into a distributed checkpoint; OUT is made
//   format_tool safetensors PATH OUT      any source into safetensors, with its metadata
//   format_tool detect PATH               the format's word
//   format_tool names PATH                what a bare pickle names, as JSON
//   format_tool record PATH               the extra record: digest, extra value
// Errors: one line on stderr, "kind: text", and the exit code of the kind.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <numeric>

#include "base/checksum.h"
#include "base/error.h"
#include "format/bare_pickle.h"
#include "format/dcp.h"
#include "format/detect.h"
#include "format/hf.h"
#include "format/pt.h"
#include "format/safetensors.h"
#include "layout/plan.h"
#include "storage/transfer.h"

using namespace shardsmith;

namespace {

Index open(const std::string& path) {
  Storage& storage = local_storage();
  const std::string format = detect_format(storage, path);
  if (format == "safetensors")
    return storage.stat(path).is_directory ? read_safetensors_folder(storage, path) : read_safetensors(storage, path);
  if (format == "dcp") return read_dcp(storage, path);
  if (format == "hf") return read_hf(storage, path);
  return read_pt(storage, path);
}

struct Loaded {
  Index index;
  std::vector<std::vector<std::byte>> bytes;  // packed, of each tensor
};

Loaded load(const std::string& path) {
  Loaded loaded;
  loaded.index = open(path);
  validate(loaded.index, false);
  Target target;
  std::vector<Destination> destinations;
  for (const TensorEntry& tensor : loaded.index.tensors) {
    // In a partial file a tensor has the box that the file holds.
    const TensorEntry* held = tensor.alias_of.empty() ? &tensor : loaded.index.find(tensor.alias_of);
    const bool part = held->slices.size() == 1;  // of a checkpoint's file
    const Box box = part ? held->slices[0].box : whole(tensor.shape);
    loaded.bytes.emplace_back(static_cast<size_t>(volume(box.extent) * size_of(tensor.dtype)));
    target.wants.push_back({tensor.name, tensor.dtype, tensor.shape, box,
                            static_cast<uint32_t>(loaded.bytes.size() - 1), 0, contiguous_strides(box.extent)});
  }
  for (auto& bytes : loaded.bytes) destinations.push_back({bytes});
  const Plan plan = make_plan(loaded.index, target);
  require_complete(plan, path);
  execute(plan, loaded.index, destinations, local_storage());
  return loaded;
}

Value describe(const Loaded& loaded) {
  Value out;
  out.set("format", Value(loaded.index.format));
  out.set("values", loaded.index.values);
  List tensors;
  for (size_t i = 0; i < loaded.index.tensors.size(); ++i) {
    const TensorEntry& tensor = loaded.index.tensors[i];
    List shape;
    for (int64_t n : tensor.shape) shape.emplace_back(n);
    Value entry;
    entry.set("name", Value(tensor.name));
    entry.set("dtype", Value(std::string(to_string(tensor.dtype))));
    entry.set("shape", Value(std::move(shape)));
    entry.set("alias_of", Value(tensor.alias_of));
    entry.set("crc", Value(static_cast<int64_t>(crc32(loaded.bytes[i]))));
    tensors.push_back(std::move(entry));
  }
  out.set("tensors", Value(std::move(tensors)));
  return out;
}

// `loaded` must outlive it.
PtContent content_of(const Loaded& loaded) {
  PtContent content;
  content.value = loaded.index.values;
  if (loaded.index.format == "safetensors" || loaded.index.format == "hf") {  // values are texts beside the tensors
    content.value = Value(Dict{});
    for (size_t i = 0; i < loaded.index.tensors.size(); ++i)
      content.value.set(loaded.index.tensors[i].name, Value(TensorRef{i}));
  }
  std::map<std::string, size_t> storage_of;
  for (size_t i = 0; i < loaded.index.tensors.size(); ++i) {
    const TensorEntry& entry = loaded.index.tensors[i];
    PtTensor tensor;
    tensor.dtype = entry.dtype;
    tensor.size = entry.shape;
    tensor.strides = contiguous_strides(entry.shape);
    if (entry.alias_of.empty()) {
      tensor.name = entry.name;
      tensor.global = entry.shape;
      tensor.box = whole(entry.shape);
      storage_of[entry.name] = content.storages.size();
      content.storages.push_back({loaded.bytes[i].size(), loaded.bytes[i].data(), {}});
    }
    tensor.storage = storage_of.at(entry.alias_of.empty() ? entry.name : entry.alias_of);
    content.tensors.push_back(std::move(tensor));
  }
  return content;
}

void copy(const std::string& path, const std::string& to, bool plain) {
  const Loaded loaded = load(path);
  PtContent content = content_of(loaded);
  content.with_slices = !plain;
  content.extra.set("made_by", Value("format_tool"));
  const Written written = write_pt(local_storage(), to, content);
  std::cout << written.size << " " << written.digest << "\n";
}

void to_dcp(const std::string& path, const std::string& to) {
  const Loaded loaded = load(path);
  local_storage().make_directory(to);
  write_dcp(local_storage(), to, content_of(loaded));
}

void to_safetensors(const std::string& path, const std::string& to) {
  const Loaded loaded = load(path);
  std::vector<SafetensorsTensor> tensors;
  for (size_t i = 0; i < loaded.index.tensors.size(); ++i) {
    const TensorEntry& entry = loaded.index.tensors[i];
    tensors.push_back({entry.name, entry.dtype, entry.shape, {loaded.bytes[i].size(), loaded.bytes[i].data(), {}}});
  }
  std::vector<std::pair<std::string, std::string>> metadata;
  if (loaded.index.format == "safetensors")
    for (const auto& [key, text] : loaded.index.values.get_if<Dict>()->items)
      metadata.emplace_back(*key.get_if<std::string>(), *text.get_if<std::string>());
  write_safetensors(local_storage(), to, std::move(tensors), metadata);
}

int run(const std::vector<std::string>& args) {
  if (args.size() == 2 && args[0] == "read") {
    std::cout << to_json(describe(load(args[1]))) << "\n";
  } else if (args.size() == 3 && args[0] == "dump") {
    const Loaded loaded = load(args[1]);
    std::filesystem::create_directories(args[2]);
    for (size_t i = 0; i < loaded.bytes.size(); ++i)
      std::ofstream(args[2] + "/" + std::to_string(i), std::ios::binary)
          .write(reinterpret_cast<const char*>(loaded.bytes[i].data()),
                 static_cast<std::streamsize>(loaded.bytes[i].size()));
    std::cout << to_json(describe(loaded)) << "\n";
  } else if (args.size() >= 3 && args[0] == "copy") {
    copy(args[1], args[2], args.size() > 3 && args[3] == "--plain");
  } else if (args.size() == 3 && args[0] == "dcp") {
    to_dcp(args[1], args[2]);
  } else if (args.size() == 2 && args[0] == "detect") {
    std::cout << detect_format(local_storage(), args[1]) << "\n";
  } else if (args.size() == 2 && args[0] == "names") {
    std::cout << to_json(read_bare_pickle_names(local_storage(), args[1])) << "\n";
  } else if (args.size() == 3 && args[0] == "safetensors") {
    to_safetensors(args[1], args[2]);
  } else if (args.size() == 2 && args[0] == "record") {
    const PtRecord record = read_pt_record(local_storage(), args[1]);
    std::cout << record.digest << " " << to_json(record.extra) << "\n";
  } else {
    fail(ErrorKind::kInvalidArgument,
         "usage: format_tool read|dump|copy|dcp|safetensors|record|detect|names PATH [OUT]");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run({argv + 1, argv + argc});
  } catch (const Error& e) {
    std::cerr << to_string(e.kind()) << ": " << e.what() << "\n";
    return exit_code(e.kind());
  }
}
