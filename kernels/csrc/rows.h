// Reading and writing records: new rows, weights of rows that may not exist, single components.
#pragma once

#include <cstdint>

#include "adam.h"
#include "arena.h"
#include "initial.h"

namespace shardam {

// Writes whole records: the initial weight, and zero everywhere else. Returns how many weights were saturated.
std::int64_t initialize_rows(const Arena& arena, const RecordLayout& layout, const InitialRows& initial,
                             const std::int64_t* slots, const std::int64_t* row_ids, std::int64_t count);

struct GatherJob {
  const Arena& arena;
  RecordLayout layout;
  const InitialRows& initial;
  const std::int64_t* row_ids;  // [count]
  std::int64_t count;
  float* out;  // [count, dim]
};

// Of rows by slot, kNoSlot for one that does not exist.
void gather_weights(const GatherJob& job, const std::int64_t* slots, int num_threads);

// Of rows as an index has them. Throws std::out_of_range for an id out of its bounds, before anything is written.
template <class Index>
void gather_rows(const GatherJob& job, const Index& index, int num_threads);

// A component of a record: where it starts, how many values it has, and their dtype.
struct ComponentPlace {
  std::int64_t dim;
  std::int64_t offset_bytes;
  Dtype dtype;
};

// Zeros where a slot is kNoSlot.
void read_component(const Arena& arena, ComponentPlace place, const std::int64_t* slots, std::int64_t count, float* out);
// Returns how many values were saturated.
std::int64_t write_component(const Arena& arena, ComponentPlace place, const std::int64_t* slots, std::int64_t count,
                             const float* values);

}  // namespace shardam
