// Groups the gradients of a step by id without summing them, for a kernel that sums while it updates.
#pragma once

#include <cstdint>
#include <vector>

namespace shardam {

// Rows are in ascending order of the length of their runs, then of first appearance.
struct Runs {
  std::vector<std::int64_t> row_ids;
  std::vector<std::int32_t> starts;   // [rows + 1]; a row's run is order[starts[row]] .. order[starts[row + 1] - 1]
  std::vector<std::int32_t> order;    // positions of gradients, ascending within a run
  std::vector<std::int64_t> bad_rows;  // positions of rows to be refused, ascending (see merge.h)
};

struct RunsJob {
  const std::int64_t* row_ids;  // [count]
  const float* gradients;       // [count, dim]
  std::int64_t count;           // below 2^31
  std::int64_t dim;
  float unscale;
};

// Throws std::bad_alloc.
Runs group_runs(const RunsJob& job, int num_threads);

}  // namespace shardam
