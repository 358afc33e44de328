// What a worker does with the ids of a forward: each once, by shard, and where each came from.
#pragma once

#include <cstdint>
#include <vector>

namespace shardam {

// The shard that owns an id, of num_shards (1 to 4,096): bucket = top 12 bits of mix64(id), shard = bucket * num_shards / 4096.
std::int64_t shard_of(std::int64_t row_id, std::int64_t num_shards);

// Distinct ids, those of shard 0 first, each shard's in order of first appearance.
struct DistinctIds {
  std::vector<std::int64_t> row_ids;
  std::vector<std::int64_t> ends;  // per shard: behind its last id
};

// count < 2^31. Writes each id's position among the distinct ones to places. Throws std::bad_alloc.
DistinctIds distinct_ids(const std::int64_t* row_ids, std::int64_t count, std::int64_t num_shards, std::int64_t* places);

// Positions of ids by shard, each shard's ascending; `order` is empty if the ids lie by shard already.
struct ShardSplit {
  std::vector<std::int64_t> order;
  std::vector<std::int64_t> ends;
};

ShardSplit split_by_shard(const std::int64_t* row_ids, std::int64_t count, std::int64_t num_shards);

// True if no id is there twice. count < 2^31. Throws std::bad_alloc.
bool all_distinct(const std::int64_t* row_ids, std::int64_t count);

}  // namespace shardam
