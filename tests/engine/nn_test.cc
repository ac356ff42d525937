// The fused pieces against the composition of torch's own operations.
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>

#include "base/error.h"
#include "nn/dropout.h"
#include "nn/embedding.h"
#include "nn/functional.h"
#include "nn/linear_cpu.h"
#include "nn/loss.h"
#include "nn/norm_cpu.h"
#include "support.h"

namespace shardsmith::test {
namespace {

at::Tensor random(at::IntArrayRef shape, uint64_t seed) {
  auto generator = at::detail::createCPUGenerator(seed);
  return at::randn(shape, generator, at::TensorOptions().dtype(at::kFloat));
}

// Largest difference of f's value and gradients from reference's, both on the same inputs, relative to the reference's
// largest element; or of a difference its norm, relative to the reference's.
double difference(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& f,
                  const std::function<at::Tensor(const std::vector<at::Tensor>&)>& reference,
                  const std::vector<at::Tensor>& inputs, bool by_norm = false) {
  const auto run = [&](const auto& function) {
    std::vector<at::Tensor> leaves;
    for (const at::Tensor& input : inputs) leaves.push_back(input.clone().requires_grad_(true));
    const at::Tensor y = function(leaves);
    torch::autograd::backward({y}, {y.dim() ? random(y.sizes(), 99).to(y.scalar_type()) : at::ones({}, y.options())});
    std::vector<at::Tensor> result{y.detach()};
    for (const at::Tensor& leaf : leaves) result.push_back(leaf.grad());
    return result;
  };
  const std::vector<at::Tensor> a = run(f), b = run(reference);
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const auto size = [&](const at::Tensor& t) { return (by_norm ? t.norm() : t.abs().max()).item<double>(); };
    worst = std::max(worst, size(a[i] - b[i]) / std::max(size(b[i]), 1e-30));
  }
  return worst;
}

TEST(Norm, RmsNormMatchesItsFormula) {
  const auto ours = [](const auto& in) { return normalize(in[0], in[1], {}, NormKind::kRmsNorm, 1e-5); };
  const auto formula = [](const auto& in) {
    const at::Tensor x = in[0].to(at::kDouble);
    return (x * at::rsqrt(x.pow(2).mean(-1, true) + 1e-5) * in[1].to(at::kDouble)).to(at::kFloat);
  };
  EXPECT_LT(difference(ours, formula, {random({3, 7, 37}, 1), random({37}, 2)}), 2e-6);
}

TEST(Gated, SiluTimesUpMatchesTorch) {
  const auto ours = [](const auto& in) { return gated(in[0], in[1], Activation::kSilu); };
  const auto torchs = [](const auto& in) { return at::silu(in[0]) * in[1]; };
  EXPECT_LT(difference(ours, torchs, {random({5, 1031}, 3).mul(4), random({5, 1031}, 4)}), 2e-6);
  const at::Tensor extreme = at::tensor({-200.0f, -90.0f, -20.0f, 0.0f, 20.0f, 90.0f, 200.0f});
  EXPECT_TRUE(at::allclose(gated(extreme, at::ones_like(extreme), Activation::kSilu), at::silu(extreme), 1e-5, 1e-30));
}

TEST(Gated, BFloat16RoundsLikeTorch) {
  const at::Tensor a = random({64, 33}, 5).to(at::kBFloat16), b = random({64, 33}, 6).to(at::kBFloat16);
  const at::Tensor exact = at::silu(a.to(at::kFloat)) * b.to(at::kFloat);
  const at::Tensor ours = gated(a, b, Activation::kSilu);
  EXPECT_EQ(ours.scalar_type(), at::kBFloat16);
  EXPECT_LT((ours.to(at::kFloat) - exact).abs().div(exact.abs() + 1e-6).max().item<double>(), 1.0 / 250);
}

TEST(Rotary, KernelMatchesCompositionAndKeepsLengths) {
  const ModelDescription m = family(kTinyLlama).description;
  const RotaryTable table = make_rotary_table(m, 32, at::TensorOptions());
  const at::Tensor positions = at::arange(9).unsqueeze(0).expand({2, 9});
  const auto kernel = [&](const auto& in) { return rotate(in[0], table, {}); };
  const auto composed = [&](const auto& in) { return rotate(in[0], table, positions); };
  const at::Tensor x = random({2, 9, 3, 8}, 7);
  EXPECT_LT(difference(kernel, composed, {x}), 1e-6);
  EXPECT_TRUE(at::allclose(rotate(x, table, {}).norm(2, -1), x.norm(2, -1), 1e-5));
}

TEST(Loss, ChunkedLossMatchesCrossEntropyWithIgnoredLabels) {
  at::Tensor labels =
      at::randint(0, 50, {3, 11}, at::detail::createCPUGenerator(8), at::TensorOptions().dtype(at::kLong));
  labels[0].slice(0, 0, 6).fill_(kIgnoredLabel);
  labels[2].fill_(kIgnoredLabel);
  const auto ours = [&](const auto& in) { return causal_lm_loss(in[0], in[1], labels, {4}); };
  const auto torchs = [&](const auto& in) {
    const at::Tensor logits = at::linear(in[0], in[1]).slice(1, 0, 10).reshape({-1, 50});
    return at::cross_entropy_loss(logits, labels.slice(1, 1, 11).reshape({-1}));
  };
  EXPECT_LT(difference(ours, torchs, {random({3, 11, 16}, 9), random({50, 16}, 10)}), 3e-6);
}

TEST(Loss, GradientsAddedInPlaceEqualAutogradsOwn) {
  const at::Tensor labels = at::randint(0, 50, {2, 9}, at::kLong);
  SpareTensor spare;
  at::Tensor x = random({2, 9, 8}, 1).set_requires_grad(true), w = random({50, 8}, 2).set_requires_grad(true);
  at::Tensor plain_x = x.detach().clone().set_requires_grad(true), plain_w = w.detach().clone().set_requires_grad(true);
  for (const double scale : {0.5, 2.0, 0.25}) {  // three microbatches: the first makes the gradient, the others add
    (causal_lm_loss(x, w, labels, {4, &spare}) * scale).backward();
    (causal_lm_loss(plain_x, plain_w, labels, {4}) * scale).backward();
  }
  EXPECT_TRUE(at::allclose(w.grad(), plain_w.grad(), 1e-6, 1e-8));
  EXPECT_TRUE(at::allclose(x.grad(), plain_x.grad(), 1e-6, 1e-8));
  int heard = 0;
  w.register_hook([&](const at::Tensor&) { ++heard; });
  const at::Tensor before = w.grad().clone();
  causal_lm_loss(x, w, labels, {4, &spare}).backward();
  EXPECT_EQ(heard, 1) << "who listens hears of it";
  EXPECT_FALSE(at::equal(before, w.grad()));
}

TEST(Embedding, GradientsAddedInPlaceEqualAutogradsOwn) {
  const at::Tensor ids = at::tensor({3, 7, 3, 0, 5, 0}, at::kLong).view({2, 3});
  at::Tensor w = random({9, 4}, 2).set_requires_grad(true), plain = w.detach().clone().set_requires_grad(true);
  const at::Tensor upstream = random({2, 3, 4}, 3);
  for (int i = 0; i < 2; ++i) {
    (embed_words(w, ids, 5) * upstream).sum().backward();
    (at::embedding(plain, ids, 5) * upstream).sum().backward();
  }
  EXPECT_TRUE(at::allclose(w.grad(), plain.grad(), 1e-6, 1e-8));
  EXPECT_EQ(w.grad()[5].abs().sum().item<double>(), 0.0) << "the padding row is not trained";
}

TEST(Loss, LabelOutsideTheVocabularyIsNamed) {
  at::Tensor labels = at::zeros({1, 4}, at::kLong);
  labels[0][2] = 50;
  try {
    causal_lm_loss(random({1, 4, 8}, 1), random({50, 8}, 2), labels);
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
    EXPECT_NE(std::string(e.what()).find("50"), std::string::npos);
  }
}

TEST(Loss, IsTheSameWithoutAGraph) {
  const at::Tensor x = random({2, 9, 16}, 9), w = random({50, 16}, 10).requires_grad_(true);
  const at::Tensor labels = at::randint(0, 50, {2, 9}, at::detail::createCPUGenerator(8), at::kLong);
  const at::Tensor with_graph = causal_lm_loss(x, w, labels);
  at::NoGradGuard no_grad;
  const at::Tensor without = causal_lm_loss(x, w, labels);
  EXPECT_TRUE(with_graph.requires_grad());
  EXPECT_FALSE(without.requires_grad());
  EXPECT_EQ(with_graph.item<float>(), without.item<float>());
}

using Tensors = std::vector<at::Tensor>;

// A kernel in bfloat16 is at least about as near to the composition in float32, from the same rounded inputs, as the
// composition in bfloat16 is.
void expect_near_as_torch(const std::function<at::Tensor(const Tensors&)>& kernel,
                          const std::function<at::Tensor(const Tensors&)>& composition, const Tensors& inputs) {
  EXPECT_LT(difference(kernel, composition, inputs), 5e-6);
  Tensors narrow, wide;
  for (const at::Tensor& input : inputs)
    narrow.push_back(input.to(at::kBFloat16)), wide.push_back(narrow.back().to(at::kFloat));
  const auto narrowed = [](const auto& f) {
    return [f](const Tensors& in) {
      Tensors rounded;
      for (const at::Tensor& t : in) rounded.push_back(t.to(at::kBFloat16));
      return f(rounded).to(at::kFloat);
    };
  };
  const double ours = difference(narrowed(kernel), composition, wide, true);
  EXPECT_GT(ours, 0) << "bfloat16 rounds";
  EXPECT_LT(ours, 1.1 * difference(narrowed(composition), composition, wide, true));
}

TEST(Norm, KernelsMatchTorch) {
  const Tensors inputs{random({2, 37, 48}, 1) * 3 + 1, random({48}, 2), random({48}, 3)};
  expect_near_as_torch([](const Tensors& in) { return cpu::layer_norm(in[0], in[1], in[2], 1e-5); },
                       [](const Tensors& in) { return at::layer_norm(in[0], {48}, in[1], in[2], 1e-5); }, inputs);
  expect_near_as_torch([](const Tensors& in) { return cpu::rms_norm(in[0], in[1], 1e-5); },
                       [](const Tensors& in) { return at::rms_norm(in[0], {48}, in[1], 1e-5); },
                       {inputs[0], inputs[1]});
}

TEST(Linear, KernelsMatchTorch) {
  for (const bool in_out : {true, false}) {
    const Tensors inputs{random({3, 11, 24}, 1), in_out ? random({24, 40}, 2) : random({40, 24}, 2), random({40}, 3),
                         random({3, 11, 40}, 4)};
    const auto plain = [=](const Tensors& in) { return at::linear(in[0], in_out ? in[1].t() : in[1], in[2]); };
    const Tensors three{inputs[0], inputs[1], inputs[2]};
    expect_near_as_torch([=](const Tensors& in) { return cpu::linear(in[0], in[1], in[2], in_out); }, plain, three);
    expect_near_as_torch([=](const Tensors& in) { return cpu::linear_gelu(in[0], in[1], in[2], in_out); },
                         [=](const Tensors& in) { return at::gelu(plain(in), "tanh"); }, three);
    expect_near_as_torch([=](const Tensors& in) { return cpu::linear_residual(in[0], in[1], in[2], in_out, in[3]); },
                         [=](const Tensors& in) { return plain(in) + in[3]; }, inputs);
  }
}

TEST(Linear, BiasGradientHasTheSameBitsForAnyNumberOfThreads) {
  const at::Tensor x = random({500, 16}, 1), weight = random({16, 4099}, 2);
  Tensors found;
  for (const int threads : {1, 2, 3}) {
    at::set_num_threads(threads);
    at::Tensor bias = at::zeros({4099}).set_requires_grad(true);
    (cpu::linear(x, weight, bias, true) * random({500, 4099}, 3)).sum().backward();
    found.push_back(bias.grad());
  }
  at::set_num_threads(2);
  EXPECT_TRUE(at::equal(found[0], found[1]));
  EXPECT_TRUE(at::equal(found[0], found[2]));
}

TEST(Loss, BFloat16IsAsNearAsTorchs) {
  const at::Tensor labels = at::randint(0, 5000, {2, 40}, at::detail::createCPUGenerator(8), at::kLong);
  expect_near_as_torch([&](const Tensors& in) { return causal_lm_loss(in[0], in[1], labels, {16}); },
                       [&](const Tensors& in) {
                         const at::Tensor logits = at::linear(in[0], in[1]).slice(1, 0, 39).reshape({-1, 5000});
                         return at::cross_entropy_loss(logits.to(at::kFloat), labels.slice(1, 1, 40).reshape({-1}));
                       },
                       {random({2, 40, 16}, 9), random({5000, 16}, 10)});
}

TEST(Loss, NotANumberInALogitIsNotANumberInTheLoss) {
  const at::Tensor labels = at::zeros({1, 4}, at::kLong), w = random({50, 8}, 2);
  for (const double bad : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    at::Tensor x = random({1, 4, 8}, 1);
    x[0][1][3] = bad;
    EXPECT_TRUE(std::isnan(causal_lm_loss(x, w, labels).item<double>())) << bad;
  }
}

TEST(Loss, NoCountedLabelGivesNaN) {
  const at::Tensor labels = at::full({1, 4}, kIgnoredLabel, at::kLong);
  EXPECT_TRUE(std::isnan(causal_lm_loss(random({1, 4, 8}, 1), random({50, 8}, 2), labels).item<double>()));
}

TEST(Dropout, MaskIsAFunctionOfTheSampleNotOfItsPlaceInTheBatch) {
  const at::Tensor x = at::ones({8, 5, 300});
  const DropoutContext all{true, 7, 3, 100};
  const at::Tensor whole = dropout(x, 0.3, 4, all);
  const DropoutContext second{true, 7, 3, 104};
  EXPECT_TRUE(at::equal(whole.slice(0, 4, 8), dropout(x.slice(0, 0, 4), 0.3, 4, second)));
  EXPECT_NEAR(whole.ne(0).to(at::kDouble).mean().item<double>(), 0.7, 0.02);
  EXPECT_NEAR(whole.mean().item<double>(), 1.0, 0.03);
  for (const DropoutContext& other : {DropoutContext{true, 8, 3, 100}, DropoutContext{true, 7, 4, 100}})
    EXPECT_FALSE(at::equal(whole, dropout(x, 0.3, 4, other)));
  EXPECT_FALSE(at::equal(whole, dropout(x, 0.3, 5, all)));
  EXPECT_TRUE(at::equal(x, dropout(x, 0.3, 4, DropoutContext{false, 7, 3, 100})));
}

}  // namespace
}  // namespace shardsmith::test
