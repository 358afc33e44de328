// Any int64 id -> slot: open addressing in the order of the mixed id.
//
// An entry's home is the top bits of mix64(id); entries stand at or behind their home, without a gap between, in increasing
// order of mix64(id). So a bucket (the top 12 bits) is one contiguous range, a scan resumes from a key, a search for an absent
// id ends at the first greater one, and growth is one linear pass. Behind the last home there is room for every entry, so an
// insertion within the load limit always finds a place, whatever the ids; untouched, that room is not resident.
#pragma once

#include <cstddef>
#include <cstdint>

#include "memory.h"
#include "slots.h"

namespace shardam {

class HashIndex {
 public:
  HashIndex() = default;
  HashIndex(const HashIndex&) = delete;
  HashIndex& operator=(const HashIndex&) = delete;

  std::int64_t num_rows() const { return num_rows_; }
  std::int64_t num_slots() const { return pool_.num_slots(); }
  std::size_t memory_bytes() const;

  std::int64_t lookup(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) const;
  void reserve(std::int64_t num_new);
  std::int64_t insert(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots, std::uint8_t* out_is_new);
  std::int64_t remove(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots);
  ScanPage scan(std::uint64_t from_key, std::int64_t max_rows) const;

 private:
  struct Entry {
    std::uint64_t mixed;
    std::int64_t slot_plus_one;  // 0: no entry; apart from the key, so that every id can be one
  };

  std::size_t home(std::uint64_t mixed) const { return mixed >> shift_; }
  Entry* entries() const { return memory_.as<Entry>(); }
  // Where the entry of this mixed id stands, or else would have to stand.
  std::size_t position(std::uint64_t mixed) const;
  // Calls visit(index, mixed id) for each id in order, the memory it will need having been prefetched.
  template <class Visit>
  void for_each_prefetched(const std::int64_t* row_ids, std::int64_t count, const Visit& visit) const;
  bool has_room(std::int64_t num_new) const;
  void insert_at(std::size_t position, std::uint64_t mixed, std::int64_t slot);
  void erase_at(std::size_t position);
  void grow(int bits);

  ZeroedMemory memory_;
  SlotPool pool_;
  std::int64_t num_rows_ = 0;
  std::size_t num_homes_ = 0;  // 0 before the first entry, else a power of two
  int shift_ = 0;              // 64 - log2(num_homes_)
};

}  // namespace shardam
