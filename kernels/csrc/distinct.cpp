#include "distinct.h"

#include <algorithm>
#include <numeric>

#include "groups.h"
#include "hashing.h"

namespace shardam {
namespace {

constexpr int kBucketBits = 12;  // as shardam_proto.routing has them

// Turns counts per shard into where each shard's part begins, and returns where each ends.
std::vector<std::int64_t> ends_of(std::vector<std::int64_t>& counts) {
  std::vector<std::int64_t> ends(counts.size());
  std::partial_sum(counts.begin(), counts.end(), ends.begin());
  for (std::size_t shard = 0; shard < counts.size(); ++shard) counts[shard] = ends[shard] - counts[shard];
  return ends;
}

}  // namespace

std::int64_t shard_of(std::int64_t row_id, std::int64_t num_shards) {
  const auto bucket = static_cast<std::int64_t>(mix64(static_cast<std::uint64_t>(row_id)) >> (64 - kBucketBits));
  return (bucket * num_shards) >> kBucketBits;
}

DistinctIds distinct_ids(const std::int64_t* row_ids, std::int64_t count, std::int64_t num_shards, std::int64_t* places) {
  Groups groups = group_ids(row_ids, count);
  const auto num_distinct = static_cast<std::int64_t>(groups.row_ids.size());
  if (num_shards == 1) {
    for (std::int64_t i = 0; i < count; ++i) places[i] = groups.of[i];
    return {std::move(groups.row_ids), {num_distinct}};
  }
  const ShardSplit split = split_by_shard(groups.row_ids.data(), num_distinct, num_shards);
  if (split.order.empty()) {
    for (std::int64_t i = 0; i < count; ++i) places[i] = groups.of[i];
    return {std::move(groups.row_ids), split.ends};
  }
  DistinctIds distinct{std::vector<std::int64_t>(groups.row_ids.size()), split.ends};
  std::vector<std::int32_t> place_of(groups.row_ids.size());
  for (std::int64_t place = 0; place < num_distinct; ++place) {
    const std::int64_t group = split.order[place];
    distinct.row_ids[place] = groups.row_ids[group];
    place_of[group] = static_cast<std::int32_t>(place);
  }
  for (std::int64_t i = 0; i < count; ++i) places[i] = place_of[groups.of[i]];
  return distinct;
}

ShardSplit split_by_shard(const std::int64_t* row_ids, std::int64_t count, std::int64_t num_shards) {
  std::vector<std::int16_t> owners(static_cast<std::size_t>(count));
  std::vector<std::int64_t> starts(static_cast<std::size_t>(num_shards));
  bool in_order = true;
  for (std::int64_t i = 0; i < count; ++i) {
    owners[i] = static_cast<std::int16_t>(shard_of(row_ids[i], num_shards));
    ++starts[owners[i]];
    in_order &= i == 0 || owners[i - 1] <= owners[i];
  }
  ShardSplit split;
  split.ends = ends_of(starts);
  if (in_order) return split;
  split.order.resize(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) split.order[starts[owners[i]]++] = i;
  return split;
}

bool all_distinct(const std::int64_t* row_ids, std::int64_t count) {
  int bits = 4;
  while ((std::int64_t{1} << bits) < 2 * count) ++bits;  // at most half full
  const std::size_t mask = (std::size_t{1} << bits) - 1;
  std::vector<std::int32_t> places(mask + 1, -1);
  for (std::int64_t i = 0; i < count; ++i) {
    std::size_t at = mix64(static_cast<std::uint64_t>(row_ids[i])) & mask;  // all ids of a shard share the upper bits
    while (places[at] >= 0 && row_ids[places[at]] != row_ids[i]) at = (at + 1) & mask;
    if (places[at] >= 0) return false;
    places[at] = static_cast<std::int32_t>(i);
  }
  return true;
}

}  // namespace shardam
