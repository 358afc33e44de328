// Weights of every dtype, as float32 and back (CONTRACT.md, Dtypes); reference/weights.py is the same in NumPy.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "dispatch.h"
#include "hashing.h"

namespace shardam {

enum class Dtype { kFloat32, kBfloat16, kFloat16 };

constexpr std::int64_t item_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

SHARDAM_INLINE std::uint32_t float_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

SHARDAM_INLINE float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The two dtypes below float32. Every step is exact but the one rounding: to nearest even, or up in magnitude where the
// fraction is above `random`. Magnitudes are bits without a sign; those from kInfinity on are to be saturated.
struct Bfloat16 {
  static constexpr std::uint32_t kInfinity = 0x7f80u;

  static SHARDAM_INLINE float widen(std::uint16_t bits) { return float_of(std::uint32_t{bits} << 16); }
  static SHARDAM_INLINE std::uint32_t nearest(float value) {
    const std::uint32_t bits = float_bits(value) & 0x7fffffffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
  static SHARDAM_INLINE std::uint32_t stochastic(float value, std::uint32_t random) {
    return ((float_bits(value) & 0x7fffffffu) + (random & 0xffffu)) >> 16;
  }
};

struct Float16 {
  static constexpr std::uint32_t kInfinity = 0x7c00u;

  static SHARDAM_INLINE float widen(std::uint16_t bits) {
    constexpr std::uint32_t kPower112 = (127u + 112u) << 23;  // the difference of the biases of exponents
    const float magnitude = float_of((bits & 0x7fffu) << 13) * float_of(kPower112);
    return float_of(float_bits(magnitude) | (std::uint32_t{bits} & 0x8000u) << 16);
  }
  static SHARDAM_INLINE std::uint32_t nearest(float value) {
    const Split split = Split::of(value);
    const auto floor = static_cast<std::uint32_t>(split.floor);
    const std::uint32_t above = split.fraction > kHalf ? 1u : 0u, not_below = split.fraction >= kHalf ? 1u : 0u;
    return split.exponent + floor + ((floor & 1u) != 0 ? not_below : above);
  }
  static SHARDAM_INLINE std::uint32_t stochastic(float value, std::uint32_t random) {
    const Split split = Split::of(value);
    const bool up = split.fraction > static_cast<float>(static_cast<std::int32_t>(random >> 8));
    return split.exponent + static_cast<std::uint32_t>(split.floor) + (up ? 1u : 0u);
  }

 private:
  static constexpr float kHalf = 8388608.0f;  // of a fraction, in units of 2^-24

  // |value| = (floor + fraction / 2^24) * q, q = 2^(max(e, -14) - 10) being the distance of float16s around the value.
  struct Split {
    std::int32_t floor;
    float fraction;
    std::uint32_t exponent;  // what it adds to the bits

    static SHARDAM_INLINE Split of(float value) {
      constexpr std::uint32_t kLeastExponent = 127 - 14;  // biased
      constexpr std::uint32_t kLimit = (127u + 16u) << 23;  // 2^16: from here on a float16 is infinite
      const std::uint32_t bits = std::min(float_bits(value) & 0x7fffffffu, kLimit);
      const std::uint32_t exponent = std::max(bits >> 23, kLeastExponent);
      const float scaled = float_of(bits) * float_of((264u - exponent) << 23);  // times 2^(10 - e), below 2^11
      const auto floor = static_cast<std::int32_t>(scaled);
      return {floor, (scaled - static_cast<float>(floor)) * 16777216.0f, (exponent - kLeastExponent) << 10};
    }
  };
};

// Writes `count` weights as float32.
template <class Weight>
SHARDAM_INLINE void widen_weights(const std::uint16_t* __restrict bits, std::int64_t count, float* __restrict out) {
  for (std::int64_t j = 0; j < count; ++j) out[j] = Weight::widen(bits[j]);
}

// Gives a magnitude the sign of the value that it was made of; saturated is counted up if it is not finite.
template <class Weight>
SHARDAM_INLINE std::uint16_t finish_weight(std::uint32_t magnitude, float value, std::uint32_t& saturated) {
  saturated += magnitude >= Weight::kInfinity ? 1u : 0u;
  return static_cast<std::uint16_t>(std::min(magnitude, Weight::kInfinity - 1) | (float_bits(value) >> 16 & 0x8000u));
}

// Writes values to nearest even; returns how many were saturated.
template <class Weight>
SHARDAM_INLINE std::uint32_t round_weights(const float* __restrict values, std::int64_t count, std::uint16_t* __restrict out) {
  std::uint32_t saturated = 0;
  for (std::int64_t j = 0; j < count; ++j) out[j] = finish_weight<Weight>(Weight::nearest(values[j]), values[j], saturated);
  return saturated;
}

// Writes the values of columns first_column .. stochastically; returns how many were saturated.
template <class Weight>
SHARDAM_INLINE std::uint32_t round_weights(const float* __restrict values, std::int64_t count, std::uint64_t stream,
                                           std::int64_t first_column, std::uint16_t* __restrict out) {
  std::uint32_t saturated = 0;
  for (std::int64_t j = 0; j < count; ++j) {
    const std::uint32_t random = element_hash(stream, first_column + j);
    out[j] = finish_weight<Weight>(Weight::stochastic(values[j], random), values[j], saturated);
  }
  return saturated;
}

// Writes weights as they are stored as float32.
void read_weights(Dtype dtype, const std::byte* from, std::int64_t count, float* out);

// Writes float32 as weights are stored, to nearest even; returns how many were saturated.
std::int64_t write_weights(Dtype dtype, const float* values, std::int64_t count, std::byte* to);

}  // namespace shardam
