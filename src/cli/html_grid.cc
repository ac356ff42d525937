#include "cli/html_grid.h"

#include <algorithm>
#include <optional>
#include <set>

#include "base/error.h"
#include "cli/describe.h"
#include "layout/mesh.h"

namespace shardsmith::cli {
namespace {

constexpr size_t kMostColumns = 256;  // layers; more can't be looked at
constexpr size_t kMostRows = 1024;

// The first part of a name that is a number: "transformer.seq_layers.3.output.up.weight" -> 3.
std::optional<int64_t> layer_of(const std::string& name) {
  for (size_t at = 0; at < name.size();) {
    const size_t end = std::min(name.find_first_of("./", at), name.size());
    std::string part = name.substr(at, end - at);
    if (part.starts_with('#')) part.erase(0, 1);
    if (!part.empty() && part.size() <= 6 && part.find_first_not_of("0123456789") == std::string::npos) {
      return std::stoll(part);
    }
    at = end + 1;
  }
  return std::nullopt;
}

bool holds(const std::string& name, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(),
                     [&](const char* word) { return name.find(word) != std::string::npos; });
}

enum Place : int64_t { kEmbedding = -1, kHead = INT64_MAX - 1, kOther = INT64_MAX };

int64_t place_of(const std::string& name) {
  if (const auto layer = layer_of(name)) return *layer;
  if (holds(name, {"embed", "wte", "wpe"})) return kEmbedding;
  if (holds(name, {"norm", "ln_f", "head"})) return kHead;
  return kOther;
}

std::string column_name(int64_t place) {
  if (place == kEmbedding) return "embedding";
  if (place == kHead) return "norm, head";
  return place == kOther ? "other" : std::to_string(place);
}

// "model_1_0.pt" and "optimizer_1_0.pt" are of stage 1, slice 0; so is "optimizer_1_0_2.pt", a replica's shard.
std::optional<std::pair<int, int>> stage_and_slice(const std::string& file) {
  for (const std::string_view kind : {"model_", "optimizer_"}) {
    if (!file.starts_with(kind)) continue;
    const char* numbers = file.c_str() + kind.size();
    int pp = 0, tp = 0, rdp = 0, used = 0;
    if (std::sscanf(numbers, "%6d_%6d.pt%n", &pp, &tp, &used) == 2 && used > 0) return std::pair(pp, tp);
    if (std::sscanf(numbers, "%6d_%6d_%6d.pt%n", &pp, &tp, &rdp, &used) == 3 && used > 0) return std::pair(pp, tp);
  }
  return std::nullopt;
}

// The row of each file; npos for those that hold no part of the model.
std::vector<size_t> rows_of_files(const Source& source, Grid& grid) {
  std::vector<size_t> rows(source.index.files.size(), std::string::npos);
  const Manifest* manifest = source.format == "partial" && source.manifest ? &*source.manifest : nullptr;
  const bool meshed =
      manifest && manifest->pp >= 1 && manifest->tp >= 1 && manifest->partition.stages() == manifest->pp;
  std::map<std::pair<int, int>, size_t> known;
  for (size_t i = 0; i < rows.size(); ++i) {
    const std::string name = base_name(source.index.files[i].path);
    const auto at = meshed ? stage_and_slice(name) : std::nullopt;
    if (meshed && (!at || at->first >= manifest->pp || at->second >= manifest->tp || at->first < 0 || at->second < 0)) {
      continue;
    }
    if (!meshed && grid.rows.size() == kMostRows) break;
    if (!meshed) {
      rows[i] = grid.rows.size();
      grid.rows.push_back(name);
      grid.row_titles.push_back(source.index.files[i].path);
      continue;
    }
    const auto [row, is_new] = known.emplace(*at, grid.rows.size());
    rows[i] = row->second;
    if (!is_new) continue;
    const Mesh mesh(manifest->world_size, manifest->pp, manifest->tp, manifest->placement);
    const std::string ranks = stage_ranks(mesh, at->first, 8)[static_cast<size_t>(at->second)];
    grid.rows.push_back(str("rank ", ranks));
    grid.row_titles.push_back(str("stage ", at->first,
                                  manifest->tp > 1 ? str(", tensor-parallel slice ", at->second) : "", ": ",
                                  stage_words(manifest->partition, at->first)));
  }
  return rows;
}

}  // namespace

Grid make_grid(const Source& source) {
  Grid grid;
  const std::vector<size_t> rows = rows_of_files(source, grid);
  std::set<int64_t> places;
  for (const auto& tensor : source.index.tensors) places.insert(place_of(tensor.name));
  while (places.size() > kMostColumns) {  // the last layers go to "other"
    places.insert(kOther);
    auto last = std::prev(places.end());
    while (*last >= kHead) --last;
    places.erase(last);
  }
  std::map<int64_t, size_t> columns;
  for (const int64_t place : places) {
    columns[place] = grid.columns.size();
    grid.columns.push_back(column_name(place));
    grid.column_titles.push_back(place >= 0 && place < kHead ? "layer " + grid.columns.back() : grid.columns.back());
  }
  grid.cells.resize(grid.rows.size());
  for (const auto& tensor : source.index.tensors) {
    const auto found = columns.find(place_of(tensor.name));
    const size_t column = found == columns.end() ? columns.at(kOther) : found->second;
    for (const auto& slice : tensor.slices) {
      const size_t row = rows[slice.file];
      if (row == std::string::npos) continue;
      GridCell& cell = grid.cells[row][column];
      cell.bytes += static_cast<uint64_t>(volume(slice.box.extent)) * static_cast<uint64_t>(size_of(tensor.dtype));
      if (cell.tensors.empty() || cell.tensors.back() != &tensor) cell.tensors.push_back(&tensor);
      grid.largest = std::max(grid.largest, cell.bytes);
    }
  }
  return grid;
}

}  // namespace shardsmith::cli
