#include "runs.h"

#include <algorithm>
#include <memory>
#include <numeric>

#include "merge.h"

namespace shardam {
namespace {

// The positions of groups, short runs first.
std::vector<std::int32_t> by_length(const std::vector<std::int32_t>& counts) {
  std::vector<std::int32_t> groups(counts.size());
  std::iota(groups.begin(), groups.end(), 0);
  std::stable_sort(groups.begin(), groups.end(), [&](std::int32_t a, std::int32_t b) { return counts[a] < counts[b]; });
  return groups;
}

// The exact answer, at the price of all sums.
std::vector<std::int64_t> bad_groups(const Groups& groups, const RunsJob& job, int num_threads) {
  const std::unique_ptr<float[]> sums(new float[groups.row_ids.size() * static_cast<std::size_t>(job.dim)]);
  return merge({groups, job.gradients, job.dim, job.unscale, 1.0f, sums.get()}, num_threads);
}

}  // namespace

Runs group_runs(const RunsJob& job, int num_threads) {
  const Groups groups = group_ids(job.row_ids, job.count);
  const std::vector<std::int32_t> sorted = by_length(groups.counts);
  const std::size_t num_rows = sorted.size();
  Runs runs;
  runs.row_ids.resize(num_rows);
  runs.starts.resize(num_rows + 1);
  runs.order.resize(static_cast<std::size_t>(job.count));
  std::vector<std::int32_t> row_of(num_rows), next(num_rows);  // by group: its row, and where its next gradient goes
  for (std::size_t row = 0; row < num_rows; ++row) {
    const std::int32_t group = sorted[row];
    row_of[group] = static_cast<std::int32_t>(row);
    next[group] = runs.starts[row];
    runs.row_ids[row] = groups.row_ids[group];
    runs.starts[row + 1] = runs.starts[row] + groups.counts[group];
  }
  for (std::int64_t i = 0; i < job.count; ++i) runs.order[next[groups.of[i]]++] = static_cast<std::int32_t>(i);

  const std::int32_t longest = num_rows == 0 ? 0 : groups.counts[sorted.back()];
  const std::uint32_t peak = largest_magnitude(job.gradients, job.count * job.dim, num_threads);
  if (!sums_stay_below_limit(peak, longest, job.unscale)) {
    for (const std::int64_t group : bad_groups(groups, job, num_threads)) runs.bad_rows.push_back(row_of[group]);
    std::sort(runs.bad_rows.begin(), runs.bad_rows.end());
  }
  return runs;
}

}  // namespace shardam
