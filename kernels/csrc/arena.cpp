#include "arena.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <string>

namespace shardam {
namespace {

constexpr std::int64_t kFirstBlockBytes = 1 << 13;  // a table of ten rows costs 8 KiB, not megabytes
constexpr std::int64_t kFullBlockBytes = 1 << 26;   // 64 MiB: 32 large pages
// From here on a block has large pages: below, what no record uses of the last one would be a tenth of the table and more.
constexpr std::int64_t kLargePagesFrom = 1 << 23;
constexpr std::size_t kMaxBlocks = 1 << 15;         // 2 TiB; half the mappings that Linux allows a process by default
constexpr std::int64_t kMaxSlots = std::int64_t{1} << 48;

int log2_floor(std::int64_t value) {
  return value < 1 ? 0 : 63 - __builtin_clzll(static_cast<unsigned long long>(value));
}

}  // namespace

Arena::Arena(std::int64_t stride_bytes)
    : stride_bytes_(stride_bytes),
      first_bits_(log2_floor(kFirstBlockBytes / stride_bytes)),
      full_bits_(std::max(first_bits_, log2_floor(kFullBlockBytes / stride_bytes))) {}

std::int64_t Arena::slots_of_block(std::size_t block) const {
  if (block == 0) return std::int64_t{1} << first_bits_;
  return std::int64_t{1} << std::min(first_bits_ + static_cast<int>(std::min<std::size_t>(block, 64)) - 1, full_bits_);
}

void Arena::reserve(std::int64_t num_slots) {
  if (num_slots <= num_slots_) return;
  if (num_slots > kMaxSlots) throw std::bad_alloc();
  const std::size_t needed = place_of(num_slots - 1).block + 1;
  if (needed > kMaxBlocks) throw std::bad_alloc();
  const std::size_t before = blocks_.size();
  std::int64_t slots = num_slots_;
  std::size_t bytes = memory_bytes_;
  try {
    for (std::size_t block = before; block < needed; ++block) {
      const std::int64_t block_slots = slots_of_block(block);
      const std::int64_t block_bytes = block_slots * stride_bytes_;
      blocks_.emplace_back(static_cast<std::size_t>(block_bytes), /*large_pages=*/block_bytes >= kLargePagesFrom);
      block_distances_.push_back((blocks_.back().as<std::byte>() - blocks_.front().as<std::byte>()) / kUnitBytes);
      slots += block_slots;
      bytes += blocks_.back().size_bytes();
    }
  } catch (...) {
    blocks_.resize(before);
    block_distances_.resize(before);
    throw;
  }
  num_slots_ = slots;
  memory_bytes_ = bytes;
}

void Arena::check(const std::int64_t* slots, std::int64_t count, std::int64_t lowest) const {
  bool outside = false;
  for (std::int64_t i = 0; i < count; ++i) outside |= slots[i] < lowest || slots[i] >= num_slots_;
  if (!outside) return;
  for (std::int64_t i = 0; i < count; ++i) {
    if (slots[i] < lowest || slots[i] >= num_slots_) {
      throw std::out_of_range("slot " + std::to_string(slots[i]) + " lies outside " + std::to_string(lowest) + " to " +
                              std::to_string(num_slots_ - 1) + " of the arena; reserve more slots first");
    }
  }
}

}  // namespace shardam
