// One SparseAdam step on records (CONTRACT.md, Arithmetic).
#pragma once

#include <cstdint>

#include "arena.h"
#include "weights.h"

namespace shardam {

// Where a record of SparseAdam has its components, as layout.py says.
struct RecordLayout {
  Dtype dtype;  // of the weight; the moments are float32
  std::int64_t dim;
  std::int64_t weight;  // offsets in bytes
  std::int64_t exp_avg;
  std::int64_t exp_avg_sq;
};

struct AdamFactors {
  float c1;
  float c2;
  float d;
  float eps;
  float weight_decay;
  bool maximize;
  bool decoupled;
};

// What the stochastic rounding of weights below float32 is drawn from.
struct Rounding {
  std::uint64_t table_seed;
  const std::int64_t* row_ids;  // [count]
  const std::int64_t* steps;    // [count], the step that each row takes now
};

struct AdamJob {
  const Arena& arena;
  RecordLayout layout;
  AdamFactors factors;
  const std::int64_t* slots;    // [count], distinct
  const float* gradients;       // [count, dim]
  const float* step_factors;    // [count]
  Rounding rounding;            // used for weights below float32
  std::int64_t count;
};

// Returns how many weights were saturated. Allocates nothing.
std::int64_t adam_update(const AdamJob& job, int num_threads);

}  // namespace shardam
