#include "groups.h"

#include <algorithm>

#include "hashing.h"

namespace shardam {
namespace {

constexpr std::int64_t kMinSize = 16;
constexpr std::int64_t kPrefetch = 12;  // ids ahead; about what a core keeps in flight

// Calls is_new(i, row) at the first appearance of each id, which has the number `row`, and is_known(i, row) at the others.
// id_of(row) is the id that a number was given to.
template <class IdOf, class IsNew, class IsKnown>
std::int64_t number_ids(const std::int64_t* row_ids, std::int64_t count, const IdOf& id_of, const IsNew& is_new,
                        const IsKnown& is_known) {
  std::int64_t size = kMinSize;
  while (size < 2 * count) size *= 2;  // at most half full
  const Buffer<std::uint64_t> table(size);
  // An entry is one more than the number of a row, and above it the upper half of the row's mixed id; 0: none. Where it stands
  // is told by the lower half: all ids of a shard share the upper bits.
  std::uint64_t* entries = table.data();
  std::fill(entries, entries + size, 0);
  const auto mask = static_cast<std::size_t>(size - 1);
  constexpr std::uint64_t kNumber = 0xffffffffu;
  std::int64_t num_rows = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    if (i + kPrefetch < count) {
      __builtin_prefetch(entries + (mix64(static_cast<std::uint64_t>(row_ids[i + kPrefetch])) & mask), 1);
    }
    const std::uint64_t mixed = mix64(static_cast<std::uint64_t>(row_ids[i]));
    for (std::size_t at = mixed & mask;; at = (at + 1) & mask) {
      const std::uint64_t entry = entries[at];
      if (entry == 0) {
        entries[at] = (mixed & ~kNumber) | static_cast<std::uint64_t>(num_rows + 1);
        is_new(i, num_rows++);
        break;
      }
      if (((entry ^ mixed) & ~kNumber) != 0) continue;
      const auto row = static_cast<std::int64_t>(entry & kNumber) - 1;
      if (id_of(row) != row_ids[i]) continue;
      is_known(i, row);
      break;
    }
  }
  return num_rows;
}

}  // namespace

Chains chain_ids(const std::int64_t* row_ids, std::int64_t count) {
  Chains chains{Buffer<std::int64_t>(count), Buffer<std::int32_t>(count), Buffer<std::int32_t>(count)};
  struct Last {
    std::int32_t at;
    std::int32_t count;
  };
  const Buffer<Last> last(count);
  std::int64_t* distinct = chains.row_ids.data();
  std::int32_t *first = chains.first.data(), *next = chains.next.data();
  std::int32_t longest = count > 0 ? 1 : 0;
  chains.num_rows = number_ids(
      row_ids, count, [&](std::int64_t row) { return distinct[row]; },
      [&](std::int64_t i, std::int64_t row) {
        distinct[row] = row_ids[i];
        first[row] = static_cast<std::int32_t>(i);
        next[i] = -1;
        last[row] = {static_cast<std::int32_t>(i), 1};
      },
      [&](std::int64_t i, std::int64_t row) {
        Last& end = last[row];
        next[end.at] = static_cast<std::int32_t>(i);
        next[i] = -1;
        end = {static_cast<std::int32_t>(i), end.count + 1};
        longest = std::max(longest, end.count);
      });
  chains.longest = longest;
  if (chains.num_rows == count) {
    chains.row_ids = {};
    chains.first = {};
    chains.next = {};
  } else {
    chains.row_ids.shorten(chains.num_rows);
    chains.first.shorten(chains.num_rows);
  }
  return chains;
}

Groups group_ids(const std::int64_t* row_ids, std::int64_t count) {
  Groups groups;
  groups.of.resize(static_cast<std::size_t>(count));
  groups.row_ids.reserve(static_cast<std::size_t>(count));
  groups.counts.reserve(static_cast<std::size_t>(count));
  number_ids(
      row_ids, count, [&](std::int64_t row) { return groups.row_ids[row]; },
      [&](std::int64_t i, std::int64_t row) {
        groups.row_ids.push_back(row_ids[i]);
        groups.counts.push_back(1);
        groups.of[i] = static_cast<std::int32_t>(row);
      },
      [&](std::int64_t i, std::int64_t row) {
        ++groups.counts[row];
        groups.of[i] = static_cast<std::int32_t>(row);
      });
  return groups;
}

}  // namespace shardam
