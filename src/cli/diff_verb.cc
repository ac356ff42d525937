// `shardsmith diff`: the command line and what it prints.
#include <cmath>
#include <iostream>

#include "base/error.h"
#include "cli/command_line.h"
#include "cli/describe.h"
#include "cli/diff.h"
#include "cli/source.h"
#include "cli/verbs.h"

namespace shardsmith::cli {
namespace {

std::string count_of(int64_t n, const char* one, const char* many) { return str(n, " ", n == 1 ? one : many); }

std::string number_text(double number) {
  if (std::isinf(number)) return "infinity";
  return str(number);
}

std::string side_text(const TensorSide& side) { return str(to_string(side.dtype), " ", to_string(side.shape)); }

// What there is to say of one tensor, without its name.
std::string tensor_text(const TensorDifference& tensor) {
  if (!tensor.b) return "only in A: " + side_text(*tensor.a);
  if (!tensor.a) return "only in B: " + side_text(*tensor.b);
  if (tensor.a->shape != tensor.b->shape) {
    return str("A has ", side_text(*tensor.a), ", B has ", side_text(*tensor.b));
  }
  std::string text;
  if (tensor.a->dtype != tensor.b->dtype) {
    text = str("A has ", to_string(tensor.a->dtype), ", B has ", to_string(tensor.b->dtype), ", ");
    if (tensor.differing == 0) return text + "the values are equal";
  }
  text += str(tensor.differing, " of ", count_of(tensor.elements, "element", "elements"),
              tensor.differing == 1 ? " differs" : " differ");
  if (tensor.largest == 0)
    return str(text, ", only in their bits: first at ", to_string(tensor.where), ": ", tensor.a_element);
  return str(text, ", by ", number_text(tensor.largest), " at ", to_string(tensor.where), ": ", tensor.a_element,
             " and ", tensor.b_element);
}

std::string value_text(const ValueDifference& value) {
  if (value.b.empty()) return "only in A: " + value.a;
  if (value.a.empty()) return "only in B: " + value.b;
  return value.a + " and " + value.b;
}

Value side_value(const std::optional<TensorSide>& side) {
  Value value;
  if (!side) return value;
  value.set("dtype", std::string(to_string(side->dtype)));
  value.set("shape", List(side->shape.begin(), side->shape.end()));
  return value;
}

const char* kind_of(const TensorDifference& tensor) {
  if (!tensor.b) return "only_in_a";
  if (!tensor.a) return "only_in_b";
  if (tensor.a->shape != tensor.b->shape) return "shape";
  return tensor.differing > 0 ? "values" : "dtype";
}

Value tensor_value(const TensorDifference& tensor) {
  Value value;
  value.set("name", tensor.name);
  value.set("kind", kind_of(tensor));
  value.set("a", side_value(tensor.a));
  value.set("b", side_value(tensor.b));
  if (tensor.differing > 0) {
    value.set("elements", tensor.elements);
    value.set("differing", tensor.differing);
    // JSON has no infinity.
    value.set("largest", std::isinf(tensor.largest) ? Value("infinity") : Value(tensor.largest));
    value.set("index", List(tensor.where.begin(), tensor.where.end()));
    value.set("a_element", tensor.a_element);
    value.set("b_element", tensor.b_element);
  }
  return value;
}

Value result_value(const std::string& a, const std::string& b, const DiffResult& result) {
  Value value, compared;
  value.set("a", a);
  value.set("b", b);
  value.set("equal", result.equal());
  compared.set("names", static_cast<int64_t>(result.all_tensors));
  compared.set("tensors", static_cast<int64_t>(result.tensors_compared));
  compared.set("elements", result.elements);
  compared.set("values", static_cast<int64_t>(result.values.compared));
  value.set("compared", compared);
  List tensors, values;
  for (const auto& tensor : result.tensors) tensors.push_back(tensor_value(tensor));
  for (const auto& one : result.values.differences) {
    Value entry;
    entry.set("path", one.path);
    entry.set("a", one.a.empty() ? Value() : Value(one.a));
    entry.set("b", one.b.empty() ? Value() : Value(one.b));
    values.push_back(entry);
  }
  value.set("tensors", tensors);
  value.set("values", values);
  value.set("values_differing", static_cast<int64_t>(result.values.differing));
  value.set("notices", to_value(result.notices));
  return value;
}

void print_human(const DiffResult& result, size_t most) {
  size_t lines = 0, left = 0;
  const auto line = [&](const std::string& name, const std::string& text) {
    if (lines < most) {
      ++lines;
      std::cout << bold(printable(name)) << ": " << printable(text) << "\n";
    } else {
      ++left;
    }
  };
  for (const auto& tensor : result.tensors) line(tensor.name, tensor_text(tensor));
  for (const auto& value : result.values.differences) line(value.path, value_text(value));
  left += result.values.differing - result.values.differences.size();
  if (left > 0) std::cout << "... and " << left << " more (--max-lines)\n";
  const std::string compared =
      str(count_of(static_cast<int64_t>(result.tensors_compared), "tensor", "tensors"), " of ",
          human_count(result.elements), " elements",
          result.values.compared > 0
              ? str(" and ", count_of(static_cast<int64_t>(result.values.compared), "value", "values"))
              : std::string());
  if (result.equal()) {
    std::cout << green("equal") << ": " << compared << "\n";
  } else {
    std::cout << red("different") << ": " << result.tensors.size() << " of "
              << count_of(static_cast<int64_t>(result.all_tensors), "tensor", "tensors");
    if (result.values.compared > 0) {
      std::cout << ", " << result.values.differing << " of "
                << count_of(static_cast<int64_t>(result.values.compared), "value", "values");
    }
    std::cout << "\n";
  }
}

}  // namespace

int run_diff(const Arguments& arguments) {
  CommandLine line("diff",
                   "Compares two checkpoints or models: names, shapes, element types, every value. Of any formats and\n"
                   "layouts. Exit code 0 where they are equal, 4 where they differ.");
  std::string a, b, memory = "256MiB";
  DiffOptions options;
  int64_t most = 100;
  auto& app = line.app();
  app.add_option("A", a, "A file, a checkpoint or a model folder")->required();
  app.add_option("B", b, "What it is compared with")->required();
  auto* rtol =
      app.add_option("--rtol", options.tolerance.rtol,
                     "Numbers a and b are equal where |a - b| <= atol + rtol * |b|; without either: bit for bit");
  auto* atol = app.add_option("--atol", options.tolerance.atol, "See --rtol");
  app.add_flag("--ignore-dtype", options.ignore_dtype, "Another element type with the same values is no difference");
  app.add_flag("--weights-only", options.weights_only, "Not optimizer, random state and other values");
  app.add_option("--include", options.include, "Only names that match this pattern (* and ?); may be repeated")
      ->allow_extra_args(false);
  app.add_option("--exclude", options.exclude, "Not the names that match this pattern; may be repeated")
      ->allow_extra_args(false);
  app.add_option("--max-lines", most, "Differences that are listed; --json lists all")->capture_default_str();
  app.add_option("--memory-limit", memory, "Memory for what is read")->capture_default_str();
  app.add_option("--threads", options.threads, "Threads that read")->capture_default_str();
  if (!line.parse(arguments)) return 0;

  options.tolerance.given = rtol->count() > 0 || atol->count() > 0;
  for (const auto& [name, value] : {std::pair("--rtol", options.tolerance.rtol), {"--atol", options.tolerance.atol}}) {
    if (!(value >= 0) || std::isinf(value))
      fail(ErrorKind::kInvalidArgument, "diff: ", name, " is ", value, ", it can be 0 or more");
  }
  if (most < 0) fail(ErrorKind::kInvalidArgument, "diff: --max-lines is ", most, ", it can be 0 or more");
  if (options.threads < 1)
    fail(ErrorKind::kInvalidArgument, "diff: --threads is ", options.threads, ", it can be 1 or more");
  options.memory = parse_size(memory, "--memory-limit");
  options.progress = line.output().progress();
  options.notice = [&](std::string_view text) { line.output().notice(text); };
  Storage& storage = local_storage();
  a = existing_path(storage, a);
  b = existing_path(storage, b);

  const DiffResult result = diff(storage, a, b, options);
  for (const auto& notice : result.notices) line.output().notice(notice);
  if (line.output().json) {
    line.output().print(result_value(a, b, result));
  } else {
    print_human(result, static_cast<size_t>(most));
  }
  return result.equal() ? 0 : exit_code(ErrorKind::kMismatch);
}

}  // namespace shardsmith::cli
