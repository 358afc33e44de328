// One SparseAdam step on records (CONTRACT.md, Arithmetic).
#pragma once

#include <cstdint>

#include "arena.h"
#include "step_rows.h"
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

// The step that rows take: one for all, or where `of_row` is given, each its own.
template <class T>
struct PerRow {
  T all;
  const T* of_row;

  T operator[](std::int64_t row) const { return of_row == nullptr ? all : of_row[row]; }
};

// What the stochastic rounding of weights below float32 is drawn from.
struct Rounding {
  std::uint64_t table_seed;
  const std::int64_t* row_ids;  // [rows]
  PerRow<std::int64_t> steps;   // the step that each row takes now
};

// What is noted of a row that a step touches, beside its record.
struct Touch {
  std::uint64_t change_number;
  std::int64_t table_step;
};

struct AdamJob {
  const Arena& arena;
  RecordLayout layout;
  AdamFactors factors;
  const std::int64_t* slots;  // [rows], distinct
  StepGradients gradients;
  PerRow<float> step_factors;
  Rounding rounding;  // used for weights below float32
  std::int64_t num_rows;
  Touch* touches;  // by slot; nullptr: nothing is noted
  Touch touch;
};

// Returns how many weights were saturated. Allocates nothing.
std::int64_t adam_update(const AdamJob& job, int num_threads);

}  // namespace shardam
