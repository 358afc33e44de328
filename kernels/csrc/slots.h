// Which slots of an arena are taken: freed ones are given again before new ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace shardam {

constexpr std::int64_t kNoSlot = -1;

inline std::int64_t largest_slot(const std::int64_t* slots, std::int64_t count) {
  std::int64_t largest = kNoSlot;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, slots[i]);
  return largest;
}

class SlotPool {
 public:
  std::int64_t take() {
    if (free_.empty()) return num_slots_++;
    const std::int64_t slot = free_.back();
    free_.pop_back();
    return slot;
  }
  // Room for `count` more calls of give. Throws std::bad_alloc.
  void reserve_give(std::size_t count) {
    const std::size_t needed = free_.size() + count;
    if (needed > free_.capacity()) free_.reserve(std::max(needed, 2 * free_.capacity()));  // many small calls stay linear
  }
  void give(std::int64_t slot) { free_.push_back(slot); }

  std::int64_t num_slots() const { return num_slots_; }
  std::size_t memory_bytes() const { return free_.capacity() * sizeof(std::int64_t); }

 private:
  std::vector<std::int64_t> free_;
  std::int64_t num_slots_ = 0;
};

// Rows met by a scan. next_key is meaningful only if more is true.
struct ScanPage {
  std::vector<std::int64_t> row_ids;
  std::vector<std::int64_t> slots;
  std::uint64_t next_key = 0;
  bool more = false;
};

}  // namespace shardam
