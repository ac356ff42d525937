// `.metadata` for torch's own reader: the objects that it would have pickled, in protocol 2, which every version reads.
#include <set>

#include "base/error.h"
#include "format/dcp_metadata.h"
#include "format/pickle_emit.h"

namespace shardsmith {
namespace {

constexpr const char* kMetadata = "torch.distributed.checkpoint.metadata";

// An object is its class, no arguments, and a dict of its attributes:  GLOBAL ) NEWOBJ } ( name value ... u BUILD
class MetadataWriter : private PickleEmitter {
 public:
  MetadataWriter() : PickleEmitter(".metadata") {}

  std::string run(const std::vector<DcpEntry>& entries) {
    out_ = "\x80\x02";
    begin(kMetadata, "Metadata");
    put_text("state_dict_metadata");
    dict([&] {
      for (const DcpEntry& entry : entries) {
        put_text(entry.key);
        describe(entry);
      }
    });
    put_text("planner_data");
    dict([&] {
      for (const DcpEntry& entry : entries) {
        put_text(entry.key);
        put_path(entry.path);
      }
    });
    put_text("storage_data");
    dict([&] {
      for (const DcpEntry& entry : entries) put_items(entry);
    });
    put_text("storage_meta");
    out_ += 'N';
    put_text("version");
    put_text("1.0.0");
    end();
    out_ += '.';
    return std::move(out_);
  }

 private:
  void begin(const char* module, const char* name) {
    put_global(module, name);
    out_ += ")\x81}(";
  }
  void end() { out_ += "ub"; }

  template <typename Fill>
  void dict(const Fill& fill) {
    out_ += "}(";
    fill();
    out_ += 'u';
  }

  void put_size(const Shape& shape) {
    put_global("torch", "Size");
    put_integers(shape);
    out_ += "\x85R";
  }

  void put_path(const List& path) {
    out_ += '(';
    for (const Value& element : path) {
      if (const std::string* name = element.get_if<std::string>())
        put_text(*name);
      else
        put_integer(*element.get_if<int64_t>());
    }
    out_ += 't';
  }

  void describe(const DcpEntry& entry) {
    if (!entry.is_tensor) {
      put_global(kMetadata, "BytesStorageMetadata");
      out_ += ")\x81";
      return;
    }
    begin(kMetadata, "TensorStorageMetadata");
    put_text("properties");
    put_properties(entry);
    put_text("size");
    put_size(entry.shape);
    put_text("chunks");
    out_ += "](";
    for (const DcpChunk& chunk : entry.chunks) {
      begin(kMetadata, "ChunkStorageMetadata");
      put_text("offsets");
      put_size(chunk.box.offset);
      put_text("sizes");
      put_size(chunk.box.extent);
      end();
    }
    out_ += 'e';
    end();
  }

  // Its state is a tuple: dtype, layout, requires_grad, memory format (an enumeration, by its value), pin_memory.
  void put_properties(const DcpEntry& entry) {
    put_global(kMetadata, "TensorProperties");
    out_ += ")\x81(";
    put_global("torch", to_string(entry.dtype));
    put_global("torch.serialization", "_get_layout");
    put_text("torch.strided");
    out_ += "\x85R";
    out_ += entry.requires_grad ? '\x88' : '\x89';
    put_global(kMetadata, "_MEM_FORMAT_ENCODING");
    put_integer(0);
    out_ += "\x85R";
    out_ += "\x89tb";
  }

  void put_items(const DcpEntry& entry) {
    if (!entry.is_tensor) return put_item(entry.key, nullptr, 0, entry.item);
    std::set<Shape> places;  // chunks without elements may share one
    for (size_t i = 0; i < entry.chunks.size(); ++i) {
      const DcpChunk& chunk = entry.chunks[i];
      if (!chunk.item.file.empty() && places.insert(chunk.box.offset).second)
        put_item(entry.key, &chunk.box.offset, static_cast<int64_t>(i), chunk.item);
    }
  }

  // `number` is a hint where to look for the chunk.
  void put_item(const std::string& key, const Shape* offset, int64_t number, const DcpItem& item) {
    begin(kMetadata, "MetadataIndex");
    put_text("fqn");
    put_text(key);
    put_text("index");
    if (offset) {
      put_integer(number);
      put_text("offset");
      put_size(*offset);
    } else {
      out_ += 'N';
    }
    end();
    begin("torch.distributed.checkpoint.filesystem", "_StorageInfo");
    put_text("relative_path");
    put_text(item.file);
    put_text("offset");
    put_integer(static_cast<int64_t>(item.offset));
    put_text("length");
    put_integer(static_cast<int64_t>(item.length));
    end();
  }
};

}  // namespace

std::string make_dcp_metadata(const std::vector<DcpEntry>& entries) { return MetadataWriter().run(entries); }

}  // namespace shardsmith
