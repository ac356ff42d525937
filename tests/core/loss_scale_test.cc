#include "optim/loss_scale.h"

#include <gtest/gtest.h>

#include "base/error.h"

namespace shardsmith {
namespace {

TEST(LossScale, FallsOnOverflowAndGrowsAfterAWindowOfGoodSteps) {
  LossScaler scaler({.init_scale = 1024, .scale_window = 3});
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 512);
  for (int i = 0; i < 2; ++i) scaler.update(false);
  EXPECT_EQ(scaler.scale(), 512);
  scaler.update(false);
  EXPECT_EQ(scaler.scale(), 1024);
}

TEST(LossScale, StaysAtItsMinimum) {
  LossScaler scaler({.init_scale = 4, .min_scale = 3});
  scaler.update(true);
  scaler.update(true);
  EXPECT_EQ(scaler.scale(), 3);
}

TEST(LossScale, AShiftForgivesOverflowsOnceOrAfterEachGoodStep) {
  for (const bool consecutive : {false, true}) {
    LossScaler scaler(
        {.init_scale = 8, .scale_window = 100, .delayed_shift = 2, .consecutive_hysteresis = consecutive});
    scaler.update(true);
    EXPECT_EQ(scaler.scale(), 8);
    scaler.update(false);
    scaler.update(true);
    EXPECT_EQ(scaler.scale(), consecutive ? 8 : 4);
  }
}

TEST(LossScale, RefusesAFixedScaleOfNothing) {
  EXPECT_THROW(LossScaler(0.0), Error);
  EXPECT_THROW(LossScaler(-1.0), Error);
}

}  // namespace
}  // namespace shardsmith
