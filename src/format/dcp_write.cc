#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <unordered_set>

#include "base/error.h"
#include "format/dcp.h"
#include "format/dcp_metadata.h"
#include "format/packed.h"
#include "format/pickle.h"
#include "format/pt_write.h"

namespace shardsmith {
namespace {

constexpr size_t kMaxDepth = 100;
constexpr uint64_t kPage = 4096, kSmall = 64;
constexpr const char* kDataFile = "__0_0.distcp";

// As torch's flatten_state_dict: dicts are taken apart, lists where a tensor or a dict is in them, at any depth; all
// else stays whole. A dict without items vanishes, as it does there.
class Flattener {
 public:
  struct Leaf {
    List path;
    std::string key;
    const Value* value;
  };

  explicit Flattener(const std::string& folder) : folder_(folder) {}

  std::vector<Leaf> run(const Value& root) {
    if (!root.get_if<Dict>())
      fail(ErrorKind::kInvalidArgument, folder_, ": a distributed checkpoint holds a dict, not a single value or list");
    walk(root, {});
    return std::move(leaves_);
  }

 private:
  void walk(const Value& value, List path) {
    if (path.size() > kMaxDepth)
      fail(ErrorKind::kInvalidArgument, folder_, ": values nested deeper than ", kMaxDepth, " levels");
    if (const Dict* dict = value.get_if<Dict>()) {
      for (const auto& [key, item] : dict->items) {
        List longer = path;
        longer.push_back(Value(key_text(key)));
        walk(item, std::move(longer));
      }
    } else if (const List* list = value.get_if<List>(); list && !is_leaf(value, 0)) {
      for (size_t i = 0; i < list->size(); ++i) {
        List longer = path;
        longer.push_back(Value(static_cast<int64_t>(i)));
        walk((*list)[i], std::move(longer));
      }
    } else {
      add(value, std::move(path));
    }
  }

  bool is_leaf(const Value& value, size_t depth) const {
    if (value.get_if<Dict>()) return false;
    const List* list = value.get_if<List>();
    if (!list || depth > kMaxDepth) return true;
    for (const Value& item : *list) {
      if (item.get_if<TensorRef>() || (is_special(item))) return false;
      if ((item.get_if<Dict>() || item.get_if<List>()) && !is_leaf(item, depth + 1)) return false;
    }
    return true;
  }
  static bool is_special(const Value& item) {
    const Opaque* object = item.get_if<Opaque>();
    return object && is_special_tensor(object->class_name);
  }

  // str(key)
  std::string key_text(const Value& key) const {
    if (const std::string* text = key.get_if<std::string>()) return *text;
    if (const int64_t* number = key.get_if<int64_t>()) return std::to_string(*number);
    if (const bool* flag = key.get_if<bool>()) return *flag ? "True" : "False";
    if (key.is_none()) return "None";
    fail(ErrorKind::kUnsupported, folder_, ": the key ", to_json(key),
         " of a dict can't be told in DCP, whose keys are texts");
  }

  void add(const Value& value, List path) {
    std::string key;
    for (const Value& element : path) {
      if (!key.empty() || &element != &path.front()) key += '.';
      const std::string* text = element.get_if<std::string>();
      key += text ? *text : std::to_string(*element.get_if<int64_t>());
    }
    if (!keys_.insert(key).second)
      fail(ErrorKind::kUnsupported, folder_, ": two values have the flat key '", key,
           "', as DCP joins nested keys with '.'; rename one");
    leaves_.push_back({std::move(path), std::move(key), &value});
  }

  const std::string& folder_;
  std::unordered_set<std::string> keys_;
  std::vector<Leaf> leaves_;
};

// One archive of the data file. It stays where it is, as its records point into it.
struct Item {
  std::string pickle;
  std::unique_ptr<TorchZip> zip;
  uint64_t offset = 0, length = 0;
};

class Writer {
 public:
  Writer(Storage& storage, const std::string& folder, const PtContent& content)
      : storage_(storage), folder_(folder), content_(content), sources_(content) {}

  void run() {
    check_folder();
    for (size_t i = 0; i < content_.tensors.size(); ++i) check_tensor(i);
    const auto leaves = Flattener(folder_).run(content_.value);
    std::vector<size_t> item_of(leaves.size());
    // As torch does it: tensors after all else.
    for (const bool tensors : {false, true})
      for (size_t i = 0; i < leaves.size(); ++i) {
        const TensorRef* tensor = leaves[i].value->get_if<TensorRef>();
        if ((tensor != nullptr) != tensors) continue;
        item_of[i] = tensor ? tensor_item(tensor->index) : other_item(*leaves[i].value);
      }
    write_data();
    std::vector<DcpEntry> entries;
    for (size_t i = 0; i < leaves.size(); ++i) entries.push_back(entry(leaves[i], items_[item_of[i]]));
    write_text_atomic(storage_, join(folder_, ".metadata"), make_dcp_metadata(entries));
  }

 private:
  using View = std::tuple<size_t, int64_t, Shape, Strides, Dtype>;

  void check_folder() {
    const Stat stat = storage_.stat(folder_);
    if (!stat.exists || !stat.is_directory) fail(ErrorKind::kInvalidArgument, folder_, ": not a folder");
    const auto names = storage_.list(folder_);
    if (!names.empty())
      fail(ErrorKind::kInvalidArgument, folder_, ": not empty: '", names[0], "' is there; write into a new folder");
  }

