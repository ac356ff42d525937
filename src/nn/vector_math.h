// Functions of one float, written so that a loop over them vectorizes.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace shardsmith::vector_math {

// a where `first`, else b. Of a comparison with constants the compiler likes to make a branch, and then no vector.
inline float select(bool first, float a, float b) {
  const uint32_t mask = 0u - static_cast<uint32_t>(first);
  return std::bit_cast<float>((std::bit_cast<uint32_t>(a) & mask) | (std::bit_cast<uint32_t>(b) & ~mask));
}

// e^x by 2^n * polynomial, |relative error| < 2e-7 (Cephes' expf, Moshier), for x held to [-87, 88]. Not-a-number
// becomes a number: callers whose input may be one look for it.
inline float exponential(float x) {
  x = select(x > -87.0f, x, -87.0f);
  x = select(x < 88.0f, x, 88.0f);
  const auto power = static_cast<int32_t>(x * 1.44269504f + std::copysign(0.5f, x));
  const auto n = static_cast<float>(power);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * std::bit_cast<float>((power + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// GELU by tanh (Hendrycks and Gimpel), 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is
// x sigmoid(2 u); and its derivative.
inline constexpr float kGeluSlope = 1.5957691216057308f, kGeluCubic = 0.044715f;  // 2 sqrt(2 / pi)
inline float gelu_tanh(float x) { return x * sigmoid(kGeluSlope * (x + kGeluCubic * x * x * x)); }
inline float gelu_tanh_slope(float x) {
  const float s = sigmoid(kGeluSlope * (x + kGeluCubic * x * x * x));
  return s + x * s * (1.0f - s) * kGeluSlope * (1.0f + 3.0f * kGeluCubic * x * x);
}

}  // namespace shardsmith::vector_math
