// Training steps of one process through the engine alone, for bench/train.py: what Python adds is measured beside it.
// Usage: bench_step CONFIG.json BATCH SEQUENCE WARM_UP_STEPS
// GPT-2's random weights, ids as labels, AdamW. A step is made for each line of standard input; like the script's other
// workers this one answers with "SECONDS seconds peak_mib", once when it is warm and then for each step.
#include <ATen/ATen.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>

#include "base/error.h"
#include "family/family.h"
#include "optim/adamw.h"
#include "pipeline/stage.h"

namespace shardsmith {
namespace {

double peak_mib() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) / 1024;
  return 0;
}

int run(const std::string& config_file, int64_t rows, int64_t sequence, int warm_up) {
  std::ifstream file(config_file);
  std::stringstream text;
  text << file.rdbuf();
  const FamilyModel model = describe_model(parse_json(text.str(), config_file));
  at::manual_seed(0);
  std::map<std::string, at::Tensor> weights;
  std::vector<at::Tensor> parameters;
  for (const FamilyTensor& tensor : model.tensors) {
    at::Tensor w = at::randn(tensor.shape).mul_(0.02);
    if (tensor.pieces.front().name.ends_with("layernorm.weight")) w.fill_(1);
    parameters.push_back(weights[tensor.hf_name] = w.requires_grad_(true));
  }
  StageOptions options;
  options.partition = make_partition(model_costs(model, 0.5, sequence).costs, 1);
  Stage stage(model, Parameters(model, weights, 0, 1), std::move(options));
  AdamW optimizer({{parameters, 1e-5}});
  Inputs inputs;
  inputs.input_ids = at::randint(0, model.description.vocab_size, {rows, sequence}, at::kLong);
  inputs.labels = inputs.input_ids;

  Stage::Step step;
  const auto train = [&] {
    const auto begin = std::chrono::steady_clock::now();
    stage.run_step(step, {inputs}).front().item<double>();
    optimizer.step();
    optimizer.zero_grad();
    ++step.number;
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  for (int i = 0; i < warm_up; ++i) train();
  const auto answer = [](double seconds) {
    std::printf("SECONDS %.6f %.0f\n", seconds, peak_mib());
    std::fflush(stdout);
  };
  answer(0);
  for (std::string line; std::getline(std::cin, line);) answer(train());
  return 0;
}

}  // namespace
}  // namespace shardsmith

int main(int argc, char** argv) {
  if (argc != 5) return std::fprintf(stderr, "usage: bench_step CONFIG.json BATCH SEQUENCE WARM_UP_STEPS\n"), 2;
  try {
    return shardsmith::run(argv[1], std::stoll(argv[2]), std::stoll(argv[3]), std::stoi(argv[4]));
  } catch (const std::exception& e) {
    return std::fprintf(stderr, "bench_step: %s\n", e.what()), 1;
  }
}
