#include "hash_index.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "hashing.h"

namespace shardam {
namespace {

constexpr int kMinBits = 4;
constexpr int kMaxBits = 56;  // 2^56 entries of 16 bytes are beyond any address space
constexpr std::size_t kNear = 8;  // entries looked at one by one: two lines of the cache, and few crowds are longer
constexpr std::int64_t kFewRows = 64;  // below, the range of the ids that are there says little of those to come
constexpr std::size_t kPassedPerHome = 8;  // spreading costs about as much as to pass one entry per home
constexpr std::size_t kLargePagesFrom = 1 << 21;  // of homes: else a large page holds the room behind them, which is not used
constexpr std::int64_t kChunk = 64;  // ids whose entries are prefetched together: a few times what a core keeps in flight

// Longest allowed fill, 11/16: beyond, searches lengthen faster than memory shrinks.
std::int64_t max_rows_of(std::size_t num_homes) { return static_cast<std::int64_t>(num_homes / 16 * 11); }

}  // namespace

std::size_t HashIndex::memory_bytes() const { return num_homes_ * sizeof(Entry) + pool_.memory_bytes(); }

std::size_t HashIndex::position(std::uint64_t mixed) const {
  const Entry* all = entries();
  std::size_t at = home(mixed);
  for (const std::size_t end = at + kNear; at < end; ++at) {
    if (all[at].slot_plus_one == 0 || all[at].mixed >= mixed) return at;
  }
  return far_position(at - 1, mixed);
}

// Behind the home of a mixed id lie the smaller ones without a gap, then greater ones or a gap: so halving finds the border.
std::size_t HashIndex::far_position(std::size_t after, std::uint64_t mixed) const {
  const Entry* all = entries();
  const std::size_t end = 2 * num_homes_;
  const auto is_smaller = [&](std::size_t at) { return all[at].slot_plus_one != 0 && all[at].mixed < mixed; };
  std::size_t step = kNear, to = after + step;
  while (to < end && is_smaller(to)) {
    after = to;
    step *= 2;
    to = after + step;
  }
  to = std::min(to, end);
  while (to - after > 1) {
    const std::size_t middle = after + (to - after) / 2;
    (is_smaller(middle) ? after : to) = middle;
  }
  return to;
}

template <class Visit>
void HashIndex::for_each_prefetched(const std::int64_t* row_ids, std::int64_t count, const Visit& visit) const {
  std::uint64_t mixed[kChunk];
  for (std::int64_t first = 0; first < count; first += kChunk) {
    const std::int64_t size = std::min(kChunk, count - first);
    for (std::int64_t i = 0; i < size; ++i) {
      mixed[i] = mix64(static_cast<std::uint64_t>(row_ids[first + i]));
      __builtin_prefetch(entries() + home(mixed[i]));
    }
    for (std::int64_t i = 0; i < size; ++i) visit(first + i, mixed[i]);
  }
}

std::int64_t HashIndex::lookup(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) const {
  if (num_homes_ == 0) {
    std::fill(out_slots, out_slots + count, kNoSlot);
    return 0;
  }
  std::int64_t found = 0;
  for_each_prefetched(row_ids, count, [&](std::int64_t i, std::uint64_t mixed) {
    const Entry& entry = entries()[position(mixed)];
    const bool here = entry.slot_plus_one != 0 && entry.mixed == mixed;
    out_slots[i] = here ? entry.slot_plus_one - 1 : kNoSlot;
    found += here;
  });
  return found;
}

bool HashIndex::has_room(std::int64_t num_new) const { return num_new <= max_rows_of(num_homes_) - num_rows_; }

void HashIndex::reserve(std::int64_t num_new) {
  if (has_room(num_new)) return;
  int bits = num_homes_ == 0 ? kMinBits : bits_;
  while (bits <= kMaxBits && num_new > max_rows_of(std::size_t{1} << bits) - num_rows_) ++bits;
  if (bits > kMaxBits) throw std::bad_alloc();
  grow(bits);
}

// Spreads the entries evenly, as far as their number says where others will come.
void HashIndex::spread() {
  if (num_rows_ >= kFewRows) grow(bits_);
}

void HashIndex::grow(int bits) {
  const std::size_t homes_bytes = (std::size_t{1} << bits) * sizeof(Entry);
  ZeroedMemory memory(2 * homes_bytes, /*large_pages=*/homes_bytes >= kLargePagesFrom);
  Entry* to = memory.as<Entry>();
  const Entry* from = entries();
  set_range(bits);
  std::size_t next = 0;
  std::int64_t left = num_rows_;
  for (std::size_t at = 0; left > 0; ++at) {
    if (from[at].slot_plus_one == 0) continue;
    next = std::max(next, home(from[at].mixed));
    to[next++] = from[at];
    --left;
  }
  memory_ = std::move(memory);
  passed_ = 0;
}

// Takes the range of the entries, and as much beyond both ends as lies between two of them: greater ones are about as far.
void HashIndex::set_range(int bits) {
  constexpr std::uint64_t kAll = ~std::uint64_t{0};
  std::uint64_t first = 0, last = kAll;
  if (num_rows_ >= kFewRows) {
    const Entry* all = entries();
    std::size_t at = 0;
    while (all[at].slot_plus_one == 0) ++at;
    first = all[at].mixed;
    std::size_t end = num_homes_;
    while (all[end].slot_plus_one != 0) ++end;
    while (all[end - 1].slot_plus_one == 0) --end;
    last = all[end - 1].mixed;
    const std::uint64_t margin = (last - first) / static_cast<std::uint64_t>(num_rows_);
    first -= std::min(first, margin);
    last += std::min(kAll - last, margin);
  }
  num_homes_ = std::size_t{1} << bits;
  bits_ = bits;
  first_ = first;
  width_ = std::max<std::uint64_t>(last - first, 2 * num_homes_);  // so that the quotient fits
  homes_per_distance_ = static_cast<std::uint64_t>((static_cast<unsigned __int128>(num_homes_) << 64) / width_);
}

std::int64_t HashIndex::insert(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots,
                               std::uint8_t* out_is_new) {
  if (!has_room(count)) reserve(count - lookup(row_ids, count, out_slots));
  std::int64_t num_new = 0;
  if (num_homes_ == 0) return num_new;  // count is 0
  if (passed_ > kPassedPerHome * num_homes_) {
    try {
      spread();
    } catch (const std::bad_alloc&) {  // it is slow without, and right
    }
    passed_ = 0;
  }
  for_each_prefetched(row_ids, count, [&](std::int64_t i, std::uint64_t mixed) {
    const std::size_t at = position(mixed);
    if (at - home(mixed) > kNear) passed_ += kNear;
    const Entry& entry = entries()[at];
    const bool is_new = entry.slot_plus_one == 0 || entry.mixed != mixed;
    if (is_new) insert_at(at, mixed, pool_.take());
    out_slots[i] = entries()[at].slot_plus_one - 1;
    out_is_new[i] = is_new;
    num_new += is_new;
  });
  return num_new;
}

void HashIndex::insert_at(std::size_t position, std::uint64_t mixed, std::int64_t slot) {
  Entry* all = entries();
  std::size_t end = position;
  while (all[end].slot_plus_one != 0) ++end;
  std::memmove(all + position + 1, all + position, (end - position) * sizeof(Entry));
  passed_ += end - position;
  all[position] = Entry{mixed, slot + 1};
  ++num_rows_;
}

std::int64_t HashIndex::remove(const std::int64_t* row_ids, std::int64_t count, std::int64_t* out_slots) {
  const std::int64_t found = lookup(row_ids, count, out_slots);
  if (found == 0) return 0;
  pool_.reserve_give(static_cast<std::size_t>(found));
  std::int64_t removed = 0;
  for_each_prefetched(row_ids, count, [&](std::int64_t i, std::uint64_t mixed) {
    const std::size_t at = position(mixed);
    const Entry& entry = entries()[at];
    if (entry.slot_plus_one == 0 || entry.mixed != mixed) {
      out_slots[i] = kNoSlot;  // never there, or removed earlier in this call
      return;
    }
    pool_.give(out_slots[i]);
    erase_at(at);
    ++removed;
  });
  return removed;
}

void HashIndex::erase_at(std::size_t position) {
  Entry* all = entries();
  std::size_t next = position + 1;
  while (all[next].slot_plus_one != 0 && home(all[next].mixed) < next) ++next;  // displaced entries move back by one
  std::memmove(all + position, all + position + 1, (next - 1 - position) * sizeof(Entry));
  all[next - 1].slot_plus_one = 0;
  --num_rows_;
}

ScanPage HashIndex::scan(std::uint64_t from_key, std::int64_t max_rows) const {
  ScanPage page;
  if (num_rows_ == 0) return page;
  const auto expected = static_cast<std::size_t>(std::min(max_rows, num_rows_));
  page.row_ids.reserve(expected);
  page.slots.reserve(expected);
  const Entry* all = entries();
  // Behind the last home entries follow each other without a gap, so the first empty place there is the end.
  for (std::size_t at = home(from_key); at < num_homes_ || all[at].slot_plus_one != 0; ++at) {
    const Entry& entry = all[at];
    if (entry.slot_plus_one == 0 || entry.mixed < from_key) continue;
    if (static_cast<std::int64_t>(page.row_ids.size()) == max_rows) {
      page.next_key = entry.mixed;
      page.more = true;
      break;
    }
    page.row_ids.push_back(static_cast<std::int64_t>(unmix64(entry.mixed)));
    page.slots.push_back(entry.slot_plus_one - 1);
  }
  return page;
}

}  // namespace shardam
