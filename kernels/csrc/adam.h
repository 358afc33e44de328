// One SparseAdam step on records (CONTRACT.md, Arithmetic).
#pragma once

#include <cstdint>

#include "arena.h"

namespace shardam {

// Where a float32 record of SparseAdam has its components, as layout.py says.
struct RecordLayout {
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

struct AdamJob {
  const Arena& arena;
  RecordLayout layout;
  AdamFactors factors;
  const std::int64_t* slots;    // [count], distinct
  const float* gradients;       // [count, dim]
  const float* step_factors;    // [count]
  std::int64_t count;
};

// Returns how many weights were saturated. Allocates nothing.
std::int64_t adam_update(const AdamJob& job, int num_threads);

}  // namespace shardam
