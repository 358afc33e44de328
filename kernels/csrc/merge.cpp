#include "merge.h"

#include <algorithm>
#include <cmath>

#include "dispatch.h"
#include "parallel.h"

namespace shardam {
namespace {

constexpr double kAcceptLimit = 9223372036854775808.0;     // 2^63
// Sums of no more terms than this cannot grow twofold by rounding, so that kAcceptLimit proves kGradientLimit.
constexpr std::int32_t kMaxAcceptedRun = 1 << 22;
constexpr std::int64_t kLineFloats = 16;  // threads share no cache line of the result

struct SumRange {
  const float* gradients;
  const std::int32_t* group_of;
  std::int64_t count;
  std::int64_t dim;
  std::int64_t first_column, end_column;
  std::int32_t first_group, end_group;
  float* merged;
};

// Adds up, in the order of the push, the columns and groups of one range; returns the largest magnitude met, as bits.
SHARDAM_CLONES std::uint32_t sum_range(const SumRange& range) {
  const std::int64_t width = range.end_column - range.first_column;
  std::int32_t next_group = range.first_group;  // groups are numbered by first appearance: a group is new when it is next
  std::uint32_t peak = 0;
  for (std::int64_t i = 0; i < range.count; ++i) {
    const std::int32_t group = range.group_of[i];
    if (group < range.first_group || group >= range.end_group) continue;
    const float* __restrict from = range.gradients + i * range.dim + range.first_column;
    float* __restrict to = range.merged + group * range.dim + range.first_column;
    if (group == next_group) {
      ++next_group;
      for (std::int64_t j = 0; j < width; ++j) {
        peak = std::max(peak, magnitude_bits(from[j]));
        to[j] = from[j];
      }
    } else {
      for (std::int64_t j = 0; j < width; ++j) {
        peak = std::max(peak, magnitude_bits(from[j]));
        to[j] = to[j] + from[j];
      }
    }
  }
  return peak;
}

// Unscales, checks and divides one row; returns whether it is bad.
SHARDAM_CLONES bool finish_row(float* __restrict row, std::int64_t dim, float unscale, float divisor) {
  std::uint32_t peak = 0;
  for (std::int64_t j = 0; j < dim; ++j) {
    const float value = row[j] * unscale;
    peak = std::max(peak, magnitude_bits(value));
    row[j] = value / divisor;
  }
  return is_refused(peak);
}

// Ranges of groups with about equally many gradients each.
std::vector<std::int32_t> balance(const Groups& groups, int num_ranges) {
  const auto num_groups = static_cast<std::int32_t>(groups.row_ids.size());
  const auto total = static_cast<std::int64_t>(groups.of.size());
  std::vector<std::int32_t> bounds{0};
  std::int64_t seen = 0;
  for (std::int32_t group = 0; group < num_groups; ++group) {
    seen += groups.counts[group];
    const auto made = static_cast<std::int64_t>(bounds.size());
    if (made < num_ranges && seen * num_ranges >= total * made) bounds.push_back(group + 1);
  }
  bounds.resize(num_ranges, num_groups);
  bounds.push_back(num_groups);
  return bounds;
}

// Sums all groups: by columns first, which splits long runs, too, then by groups. Returns the largest magnitude, as bits.
std::uint32_t sum_groups(const MergeJob& job, int num_threads) {
  const auto count = static_cast<std::int64_t>(job.groups.of.size());
  const int threads = useful_threads(num_threads, count * job.dim * std::int64_t{sizeof(float)}, kMinBytesPerThread);
  const std::int64_t lines = (job.dim + kLineFloats - 1) / kLineFloats;
  const int by_columns = static_cast<int>(std::min<std::int64_t>(threads, lines));
  const int by_groups = threads / by_columns;
  const std::vector<std::int32_t> bounds = balance(job.groups, by_groups);
  std::atomic<std::uint32_t> peak{0};
  run_parts(threads, by_columns * by_groups, [&](int part) {
    const int column = part % by_columns, group = part / by_columns;
    const std::int64_t first_column = lines * column / by_columns * kLineFloats;
    const std::int64_t end_column = std::min(lines * (column + 1) / by_columns * kLineFloats, job.dim);
    raise_to(peak, sum_range({job.gradients, job.groups.of.data(), count, job.dim, first_column, end_column, bounds[group],
                              bounds[group + 1], job.merged}));
  });
  return peak;
}

}  // namespace

SHARDAM_CLONES std::uint32_t largest_of(const float* values, std::int64_t count) {
  std::uint32_t peak = 0;
  for (std::int64_t i = 0; i < count; ++i) peak = std::max(peak, magnitude_bits(values[i]));
  return peak;
}

std::uint32_t largest_magnitude(const float* values, std::int64_t count, int num_threads) {
  const int parts = useful_threads(num_threads, count * std::int64_t{sizeof(float)}, kMinBytesPerThread);
  std::atomic<std::uint32_t> peak{0};
  run_parts(parts, parts, [&](int part) {
    const std::int64_t first = count * part / parts;
    raise_to(peak, largest_of(values + first, count * (part + 1) / parts - first));
  });
  return peak;
}

bool sums_stay_below_limit(std::uint32_t peak_bits, std::int32_t longest, float unscale) {
  if (is_refused(peak_bits)) return false;
  float peak;
  std::memcpy(&peak, &peak_bits, sizeof peak);
  return longest <= kMaxAcceptedRun && double{peak} * longest * std::max(1.0, double{unscale}) < kAcceptLimit;
}

std::vector<std::int64_t> merge(const MergeJob& job, int num_threads) {
  std::vector<std::int64_t> bad_rows;
  if (job.groups.row_ids.empty()) return bad_rows;
  const std::int32_t longest = *std::max_element(job.groups.counts.begin(), job.groups.counts.end());
  const bool accepted = sums_stay_below_limit(sum_groups(job, num_threads), longest, job.unscale);
  if (accepted && job.unscale == 1.0f && job.divisor == 1.0f) return bad_rows;
  const auto num_groups = static_cast<std::int64_t>(job.groups.row_ids.size());
  std::vector<std::uint8_t> bad(static_cast<std::size_t>(num_groups));
  const int parts = useful_threads(num_threads, num_groups * job.dim * std::int64_t{sizeof(float)}, kMinBytesPerThread);
  run_parts(parts, parts, [&](int part) {
    for (std::int64_t row = num_groups * part / parts; row < num_groups * (part + 1) / parts; ++row) {
      bad[row] = finish_row(job.merged + row * job.dim, job.dim, job.unscale, job.divisor);
    }
  });
  for (std::int64_t row = 0; row < num_groups; ++row) {
    if (bad[row] != 0) bad_rows.push_back(row);
  }
  return bad_rows;
}

}  // namespace shardam
