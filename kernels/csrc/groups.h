// The distinct ids of a step, and which gradients are of each.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"

namespace shardam {

// Ids each once, in order of first appearance; the positions of each one's gradients, ascending, as a chain.
struct Chains {
  Buffer<std::int64_t> row_ids;  // [rows]; of no size if all are distinct: then they are the step's own
  Buffer<std::int32_t> first;    // [rows], as row_ids: where a row's first gradient is
  Buffer<std::int32_t> next;     // [count]: where the row of a gradient has its next one, -1 for none
  std::int64_t num_rows = 0;
  std::int32_t longest = 0;  // most gradients of a row
};

// count < 2^31. Throws std::bad_alloc.
Chains chain_ids(const std::int64_t* row_ids, std::int64_t count);

// The same, with the number of each gradient's row instead of chains.
struct Groups {
  std::vector<std::int64_t> row_ids;
  std::vector<std::int32_t> counts;  // how often each appears
  std::vector<std::int32_t> of;      // for each gradient, the position of its id in row_ids
};

// count < 2^31. Throws std::bad_alloc.
Groups group_ids(const std::int64_t* row_ids, std::int64_t count);

}  // namespace shardam
