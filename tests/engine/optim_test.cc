#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "base/error.h"
#include "optim/adamw.h"
#include "optim/adamw_update.h"
#include "optim/gradient_norm.h"

namespace shardsmith {
namespace {

at::Tensor random(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::detail::createCPUGenerator(seed), at::TensorOptions().dtype(at::kFloat));
}

// Distance in units in the last place, sign-magnitude order.
int64_t ulps(const at::Tensor& a, const at::Tensor& b) {
  const auto ordered = [](const at::Tensor& x) {
    const at::Tensor bits = x.contiguous().view(at::kInt).to(at::kLong);
    return at::where(bits.lt(0), -(bits.bitwise_and(0x7fffffff)), bits);
  };
  return ordered(a).sub(ordered(b)).abs().max().item<int64_t>();
}

// Sizes around what a vector and a chunk hold.
const std::vector<int64_t> kSizes{1, 7, 16, 33, 1000, 16384, 16385, 50001};

TEST(AdamWUpdate, GoesAlongWithTorchsFusedOne) {
  const AdamWScalars scalars{1e-3, 0.9, 0.95, 1e-8, 0.1};
  std::vector<at::Tensor> ours, theirs, m, v, their_m, their_v, steps;
  for (const int64_t n : kSizes) {
    ours.push_back(random({n}, static_cast<uint64_t>(n)));
    theirs.push_back(ours.back().clone());
    for (auto* list : {&m, &v, &their_m, &their_v}) list->push_back(at::zeros({n}));
    steps.push_back(at::zeros({}));
  }
  for (int step = 1; step <= 5; ++step) {
    std::vector<AdamWTensors> tensors;
    std::vector<at::Tensor> gradients;
    for (size_t i = 0; i < ours.size(); ++i) {
      gradients.push_back(random(ours[i].sizes(), 100 * static_cast<uint64_t>(step) + i));
      steps[i].add_(1);
      tensors.push_back({gradients[i], ours[i], m[i], v[i], {}, static_cast<double>(step)});
    }
    adamw_update(tensors, scalars);
    at::_fused_adamw_(theirs, gradients, their_m, their_v, {}, steps, scalars.lr, scalars.beta1, scalars.beta2,
                      scalars.weight_decay, scalars.epsilon, false, false);
    for (size_t i = 0; i < ours.size(); ++i) {
      // The averages may lie near 0, where a rounding is many of their units: then the distance is absolute.
      EXPECT_TRUE(at::allclose(m[i], their_m[i], 1e-6, 1e-7)) << "step " << step << " of " << kSizes[i];
      EXPECT_LE(ulps(v[i], their_v[i]), 2 * step) << "step " << step << " of " << kSizes[i];
      // A rounding a step: both are as near to the exact update.
      EXPECT_TRUE(at::allclose(ours[i], theirs[i], 1.2e-7 * step, 2e-9 * step))
          << "step " << step << " of " << kSizes[i];
    }
  }
}

TEST(AdamWUpdate, GivesTheSameBitsForAnyNumberOfThreads) {
  const at::Tensor start = random({100000}, 1), gradient = random({100000}, 2);
  const auto run = [&](int threads) {
    at::set_num_threads(threads);
    at::Tensor p = start.clone(), m = at::zeros_like(p), v = at::zeros_like(p);
    adamw_update({{gradient, p, m, v, {}, 1}}, {});
    return p;
  };
  const int before = at::get_num_threads();
  const at::Tensor one = run(1), two = run(2);
  at::set_num_threads(before);
  EXPECT_TRUE(at::equal(one, two));
}

TEST(AdamWUpdate, NarrowGradientsAndParametersAreThoseOfTheirWideValues) {
  for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf}) {
    const at::Tensor gradient = random({5000}, 3).to(narrow);
    at::Tensor p = random({5000}, 4), m = at::zeros_like(p), v = at::zeros_like(p);
    at::Tensor q = p.clone(), mq = m.clone(), vq = v.clone(), rounded = at::zeros({5000}, narrow);
    AdamWScalars scalars;
    scalars.gradient_scale = 1.0 / 1024;
    adamw_update({{gradient, p, m, v, rounded, 1}}, scalars);
    adamw_update({{gradient.to(at::kFloat).mul_(1.0 / 1024), q, mq, vq, {}, 1}}, {});
    EXPECT_TRUE(at::equal(p, q) && at::equal(m, mq) && at::equal(v, vq));
    EXPECT_TRUE(at::equal(rounded, p.to(narrow)));
  }
}

