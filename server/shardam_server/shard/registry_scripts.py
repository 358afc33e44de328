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
local plan = redis.call('GET', KEYS[6])
local before = 0
if plan then
  local decided, timeline, epoch = cjson.decode(plan), tonumber(ARGV[15]), tonumber(ARGV[16])
  if decided.timeline > timeline or (decided.timeline == timeline and decided.epoch > epoch) then before = 1 end
end
local function answer(standing) return {standing, map and 1 or 0, known or '', before} end
if cluster and not has(cluster, ARGV[4]) then return answer('other cluster') end
local held = redis.call('GET', KEYS[1])
if held and not has(held, ARGV[2]) and not has(held, ARGV[9]) and not has(held, ARGV[10]) then return answer('taken') end
if ARGV[7] ~= '' and known and known ~= ARGV[7] then return answer('other lineage') end
local lineage, seen = string.match(redis.call('HGET', KEYS[5], ARGV[6]) or '', '^(%d+):(%d+)$')
local behind = ARGV[8] ~= '' and lineage == ARGV[7] and tonumber(seen) > tonumber(ARGV[8])
if behind and ARGV[13] == '' then return answer('an older state than the cluster has seen') end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[3])
if before == 1 then return answer('held') end
if not cluster then redis.call('SET', KEYS[2], ARGV[5]) end
local marks = 17 + 2 * tonumber(ARGV[14])
for i = 17, marks - 1, 2 do redis.call('HSETNX', KEYS[4], ARGV[i], ARGV[i + 1]) end
for i = marks, #ARGV, 2 do redis.call('HSETNX', KEYS[5], ARGV[i], ARGV[i + 1]) end
if ARGV[11] ~= '' then
  if ARGV[7] ~= '' then redis.call('HSET', KEYS[4], ARGV[6], ARGV[7]) end
  if ARGV[7] ~= '' and ARGV[8] ~= '' then redis.call('HSET', KEYS[5], ARGV[6], ARGV[7] .. ':' .. ARGV[8]) end
  if not map or cjson.decode(map).epoch < tonumber(ARGV[12]) then redis.call('SET', KEYS[3], ARGV[11]) end
end
return answer('held')
"""
"""Takes or renews a name, and writes what Redis has lost in the same step, so that nobody sees a cluster without its map.

A lineage that Redis knows otherwise is never replaced here, because time may have passed since the shard read it
(REPLACE_LINEAGE does that); nor is a high mark lowered, but with 13. Change numbers are compared as
numbers: they stay below 2^53. Of a shard whose state is from before the plan nothing but its name is kept: what it knows of the
cluster is no longer so.

KEYS: shard, cluster entry, map, lineages, high marks, plan. ARGV: 1 the shard's entry, 2 its incarnation in it, 3 the lease in
ms; 4 the cluster's id in 5 the cluster's entry; 6 the shard's index, 7 its lineage or '', 8 the last change of it that is kept
or ''; 9 and 10 texts of an entry that may be replaced or ''; 11 the map or '', 12 its epoch; 13 not '': what is missing of the
lineage is given up; 14 a count of pairs, 15 and 16 timeline and epoch of the state; then so many pairs of index and lineage,
then pairs of index and mark, of other shards.
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

PUT_PLAN = """
local function has(value, text) return text ~= '' and string.find(value, text, 1, true) end
local cluster = redis.call('GET', KEYS[1])
local plan = redis.call('GET', KEYS[6])
if cluster and not has(cluster, ARGV[1]) then return 'other cluster' end
if plan == ARGV[4] then return 'done' end
if ARGV[2] ~= '' then
  local held = redis.call('GET', KEYS[7])
  if not cluster or not held or not has(held, ARGV[2]) then return 'name not held' end
  if plan and plan ~= ARGV[3] then return 'other plan' end
end
if plan then
  local decided, timeline, epoch = cjson.decode(plan), tonumber(ARGV[5]), tonumber(ARGV[6])
  if decided.timeline > timeline or (decided.timeline == timeline and decided.epoch >= epoch) then return 'other plan' end
end
redis.call('SET', KEYS[1], ARGV[7])
local map = redis.call('GET', KEYS[2])
if not map or cjson.decode(map).epoch < tonumber(ARGV[6]) then redis.call('SET', KEYS[2], ARGV[8]) end
redis.call('DEL', KEYS[3], KEYS[4], KEYS[5])
local lineages = 11 + 2 * tonumber(ARGV[9])
local marks = lineages + 2 * tonumber(ARGV[10])
for i = 11, lineages - 1, 2 do redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1]) end
for i = lineages, marks - 1, 2 do redis.call('HSET', KEYS[4], ARGV[i], ARGV[i + 1]) end
for i = marks, #ARGV, 2 do redis.call('HSET', KEYS[5], ARGV[i], ARGV[i + 1]) end
redis.call('SET', KEYS[6], ARGV[4])
return 'done'
"""
"""Decides a plan, or writes one again that Redis has lost; with it, in one step, what holds from there on.

It is decided by home, while home holds its name and Redis has the former plan; what was known of lineages is gone then. It is
written again by any shard that has taken it over, with the lineages that it knows since, where Redis has none or an older one.

KEYS: cluster entry, map, tables, lineages, high marks, plan, home. ARGV: 1 the cluster's id in its entry; 2 home's incarnation
in its entry or '': it is written again; 3 the former plan or ''; 4 the plan, 5 its timeline, 6 its epoch; 7 the cluster's
entry; 8 the map; 9 how many tables, 10 how many lineages; then pairs of table and schema, of index and lineage, of index and
mark.
"""

DECIDE_MOVE = (
    """
if redis.call('GET', KEYS[6]) ~= ARGV[4] then
  local allowed = redis.call('GET', KEYS[8])
  if not allowed then return 'not allowed' end
  for i, incarnation in ipairs(cjson.decode(allowed)) do
    local held = redis.call('GET', KEYS[8 + i])
    if held and not string.find(held, incarnation, 1, true) then return 'not allowed' end
  end
end
"""
    + PUT_PLAN
)
"""Decides a plan that moves the state to other shards, as PUT_PLAN does, while that is allowed under a final hold and no shard
that was cut has been replaced.

KEYS: those of PUT_PLAN; 8 move, then all shards. ARGV: those of PUT_PLAN.
"""

END_MOVE = """
redis.call('DEL', KEYS[1])
return redis.call('GET', KEYS[2]) or ''
"""
"""Has no plan decided any more under a final hold, and returns the last plan that was decided, or nothing.

KEYS: move, plan.
"""
