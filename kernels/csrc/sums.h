// Sums the gradients of a worker's lookups by the place of their row, as torch's own backward of an embedding does.
#pragma once

#include <cstdint>

namespace shardam {

struct PlaceSums {
  const float* gradients;  // [count, dim], each row contiguous
  std::int64_t count;
  std::int64_t dim;
  std::int64_t row_stride;     // floats from one row to the next
  const std::int64_t* places;  // [count], each 0 to num_sums - 1
  std::int64_t skipped;        // place that gets no gradient, or -1
  std::int64_t num_sums;
  float* sums;  // [num_sums, dim], written: zeros where no gradient belongs
};

// Adds to zero, left to right in float32. Throws std::bad_alloc before anything is written.
void sum_by_place(const PlaceSums& job);

}  // namespace shardam