TEST(AdamWUpdate, RoundsAsTorchDoes) {
  // Every kind of value: normal, subnormal, tie, beyond the narrow range, infinite, not a number.
  at::Tensor bits =
      at::arange(0, 1 << 16, at::kInt).mul(65536).add(at::tensor({0, 0x7fff, 0x8000, 0x8001}, at::kInt).unsqueeze(1));
  const at::Tensor values = bits.contiguous().view(at::kFloat).flatten();
  for (const at::ScalarType narrow : {at::kBFloat16, at::kHalf}) {
    at::Tensor p = values.clone(), m = at::zeros_like(p), v = at::zeros_like(p), rounded = at::zeros_like(p, narrow);
    AdamWScalars still;
    still.lr = 0;
    adamw_update({{at::zeros_like(p), p, m, v, rounded, 1}}, still);
    const at::Tensor expected = p.to(narrow);
    const at::Tensor nan = at::isnan(expected);
    EXPECT_TRUE(at::equal(at::isnan(rounded), nan));
    EXPECT_TRUE(at::equal(rounded.masked_fill(nan, 0).view(at::kShort), expected.masked_fill(nan, 0).view(at::kShort)));
  }
}

TEST(AdamWUpdate, TakesOtherStridesThanContiguousOnes) {
  at::Tensor p = random({40, 30}, 5).t(), m = at::zeros_like(p), v = at::zeros_like(p);
  at::Tensor q = p.contiguous(), mq = at::zeros_like(q), vq = at::zeros_like(q);
  const at::Tensor gradient = random({30, 40}, 6);
  adamw_update({{gradient, p, m, v, {}, 1}}, {});
  adamw_update({{gradient, q, mq, vq, {}, 1}}, {});
  EXPECT_TRUE(at::equal(p, q) && at::equal(m, mq));
}

TEST(AdamWUpdate, RefusesTensorsThatDontBelongTogether) {
  at::Tensor p = random({4}, 1), m = at::zeros({4}), v = at::zeros({4});
  EXPECT_THROW(adamw_update({{random({5}, 1), p, m, v, {}, 1}}, {}), Error);
  EXPECT_THROW(adamw_update({{p, p.to(at::kDouble), m, v, {}, 1}}, {}), Error);
  EXPECT_THROW(adamw_update({{p, p, at::zeros({3}), v, {}, 1}}, {}), Error);
  EXPECT_THROW(adamw_update({{p, p, m, v, at::zeros({4}), 1}}, {}), Error);
  adamw_update({}, {});
}

TEST(AdamW, NarrowParametersFollowTheirMasters) {
  at::Tensor p = random({64}, 7).to(at::kBFloat16).requires_grad_(true);
  const at::Tensor start = p.detach().to(at::kFloat);
  AdamW optimizer({{{p}, 1e-5}});
  for (int step = 0; step < 50; ++step) {
    p.mutable_grad() = at::ones({64}, at::kBFloat16);
    optimizer.step();
  }
  const at::Tensor master = optimizer.states()[0][0].master;
  // Each update is too small for bfloat16; together they are not lost.
  EXPECT_TRUE(at::allclose(master, start * std::pow(1 - 1e-7, 50) - 50e-5, 1e-5, 1e-6));
  EXPECT_TRUE(at::equal(p.detach(), master.to(at::kBFloat16)));
}

TEST(GradientNorm, IsTheNormOfAllTogether) {
  const std::vector<at::Tensor> gradients{random({70001}, 1), random({3, 5}, 2).to(at::kBFloat16),
                                          random({9}, 3).to(at::kHalf), random({4}, 4).to(at::kDouble), at::empty({0})};
  std::vector<at::Tensor> flat;
  for (const at::Tensor& g : gradients) flat.push_back(g.to(at::kDouble).flatten());
  const at::Tensor all = at::cat(flat);
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double type : {1.0, 2.0, 3.0, infinity}) {
    const GradientNorm norm(type);
    const double expected = at::linalg_vector_norm(all, type).item<double>();
    EXPECT_NEAR(norm.finish(norm.partial(gradients)), expected, 1e-9 * expected) << type;
  }
}

TEST(GradientNorm, LargeElementsDontOverflowAndBadOnesShow) {
  const GradientNorm norm(2);
  EXPECT_NEAR(norm.finish(norm.partial({at::full({4}, 3e38, at::kFloat)})), 6e38, 1e32);
  EXPECT_NEAR(norm.finish(norm.partial({at::full({4}, 65504.0, at::kHalf)})), 2 * 65504.0, 1e-6);
  for (const at::ScalarType type : {at::kFloat, at::kBFloat16, at::kHalf})
    for (const double bad : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      at::Tensor gradient = at::ones({1000}, type);
      gradient[777] = bad;
      for (const double of : {1.0, 2.0, std::numeric_limits<double>::infinity()})
        EXPECT_FALSE(std::isfinite(GradientNorm(of).partial({at::ones({3}), gradient, at::ones({3})})));
    }
}

TEST(GradientNorm, RefusesNormsThatAreNone) {
  for (const double type : {0.0, -1.0, std::nan("")}) EXPECT_THROW(GradientNorm{type}, Error);
}

}  // namespace
}  // namespace shardsmith
