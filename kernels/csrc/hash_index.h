// Any int64 id -> slot: open addressing in the order of the mixed id.
//
// An entry's home grows with mix64(id), evenly over the range of the ids that are there: a shard has those of its buckets only.
// Entries stand at or behind their home, without a gap between, in increasing order of mix64(id). So a bucket (the top 12 bits)
// is one contiguous range, a scan resumes from a key, a search for an absent id ends at the first greater one, and growth is a
// linear pass. Behind the last home there is room for every entry, so an insertion within the load limit always finds a place,
// whatever the ids; untouched, that room is not resident. Where entries crowd, as while ids come in their order, a search takes
// the logarithm of the crowd, and insertions count what they pass until it is time to spread the entries anew.
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

  void check(const std::int64_t*, std::int64_t) const {}  // every id is in bounds
  std::int64_t lookup(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) const;
  std::int64_t lookup_checked(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) const {
    return lookup(row_ids, count, out_slots);
  }
  void reserve(std::int64_t num_new);
  std::int64_t insert(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots, std::uint8_t* out_is_new);
  std::int64_t remove(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots);
  ScanPage scan(std::uint64_t from_key, std::int64_t max_rows) const;
  void spread();

 private:
  struct Entry {
    std::uint64_t mixed;
    std::int64_t slot_plus_one;  // 0: no entry; apart from the key, so that every id can be one
  };

  std::size_t home(std::uint64_t mixed) const {
    if (mixed <= first_) return 0;
    const std::uint64_t distance = mixed - first_;
    if (distance >= width_) return num_homes_ - 1;
    return static_cast<std::size_t>((static_cast<unsigned __int128>(distance) * homes_per_distance_) >> 64);
  }
  Entry* entries() const { return memory_.as<Entry>(); }
  // Where the entry of this mixed id stands, or else would have to stand.
  std::size_t position(std::uint64_t mixed) const;
  std::size_t far_position(std::size_t after, std::uint64_t mixed) const;
  // Calls visit(index, mixed id) for each id in order, the memory it will need having been prefetched.
  template <class Visit>
  void for_each_prefetched(const std::int64_t* row_ids, std::int64_t count, const Visit& visit) const;
  bool has_room(std::int64_t num_new) const;
  void insert_at(std::size_t position, std::uint64_t mixed, std::int64_t slot);
  void erase_at(std::size_t position);
  void grow(int bits);
  void set_range(int bits);

  ZeroedMemory memory_;
  SlotPool pool_;
  std::int64_t num_rows_ = 0;
  std::size_t num_homes_ = 0;  // 0 before the first entry, else 1 << bits_
  int bits_ = 0;
  // Homes lie over the mixed ids first_ to first_ + width_; beyond, entries have the first or the last home.
  std::uint64_t first_ = 0;
  std::uint64_t width_ = ~std::uint64_t{0};
  std::uint64_t homes_per_distance_ = 0;  // times 2^64
  std::size_t passed_ = 0;                // entries that insertions went past or moved since they were spread
};

}  // namespace shardam
