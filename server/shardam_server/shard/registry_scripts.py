"""Lua for Redis: what a shard writes there is compared and set in one step, and may be repeated.

Values are compared as text in the JSON that shardam_proto.registry writes, because Lua's numbers have 53 bits; the comma behind
a number ends it. No script counts anything up: one that runs twice, because its answer was lost, changes nothing more.
"""

from __future__ import annotations

CLAIM = """
local function has(value, text) return text ~= '' and string.find(value, text, 1, true) end
local cluster = redis.call('GET', KEYS[2])
local map = redis.call('GET', KEYS[3])
local known = redis.call('HGET', KEYS[4], ARGV[6])
local function answer(standing) return {standing, map and 1 or 0, known or ''} end
if cluster and not has(cluster, ARGV[4]) then return answer('other cluster') end
local held = redis.call('GET', KEYS[1])
if held and not has(held, ARGV[2]) and not has(held, ARGV[9]) and not has(held, ARGV[10]) then return answer('taken') end
if ARGV[7] ~= '' and ARGV[8] ~= 'sure' and known and known ~= ARGV[7] then return answer('other lineage') end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
if not cluster then redis.call('SET', KEYS[2], ARGV[5]) end
for i = 13, #ARGV, 2 do redis.call('HSETNX', KEYS[4], ARGV[i], ARGV[i + 1]) end
if ARGV[11] ~= '' then
  if ARGV[7] ~= '' then redis.call('HSET', KEYS[4], ARGV[6], ARGV[7]) end
  if not map or cjson.decode(map).epoch < tonumber(ARGV[12]) then redis.call('SET', KEYS[3], ARGV[11]) end
end
return answer('held')
"""
"""Takes or renews a name, and writes what Redis has lost in the same step, so that nobody sees a cluster without its map.

KEYS: shard, cluster entry, map, lineages. ARGV: 1 the shard's entry, 2 its incarnation in it, 3 the lease in ms; 4 the
cluster's id in 5 the cluster's entry; 6 the shard's index, 7 its lineage or '', 8 'sure' if its lineage replaces another;
9 and 10 texts of an entry that may be replaced or ''; 11 the map or '', 12 its epoch; then pairs of index and lineage of other
shards.
"""

RELEASE = """
local held = redis.call('GET', KEYS[1])
if held and string.find(held, ARGV[1], 1, true) then return redis.call('DEL', KEYS[1]) end
return 0
"""
"""Deletes the lease if this incarnation holds it."""

PUBLISH_CLUSTER = """
local cluster = redis.call('GET', KEYS[1])
if cluster then return cluster end
redis.call('SET', KEYS[1], ARGV[1])
if ARGV[2] ~= '' then redis.call('SET', KEYS[2], ARGV[2]) end
return ARGV[1]
"""
"""Writes the cluster's entry if there is none, with the map of a cluster that has one, and returns the entry that is there."""

PUBLISH_MAP = """
local map = redis.call('GET', KEYS[1])
if map and cjson.decode(map).epoch >= tonumber(ARGV[2]) then return map end
redis.call('SET', KEYS[1], ARGV[1])
return ARGV[1]
"""
"""Writes the map if there is none or one of a lower epoch, and returns the one that is there."""

REPLACE_LINEAGE = """
local held = redis.call('GET', KEYS[1])
if not held or not string.find(held, ARGV[1], 1, true) then return 0 end
local known = redis.call('HGET', KEYS[2], ARGV[2])
if known and known ~= ARGV[3] and known ~= ARGV[4] then return 0 end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[4])
return 1
"""
"""Replaces a shard's lineage by a new one if this incarnation holds its name and nobody else has replaced it."""
