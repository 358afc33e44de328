// Sums the gradients of each distinct id, left to right in float32 (CONTRACT.md, Arithmetic and Refusal).
#pragma once

#include <cstdint>
#include <vector>

namespace shardam {

// The distinct ids of a step, in order of first appearance.
struct Groups {
  std::vector<std::int64_t> row_ids;
  std::vector<std::int32_t> counts;  // how often each appears
  std::vector<std::int32_t> of;      // for each gradient, the position of its id in row_ids
};

// count < 2^31. Throws std::bad_alloc.
Groups group_ids(const std::int64_t* row_ids, std::int64_t count);

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

// The largest magnitude among values, as bits: ordered as the magnitudes are, infinity and NaN above all.
std::uint32_t largest_magnitude(const float* values, std::int64_t count, int num_threads);

// True if no sum of `longest` gradients, none larger than the one with these bits, can reach 2^64 once it is unscaled.
bool sums_stay_below_limit(std::uint32_t peak_bits, std::int32_t longest, float unscale);

}  // namespace shardam