  void check_tensor(size_t number) {
    check_pt_tensor(content_, number, folder_);
    const PtTensor& tensor = content_.tensors[number];
    if (!tensor.name.empty() && (tensor.global != tensor.size || tensor.box != whole(tensor.size)))
      fail(ErrorKind::kInvalidArgument, folder_, ": tensor '", tensor.name, "' is a part, ", to_string(tensor.box),
           " of ", to_string(tensor.global), "; only whole tensors are written here");
  }

  const PtTensor& tensor(size_t number) const {
    if (number >= content_.tensors.size())
      fail(ErrorKind::kInvalidArgument, folder_, ": a value refers to tensor ", number, " of ",
           content_.tensors.size());
    return content_.tensors[number];
  }
  static View view(const PtTensor& t) { return {t.storage, t.offset, t.size, t.strides, t.dtype}; }

  // Tensors that are the same view of one storage are one item.
  size_t tensor_item(size_t number) {
    const PtTensor& t = tensor(number);
    const auto [known, is_new] = views_.emplace(view(t), items_.size());
    if (!is_new) return known->second;
    add_item(Value(TensorRef{0}), {number}, false);
    return known->second;
  }

  size_t other_item(const Value& value) {
    Value copy = value;
    std::vector<size_t> numbers;
    renumber(copy, numbers);
    if (numbers.empty()) {
      add_item(copy, numbers, true);
      return items_.size() - 1;
    }
    // A sparse or quantised tensor under two names is one item, as a plain one is.
    std::vector<View> views;
    for (size_t number : numbers) views.push_back(view(tensor(number)));
    auto& twins = others_[views];
    for (const auto& [value_there, item] : twins)
      if (value_there == copy) return item;
    add_item(copy, numbers, true);
    twins.emplace_back(std::move(copy), items_.size() - 1);
    return items_.size() - 1;
  }

  void renumber(Value& value, std::vector<size_t>& numbers) {
    std::map<size_t, size_t> local;
    for_each_tensor(value, [&](TensorRef& reference) {
      tensor(reference.index);
      const auto [known, is_new] = local.emplace(reference.index, numbers.size());
      if (is_new) numbers.push_back(reference.index);
      reference.index = known->second;
    });
  }

  // An archive of `value`, whose TensorRefs count in `numbers`. Each tensor gets a packed storage of its own.
  void add_item(const Value& value, const std::vector<size_t>& numbers, bool keep_grad) {
    std::vector<PickledTensor> tensors;
    std::vector<PickledStorage> storages;
    std::vector<ByteSource> sources;
    std::map<View, size_t> places;
    for (size_t number : numbers) {
      const PtTensor& t = tensor(number);
      const auto [place, is_new] = places.emplace(view(t), storages.size());
      if (is_new) {
        sources.push_back(sources_.of(number, folder_));
        storages.push_back({std::to_string(storages.size()), sources.back().size});
      }
      tensors.push_back({place->second, t.dtype, 0, t.size, contiguous_strides(t.size), keep_grad && t.requires_grad});
    }
    Item item;
    item.pickle = write_pickle(value, tensors, storages, folder_);
    items_.push_back(std::move(item));
    Item& kept = items_.back();
    kept.zip = std::make_unique<TorchZip>(kept.pickle);
    for (const ByteSource& source : sources) kept.zip->add_storage(source);
    kept.zip->add_version();
    kept.length = kept.zip->size();
    const uint64_t alignment = kept.length >= (64 << 10) ? kPage : kSmall;
    kept.offset = (end_ + alignment - 1) / alignment * alignment;
    end_ = kept.offset + kept.length;
  }

  void write_data() {
    const auto file = storage_.create(join(folder_, kDataFile), Access::kDirect, end_);
    StreamWriter out(*file, end_);
    for (const Item& item : items_) {
      out.append(std::string(static_cast<size_t>(item.offset - out.position()), '\0'));
      item.zip->write(out);
    }
    out.finish();
    file->sync();
    file->close();
  }

  DcpEntry entry(const Flattener::Leaf& leaf, const Item& item) const {
    DcpEntry entry;
    entry.key = leaf.key;
    entry.path = leaf.path;
    const DcpItem place{kDataFile, item.offset, item.length};
    const TensorRef* reference = leaf.value->get_if<TensorRef>();
    if (!reference) {
      entry.item = place;
      return entry;
    }
    const PtTensor& t = tensor(reference->index);
    entry.is_tensor = true;
    entry.dtype = t.dtype;
    entry.shape = t.size;
    entry.requires_grad = t.requires_grad;
    entry.chunks.push_back({whole(t.size), place});
    return entry;
  }

  Storage& storage_;
  const std::string& folder_;
  const PtContent& content_;
  PackedSources sources_;
  std::deque<Item> items_;
  std::map<View, size_t> views_;                                               // items that are one tensor
  std::map<std::vector<View>, std::vector<std::pair<Value, size_t>>> others_;  // other items with tensors in them
  uint64_t end_ = 0;
};

}  // namespace

void write_dcp(Storage& storage, const std::string& folder, const PtContent& content) {
  Writer(storage, folder, content).run();
}

}  // namespace shardsmith
