#include "array_index.h"

#include <algorithm>
#include <limits>
#include <new>
#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace shardam {
namespace {

constexpr int kGroupBits = 12;         // 4,096 ids: 32 KiB that a scan need not read, for 4 bytes
constexpr std::int64_t kLargePagesFrom = 4;  // of all ids have rows: then a large page has hardly a small one that is not used
constexpr std::int64_t kPrefetch = 16;  // ids ahead; about what a core keeps in flight

std::size_t array_bytes(std::int64_t num_embeddings) {
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max() / static_cast<std::int64_t>(sizeof(std::int64_t));
  if (num_embeddings > kMax) throw std::bad_alloc();
  return static_cast<std::size_t>(num_embeddings) * sizeof(std::int64_t);
}

std::size_t group_bytes(std::int64_t num_embeddings) {
  return static_cast<std::size_t>(((num_embeddings - 1) >> kGroupBits) + 1) * sizeof(std::int32_t);
}

}  // namespace

ArrayIndex::ArrayIndex(std::int64_t num_embeddings)
    : num_embeddings_(num_embeddings),
      memory_(array_bytes(num_embeddings), /*large_pages=*/false),
      group_memory_(group_bytes(num_embeddings), /*large_pages=*/false) {}

SHARDAM_CLONES bool ArrayIndex::has_all(const std::int64_t* row_ids, std::int64_t count) const {
  std::uint64_t outside = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    outside |= static_cast<std::uint64_t>(row_ids[i]) >= static_cast<std::uint64_t>(num_embeddings_) ? 1 : 0;
  }
  return outside == 0;
}

void ArrayIndex::check(const std::int64_t* row_ids, std::int64_t count) const {
  if (has_all(row_ids, count)) return;
  const std::int64_t* outside = std::find_if(row_ids, row_ids + count, [&](std::int64_t row_id) {
    return static_cast<std::uint64_t>(row_id) >= static_cast<std::uint64_t>(num_embeddings_);
  });
  throw std::out_of_range("row id " + std::to_string(*outside) + " lies outside 0 to " + std::to_string(num_embeddings_ - 1) +
                          " of a bounded table");
}

std::int64_t ArrayIndex::lookup(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) const {
  check(row_ids, count);
  return lookup_checked(row_ids, count, out_slots);
}

std::int64_t ArrayIndex::lookup_checked(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) const {
  const std::int64_t* slots = slots_plus_one();
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (i + kPrefetch < count) __builtin_prefetch(slots + row_ids[i + kPrefetch]);
    out_slots[i] = slots[row_ids[i]] - 1;
    found += out_slots[i] != kNoSlot;
  }
  return found;
}

void ArrayIndex::reserve(std::int64_t) {}  // every id has its place from the start

std::int64_t ArrayIndex::insert(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots,
                                std::uint8_t* out_is_new) {
  check(row_ids, count);
  std::int64_t* slots = slots_plus_one();
  std::int64_t num_new = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (i + kPrefetch < count) __builtin_prefetch(slots + row_ids[i + kPrefetch]);
    std::int64_t& slot = slots[row_ids[i]];
    const bool is_new = slot == 0;
    if (is_new) {
      slot = pool_.take() + 1;
      ++rows_per_group()[row_ids[i] >> kGroupBits];
    }
    out_slots[i] = slot - 1;
    out_is_new[i] = is_new;
    num_new += is_new;
  }
  num_rows_ += num_new;
  if (!has_large_pages_ && num_rows_ >= num_embeddings_ / kLargePagesFrom) {
    has_large_pages_ = true;
    memory_.use_large_pages();
  }
  return num_new;
}

std::int64_t ArrayIndex::remove(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) {
  pool_.reserve_give(static_cast<std::size_t>(lookup(row_ids, count, out_slots)));
  std::int64_t* slots = slots_plus_one();
  std::int64_t removed = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t& slot = slots[row_ids[i]];
    out_slots[i] = slot - 1;
    if (slot == 0) continue;  // never there, or removed earlier in this call
    pool_.give(slot - 1);
    slot = 0;
    --rows_per_group()[row_ids[i] >> kGroupBits];
    ++removed;
  }
  num_rows_ -= removed;
  return removed;
}

ScanPage ArrayIndex::scan(std::uint64_t from_key, std::int64_t max_rows) const {
  ScanPage page;
  if (from_key >= static_cast<std::uint64_t>(num_embeddings_)) return page;
  const auto expected = static_cast<std::size_t>(std::min(max_rows, num_rows_));
  page.row_ids.reserve(expected);
  page.slots.reserve(expected);
  const std::int64_t* slots = slots_plus_one();
  std::int64_t row_id = static_cast<std::int64_t>(from_key);
  while (row_id < num_embeddings_) {
    const std::int64_t group = row_id >> kGroupBits;
    const std::int64_t group_end = std::min((group + 1) << kGroupBits, num_embeddings_);
    if (rows_per_group()[group] == 0) row_id = group_end;
    for (; row_id < group_end; ++row_id) {
      if (slots[row_id] == 0) continue;
      if (static_cast<std::int64_t>(page.row_ids.size()) == max_rows) {
        page.next_key = static_cast<std::uint64_t>(row_id);
        page.more = true;
        return page;
      }
      page.row_ids.push_back(row_id);
      page.slots.push_back(slots[row_id] - 1);
    }
  }
  return page;
}

}  // namespace shardam
