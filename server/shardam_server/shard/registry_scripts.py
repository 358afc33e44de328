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
if ARGV[7] ~= '' and known and known ~= ARGV[7] then return answer('other lineage') end
local lineage, seen = string.match(redis.call('HGET', KEYS[5], ARGV[6]) or '', '^(%d+):(%d+)$')
local behind = ARGV[8] ~= '' and lineage == ARGV[7] and tonumber(seen) > tonumber(ARGV[8])
if behind and ARGV[13] == '' then return answer('an older state than the cluster has seen') end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
if not cluster then redis.call('SET', KEYS[2], ARGV[5]) end
local marks = 15 + 2 * tonumber(ARGV[14])
for i = 15, marks - 1, 2 do redis.call('HSETNX', KEYS[4], ARGV[i], ARGV[i + 1]) end
for i = marks, #ARGV, 2 do redis.call('HSETNX', KEYS[5], ARGV[i], ARGV[i + 1]) end
if ARGV[11] ~= '' then
  if ARGV[7] ~= '' then redis.call('HSET', KEYS[4], ARGV[6], ARGV[7]) end
  if ARGV[8] ~= '' then redis.call('HSET', KEYS[5], ARGV[6], ARGV[7] .. ':' .. ARGV[8]) end
  if not map or cjson.decode(map).epoch < tonumber(ARGV[12]) then redis.call('SET', KEYS[3], ARGV[11]) end
end
return answer('held')
"""
"""Takes or renews a name, and writes what Redis has lost in the same step, so that nobody sees a cluster without its map.

A lineage that Redis knows otherwise is never replaced here, because time may have passed since the shard read it
(REPLACE_LINEAGE does that); nor is a high mark lowered, but with 13. Change numbers are compared as
numbers: they stay below 2^53.

KEYS: shard, cluster entry, map, lineages, high marks. ARGV: 1 the shard's entry, 2 its incarnation in it, 3 the lease in ms;
4 the cluster's id in 5 the cluster's entry; 6 the shard's index, 7 its lineage or '', 8 the last change of it that is kept or
''; 9 and 10 texts of an entry that may be replaced or ''; 11 the map or '', 12 its epoch; 13 not '': what is missing of the
lineage is given up; 14 a count of pairs, then so many of index and lineage, then pairs of index and mark, of other shards.
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

END_MOVE = """
redis.call('DEL', KEYS[1])
return redis.call('GET', KEYS[2]) or ''
"""
"""Has no plan decided any more under a final hold, and returns the last plan that was decided, or nothing.

KEYS: move, plan.
"""
