// The rows of one step of a table: each once, with its gradients, and, once an index was asked, with its slot.
#pragma once

#include <cstdint>
#include <vector>

#include "dispatch.h"
#include "groups.h"
#include "slots.h"

namespace shardam {

// Gradients as they were pushed, and which of them are a row's.
struct StepGradients {
  const float* gradients;  // [count, dim]
  const std::int32_t* first;  // [rows], nullptr: row u has gradient u alone
  const std::int32_t* next;   // [count]
  std::int64_t dim;
  float unscale;
  float divisor;

  bool is_plain() const { return unscale == 1.0f && divisor == 1.0f; }
};

// Columns at .. at + size - 1 of a row's merged gradient, summed left to right (CONTRACT.md, Arithmetic): the one that was
// pushed, where nothing is to be done to it, else `sum`, which is written. Before the division of a mean if kIsDivided is false.
template <bool kIsDivided>
SHARDAM_INLINE const float* merge_row(const StepGradients& step, std::int64_t row, std::int64_t at, std::int64_t size,
                                      float* __restrict sum) {
  const std::int64_t first = step.first == nullptr ? row : step.first[row];
  const float* from = step.gradients + first * step.dim + at;
  std::int32_t next = step.next == nullptr ? -1 : step.next[first];
  if (next < 0 && step.is_plain()) return from;
  if (next < 0) {
    for (std::int64_t j = 0; j < size; ++j) sum[j] = from[j];
  } else {
    const float* second = step.gradients + next * step.dim + at;
    for (std::int64_t j = 0; j < size; ++j) sum[j] = from[j] + second[j];
    for (next = step.next[next]; next >= 0; next = step.next[next]) {
      const float* later = step.gradients + next * step.dim + at;
      for (std::int64_t j = 0; j < size; ++j) sum[j] = sum[j] + later[j];
    }
  }
  if (step.is_plain()) return sum;
  for (std::int64_t j = 0; j < size; ++j) {
    sum[j] = sum[j] * step.unscale;
    if (kIsDivided) sum[j] = sum[j] / step.divisor;
  }
  return sum;
}

class StepRows {
 public:
  // Keeps the pointers. count < 2^31. Throws std::bad_alloc.
  StepRows(const std::int64_t* row_ids, const float* gradients, std::int64_t count, std::int64_t dim, float unscale, float divisor,
           int num_threads);

  std::int64_t num_rows() const { return chains_.num_rows; }
  bool all_distinct() const { return chains_.next.size() == 0; }
  const std::int64_t* row_ids() const { return all_distinct() ? row_ids_ : chains_.row_ids.data(); }
  // Positions of rows whose merged, unscaled gradient is NaN or at least 2^64 in magnitude, ascending.
  const std::vector<std::int64_t>& bad_rows() const { return bad_rows_; }
  std::int64_t num_absent() const { return num_absent_; }
  const StepGradients& gradients() const { return gradients_; }
  // By row, kNoSlot if it has none; nullptr before find.
  const std::int64_t* slots() const { return slots_.data(); }

  // Looks the rows up; returns how many are absent. Throws std::bad_alloc.
  template <class Index>
  std::int64_t find(const Index& index, int num_threads);
  // Gives slots to the absent ones, and returns their positions. Throws std::bad_alloc and has changed nothing.
  template <class Index>
  std::vector<std::int64_t> insert(Index& index);

 private:
  void check(int num_threads);

  const std::int64_t* row_ids_;
  std::int64_t count_;
  Chains chains_;
  StepGradients gradients_;
  std::vector<std::int64_t> bad_rows_;
  Buffer<std::int64_t> slots_;
  std::int64_t num_absent_ = 0;
};

}  // namespace shardam
