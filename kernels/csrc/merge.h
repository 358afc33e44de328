// Sums the gradients of each distinct id, left to right in float32 (CONTRACT.md, Arithmetic and Refusal).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "dispatch.h"
#include "groups.h"

namespace shardam {

struct MergeJob {
  const Groups& groups;
  const float* gradients;  // [count, dim]
  std::int64_t dim;
  float unscale;
  float divisor;
  float* merged;  // [groups.row_ids.size(), dim], written
};

// Returns the positions of rows with a value that is NaN or at least 2^64 in magnitude before the division, ascending.
std::vector<std::int64_t> merge(const MergeJob& job, int num_threads);

// A value's magnitude as bits: ordered as the magnitudes are, infinity and NaN above all.
SHARDAM_INLINE std::uint32_t magnitude_bits(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & 0x7fffffffu;
}

// Whether a gradient with this largest magnitude, as bits, merged and unscaled, is refused: 2^64 or more, or NaN.
constexpr std::uint32_t kGradientLimitBits = (127u + 64u) << 23;
SHARDAM_INLINE bool is_refused(std::uint32_t peak_bits) { return peak_bits >= kGradientLimitBits; }

inline void raise_to(std::atomic<std::uint32_t>& peak, std::uint32_t bits) {
  std::uint32_t before = peak.load();
  while (before < bits && !peak.compare_exchange_weak(before, bits)) {
  }
}

// The largest magnitude among values, as bits; in this thread, and in several.
std::uint32_t largest_of(const float* values, std::int64_t count);
std::uint32_t largest_magnitude(const float* values, std::int64_t count, int num_threads);

// True if no sum of `longest` gradients, none larger than the one with these bits, can reach 2^64 once it is unscaled.
bool sums_stay_below_limit(std::uint32_t peak_bits, std::int32_t longest, float unscale);

}  // namespace shardam
