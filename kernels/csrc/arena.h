// Where records live: blocks of native memory that never move.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace shardam {

constexpr std::int64_t kUnitBytes = 16;  // distances of records from the base are given to kernels in these units

class Arena {
 public:
  // stride_bytes is a multiple of 16.
  explicit Arena(std::int64_t stride_bytes);
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Afterwards slots 0 .. num_slots - 1 have records, zero if never written. Throws std::bad_alloc and has changed nothing.
  void reserve(std::int64_t num_slots);

  std::int64_t num_slots() const { return num_slots_; }
  std::int64_t stride_bytes() const { return stride_bytes_; }
  std::size_t memory_bytes() const { return memory_bytes_; }

  // The pointer from which distances count: the first block's start, nullptr before there is one.
  std::byte* base() const { return blocks_.empty() ? nullptr : blocks_.front().as<std::byte>(); }
  // A record's distance from base() in units of kUnitBytes.
  std::int64_t distance(std::int64_t slot) const {
    const Place place = place_of(slot);
    return block_distances_[place.block] + place.offset * (stride_bytes_ / kUnitBytes);
  }
  std::byte* record(std::int64_t slot) const { return base() + distance(slot) * kUnitBytes; }
  // Throws std::out_of_range for a slot outside lowest .. num_slots - 1.
  void check(const std::int64_t* slots, std::int64_t count, std::int64_t lowest) const;

 private:
  struct Place {
    std::size_t block;
    std::int64_t offset;  // in slots
  };
  // Block 0 has 2^first_bits_ slots; each next one as many as all before it, until a block has 2^full_bits_.
  Place place_of(std::int64_t slot) const {
    if (slot < std::int64_t{1} << first_bits_) return {0, slot};
    if (slot < std::int64_t{1} << full_bits_) {
      const int top = 63 - __builtin_clzll(static_cast<unsigned long long>(slot));
      return {static_cast<std::size_t>(top - first_bits_ + 1), slot - (std::int64_t{1} << top)};
    }
    const auto full = static_cast<std::size_t>(slot >> full_bits_);
    return {static_cast<std::size_t>(full_bits_ - first_bits_) + full, slot & ((std::int64_t{1} << full_bits_) - 1)};
  }
  std::int64_t slots_of_block(std::size_t block) const;

  std::int64_t stride_bytes_;
  int first_bits_;
  int full_bits_;
  std::vector<ZeroedMemory> blocks_;
  std::vector<std::int64_t> block_distances_;
  std::int64_t num_slots_ = 0;
  std::size_t memory_bytes_ = 0;
};

}  // namespace shardam
