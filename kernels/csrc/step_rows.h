// The rows of one step of a table: each once, with its gradients, and, once an index was asked, with its slot.
#pragma once

#include <cstdint>
#include <cstring>
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

constexpr std::int64_t kLineFloats = 16;
constexpr std::int64_t kLead = 8;  // gradients of a row that are prefetched ahead of their sum

// Prefetches columns at .. at + size - 1 of one gradient, into L2: those of a chunk of rows are more than L1 holds.
SHARDAM_INLINE void prefetch_columns(const StepGradients& step, std::int64_t i, std::int64_t at, std::int64_t size) {
  const float* from = step.gradients + i * step.dim + at;
  for (std::int64_t j = 0; j < size; j += kLineFloats) __builtin_prefetch(from + j, 0, 2);
}

// Adds up the gradients of a chain, left to right, in vectors that stay in registers.
template <int kVectors>
SHARDAM_INLINE void sum_in_registers(const StepGradients& step, std::int64_t first, std::int64_t at, float* sum) {
  typedef float Vector __attribute__((vector_size(kLineFloats * sizeof(float))));
  Vector sums[kVectors], more;
  std::int64_t lead = first;
  for (std::int64_t i = 0; i < kLead && lead >= 0; ++i) lead = step.next[lead];
  std::memcpy(sums, step.gradients + first * step.dim + at, sizeof sums);
  for (std::int64_t i = step.next[first]; i >= 0; i = step.next[i]) {
    if (lead >= 0) {
      prefetch_columns(step, lead, at, kVectors * kLineFloats);
      lead = step.next[lead];
    }
    const float* from = step.gradients + i * step.dim + at;
    for (int v = 0; v < kVectors; ++v) {
      std::memcpy(&more, from + v * kLineFloats, sizeof more);
      sums[v] = sums[v] + more;
    }
  }
  std::memcpy(sum, sums, sizeof sums);
}

// The same for any number of columns.
SHARDAM_INLINE void sum_chain(const StepGradients& step, std::int64_t first, std::int64_t at, std::int64_t size,
                              float* __restrict sum) {
  switch (size) {
    case 16:
      return sum_in_registers<1>(step, first, at, sum);
    case 32:
      return sum_in_registers<2>(step, first, at, sum);
    case 64:
      return sum_in_registers<4>(step, first, at, sum);
    case 128:
      return sum_in_registers<8>(step, first, at, sum);
  }
  const float* from = step.gradients + first * step.dim + at;
  for (std::int64_t j = 0; j < size; ++j) sum[j] = from[j];
  for (std::int64_t i = step.next[first]; i >= 0; i = step.next[i]) {
    from = step.gradients + i * step.dim + at;
    for (std::int64_t j = 0; j < size; ++j) sum[j] = sum[j] + from[j];
  }
}

// Columns at .. at + size - 1 of a row's merged gradient, summed left to right (CONTRACT.md, Arithmetic): the one that was
// pushed, where nothing is to be done to it, else `sum`, which is written. It is before the division of a mean if kIsDivided is
// false.
template <bool kIsDivided>
SHARDAM_INLINE const float* merge_row(const StepGradients& step, std::int64_t row, std::int64_t at, std::int64_t size,
                                      float* __restrict sum) {
  const std::int64_t first = step.first == nullptr ? row : step.first[row];
  const float* from = step.gradients + first * step.dim + at;
  const bool is_alone = step.next == nullptr || step.next[first] < 0;
  if (is_alone && step.is_plain()) return from;
  if (is_alone) {
    for (std::int64_t j = 0; j < size; ++j) sum[j] = from[j];
  } else {
    sum_chain(step, first, at, size, sum);
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
  StepRows(const std::int64_t* row_ids, const float* gradients, std::int64_t count, std::int64_t dim, float unscale,
           float divisor, int num_threads);

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
