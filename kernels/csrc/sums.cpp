#include "sums.h"

#include <algorithm>
#include <vector>

#include "dispatch.h"

namespace shardam {
namespace {

SHARDAM_CLONES void sum_rows(const PlaceSums& job, std::uint8_t* met) {
  for (std::int64_t i = 0; i < job.count; ++i) {
    const std::int64_t place = job.places[i];
    if (place == job.skipped) continue;
    const float* __restrict from = job.gradients + i * job.row_stride;
    float* __restrict to = job.sums + place * job.dim;
    if (met[place] != 0) {
      for (std::int64_t j = 0; j < job.dim; ++j) to[j] = to[j] + from[j];
    } else {
      met[place] = 1;
      for (std::int64_t j = 0; j < job.dim; ++j) to[j] = 0.0f + from[j];  // -0 becomes 0, as in a sum that begins with zeros
    }
  }
}

}  // namespace

void sum_by_place(const PlaceSums& job) {
  std::vector<std::uint8_t> met(static_cast<std::size_t>(job.num_sums));
  sum_rows(job, met.data());
  for (std::int64_t place = 0; place < job.num_sums; ++place) {
    if (met[place] == 0) std::fill_n(job.sums + place * job.dim, job.dim, 0.0f);
  }
}

}  // namespace shardam
