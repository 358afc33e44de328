// Ids 0 .. num_embeddings - 1 -> slot: one number per id, in memory that is not resident before an id near it is written.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory.h"
#include "slots.h"

namespace shardam {

class ArrayIndex {
 public:
  // Throws std::bad_alloc if there is no such address space.
  explicit ArrayIndex(std::int64_t num_embeddings);
  ArrayIndex(const ArrayIndex&) = delete;
  ArrayIndex& operator=(const ArrayIndex&) = delete;

  std::int64_t num_embeddings() const { return num_embeddings_; }
  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t num_slots() const { return pool_.num_slots(); }
  std::size_t memory_bytes() const { return memory_.size_bytes() + group_memory_.size_bytes() + pool_.memory_bytes(); }

  // Throws std::out_of_range for an id out of bounds.
  void check(const std::int64_t* row_ids, std::int64_t count) const;
  std::int64_t lookup(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) const;
  // The same of ids that are known to be in bounds; throws nothing.
  std::int64_t lookup_checked(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) const;
  void reserve(std::int64_t num_new);
  std::int64_t insert(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots, std::uint8_t* out_is_new);
  std::int64_t remove(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots);
  ScanPage scan(std::uint64_t from_key, std::int64_t max_rows) const;

 private:
  bool has_all(const std::int64_t* row_ids, std::int64_t count) const;
  std::int64_t* slots_plus_one() const { return memory_.as<std::int64_t>(); }  // 0: no row
  std::int32_t* rows_per_group() const { return group_memory_.as<std::int32_t>(); }

  std::int64_t num_embeddings_;
  ZeroedMemory memory_;
  ZeroedMemory group_memory_;  // rows in each group of consecutive ids, so that a scan skips ranges without rows
  SlotPool pool_;
  std::int64_t num_rows_ = 0;
  bool has_large_pages_ = false;
};

}  // namespace shardam
