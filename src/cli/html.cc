#include "cli/html.h"

#include <algorithm>
#include <cstdio>

#include "base/error.h"
#include "base/utf8.h"
#include "cli/describe.h"
#include "cli/html_grid.h"
#include "cli/inspect.h"
#include "cli/output.h"
#include "cli/values.h"

namespace shardsmith::cli {
namespace {

constexpr size_t kMostTensors = 20000;  // a browser has to hold the table
constexpr size_t kMostSlices = 16;      // in one line of it
constexpr size_t kMostInTitle = 12;
constexpr std::string_view kBeginning = "<!doctype html>\n<!-- shardsmith inspect -->\n";

constexpr const char* kStyle = R"(
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --soft: #667; --line: #d8dbe0; --fill: 34 102 187; }
@media (prefers-color-scheme: dark) {
  :root { --back: #15181c; --text: #e4e6ea; --soft: #99a; --line: #343a42; --fill: 96 165 250; }
}
body { background: var(--back); color: var(--text); font: 14px/1.5 system-ui, sans-serif; margin: 2rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1.05rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .5rem; border: 1px solid var(--line); text-align: left; white-space: nowrap; }
th { font-weight: 600; } td.n { text-align: right; } td.none { color: var(--soft); }
.grid td { text-align: right; min-width: 3.2rem; }
.soft { color: var(--soft); } .tag { border: 1px solid var(--line); border-radius: .6rem; padding: 0 .4rem; font-size: .85em; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .6rem; }
)";

std::string cell_title(const Grid& grid, size_t row, size_t column, const GridCell& cell) {
  std::string text =
      str(grid.rows[row], " (", grid.row_titles[row], "), ", grid.column_titles[column], ": ", cell.tensors.size(),
          cell.tensors.size() == 1 ? " tensor, " : " tensors, ", human_bytes(cell.bytes));
  for (size_t i = 0; i < cell.tensors.size() && i < kMostInTitle; ++i) {
    text += str("\n", cell.tensors[i]->name, " ", to_string(cell.tensors[i]->shape));
  }
  if (cell.tensors.size() > kMostInTitle) text += str("\nand ", cell.tensors.size() - kMostInTitle, " more");
  return text;
}

std::string grid_html(const Source& source) {
  const Grid grid = make_grid(source);
  if (grid.rows.empty() || grid.columns.empty()) return "";
  std::string html = source.format == "partial" ? "<h2>Ranks and layers</h2>\n" : "<h2>Files and layers</h2>\n";
  html += "<div class=\"scroll\"><table class=\"grid\">\n<tr><th></th>";
  for (const auto& column : grid.columns) html += str("<th>", html_text(column), "</th>");
  html += "</tr>\n";
  for (size_t row = 0; row < grid.rows.size(); ++row) {
    html += str("<tr><th title=\"", html_text(grid.row_titles[row]), "\">", html_text(grid.rows[row]), "</th>");
    for (size_t column = 0; column < grid.columns.size(); ++column) {
      const auto found = grid.cells[row].find(column);
      if (found == grid.cells[row].end()) {
        html += "<td class=\"none\">&middot;</td>";
        continue;
      }
      char shade[32];
      const double share =
          static_cast<double>(found->second.bytes) / static_cast<double>(std::max<uint64_t>(grid.largest, 1));
      std::snprintf(shade, sizeof shade, "%.2f", 0.08 + 0.47 * share);
      html += str("<td style=\"background: rgb(var(--fill) / ", shade, ")\" title=\"",
                  html_text(cell_title(grid, row, column, found->second)), "\">", human_bytes(found->second.bytes),
                  "</td>");
    }
    html += "</tr>\n";
  }
  return html + "</table></div>\n";
}

std::string totals_html(const char* title, const Totals& totals) {
  std::string html =
      str("<h2>", title, "</h2>\n<table>\n<tr><th></th><th>tensors</th><th>elements</th><th>bytes</th></tr>\n");
  for (const auto& [key, total] : totals) {
    html +=
        str("<tr><td>", html_text(key), "</td><td class=\"n\">", total.tensors, "</td><td class=\"n\">", total.elements,
            "</td><td class=\"n\" title=\"", total.bytes, "\">", human_bytes(total.bytes), "</td></tr>\n");
  }
  return html + "</table>\n";
}

std::string slices_text(const Index& index, const TensorEntry& tensor) {
  std::string text;
  for (size_t i = 0; i < tensor.slices.size(); ++i) {
    const Slice& slice = tensor.slices[i];
    if (i == kMostSlices) return text + str("\nand ", tensor.slices.size() - i, " more");
    text += str(i ? "\n" : "", base_name(index.files[slice.file].path), "@", slice.offset, " ", to_string(slice.box));
  }
  return text;
}

std::string tensors_html(const Index& index) {
  std::string html =
      "<h2>Tensors</h2>\n<div class=\"scroll\"><table>\n"
      "<tr><th>name</th><th>type</th><th>shape</th><th>bytes</th><th>slices</th><th></th></tr>\n";
  for (size_t i = 0; i < index.tensors.size() && i < kMostTensors; ++i) {
    const TensorEntry& tensor = index.tensors[i];
    std::string notes;
    if (!tensor.alias_of.empty()) notes += str("<span class=\"tag\">tied</span> = ", html_text(tensor.alias_of));
    if (const std::string padding = padding_of(tensor); !padding.empty()) {
      notes += str("<span class=\"tag\" title=\"the last slice holds ", padding, "\">padded</span>");
    }
    html +=
        str("<tr><td>", html_text(tensor.name), "</td><td>", to_string(tensor.dtype), "</td><td>",
            to_string(tensor.shape), "</td><td class=\"n\">",
            tensor.alias_of.empty() ? human_bytes(bytes_of(tensor)) : std::string(), "</td><td class=\"n\" title=\"",
            html_text(slices_text(index, tensor)), "\">", tensor.slices.size(), "</td><td>", notes, "</td></tr>\n");
  }
  html += "</table></div>\n";
  if (index.tensors.size() > kMostTensors) {
    html += str("<p class=\"soft\">and ", index.tensors.size() - kMostTensors, " more</p>\n");
  }
  return html;
}

}  // namespace

std::string html_text(std::string_view text) {
  std::string html;
  for (size_t at = 0; at < text.size();) {
    const size_t length = utf8_length(text, at);
    const char c = text[at];
    if (length == 0) {
      html += "\xEF\xBF\xBD";
    } else if (c == '&') {
      html += "&amp;";
    } else if (c == '<') {
      html += "&lt;";
    } else if (c == '>') {
      html += "&gt;";
    } else if (c == '"') {
      html += "&quot;";
    } else if (c == '\'') {
      html += "&#39;";
    } else if (c == '\n') {
      html += "&#10;";
    } else if (length == 1 && (static_cast<unsigned char>(c) < 0x20 || c == 0x7F)) {
      html += printable(text.substr(at, 1));
    } else {
      html += text.substr(at, length);
    }
    at += std::max<size_t>(length, 1);
  }
  return html;
}

std::string html_page(const std::string& path, const Source& source, size_t depth) {
  const Index& index = source.index;
  const Sums sums = sum(index, depth);
  uint64_t bytes = 0;
  for (const auto& file : index.files) bytes += file.size;
  const std::string title = html_text(printable(path));
  std::string html =
      str(kBeginning, "<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n",
          "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>", title,
          "</title>\n<style>", kStyle, "</style>\n</head>\n<body>\n<h1>", title, "</h1>\n<p>", source.format, ", ",
          index.tensors.size(), " tensors, ", human_count(sums.all.elements), " elements, ", human_bytes(bytes), " in ",
          index.files.size(), index.files.size() == 1 ? " file" : " files");
  if (source.manifest) {
    html += str("<br>step ", source.manifest->step, ", saved ", human_time(source.manifest->time), " by ",
                html_text(layout_words(*source.manifest)));
  }
  html += "</p>\n" + grid_html(source) + totals_html("By element type", sums.by_dtype) +
          totals_html("By prefix", sums.by_prefix) + tensors_html(index);
  const Value values = without_tensors(index.values);
  if (!is_empty(values)) {
    html += str("<h2>Values</h2>\n<pre>", html_text(to_json(readable(values, index, 8), 2)), "</pre>\n");
  }
  return html + "</body>\n</html>\n";
}

void write_html(Storage& storage, const std::string& file, const std::string& path, const Source& source,
                size_t depth) {
  const Stat stat = storage.stat(file);
  if (stat.exists) {
    bool ours = false;
    if (!stat.is_directory && !stat.is_link && stat.size >= kBeginning.size()) {
      std::string head(kBeginning.size(), '\0');
      storage.open_read(file)->read(0, std::as_writable_bytes(std::span(head)));
      ours = head == kBeginning;
    }
    if (!ours) fail(ErrorKind::kInvalidArgument, file, ": is there, and no page of ours; choose another name");
  }
  write_text_atomic(storage, file, html_page(path, source, depth));
}

}  // namespace shardsmith::cli
