"""A shard's entries in Redis: the cluster, its name lease, the route map, table schemas. Blocking; used off the event loop.

Redis grants names only; whether a shard may serve its state is decided by the shard (PROTOCOL.md, section 9). The token of a
name is the incarnation, handed in with every call, so that any thread may renew or release it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import cast

import redis

from shardam_proto.errors import BadOption, RedisUnreachable
from shardam_proto.registry import (
    ClusterEntry,
    ClusterView,
    Keys,
    Plan,
    ShardEntry,
    connect_redis,
    display_url,
    read_cluster,
    route_map_from_json,
    route_map_to_json,
)
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2
from shardam_server.redis_errors import redis_unreachable
from shardam_server.shard.known_lineages import HighMark
from shardam_server.shard.registry_scripts import (
    CLAIM,
    DECIDE_MOVE,
    END_MOVE,
    PUBLISH_CLUSTER,
    PUBLISH_MAP,
    PUT_PLAN,
    RELEASE,
    REPLACE_LINEAGE,
)
from shardam_server.shard.shared_entries import PlanAnswer, PlanEntry, Shared

MOVE_ALLOWED_S = 3600
"""What allows a move goes by itself, should nobody end it; it is decided within a second."""


class Lease(enum.Enum):
    """What Redis says to a claim of a shard's name."""

    HELD = "held"
    TAKEN = "taken"
    OTHER_LINEAGE = "other lineage"
    OTHER_CLUSTER = "other cluster"
    BEHIND = "an older state than the cluster has seen"


@dataclasses.dataclass(frozen=True)
class Claim:
    """What a shard says of itself when it takes or renews its name.

    Attributes:
        entry: its registration; lineage 0: it has no state.
        lease_s: how long the name outlives this claim.
        cluster: the cluster; written if Redis has lost it.
        route_map: the map, once known; written if Redis has lost it or has one of a lower epoch.
        lineages: lineages that Redis has lost, by shard.
        has_folder: it holds the lock on the folder of its entry, so that whoever has the name with the same folder is dead,
            and whoever has it without a state serves nothing: both are replaced at once.
        change_number: the last change of its lineage that its folder holds; one that is below what the cluster has seen of the
            lineage refuses the claim. None: nothing is kept.
        accepts_loss: what the cluster has seen beyond that is given up.
        marks: high marks that Redis has lost, by shard.
        timeline: timeline of its state.
    """

    entry: ShardEntry
    lease_s: float
    cluster: ClusterEntry
    route_map: RouteMap | None = None
    lineages: Mapping[int, int] = dataclasses.field(default_factory=dict)
    has_folder: bool = False
    change_number: int | None = None
    accepts_loss: bool = False
    marks: Mapping[int, HighMark] = dataclasses.field(default_factory=dict)
    timeline: int = 1


@dataclasses.dataclass(frozen=True)
class Standing:
    """Redis's answer to a claim.

    Attributes:
        lease: what became of it.
        had_map: the route map existed before the claim.
        known_lineage: lineage that Redis knew for the shard before the claim, if any.
        before_plan: its state is from before the plan, so that only its name was written.
    """

    lease: Lease
    had_map: bool
    known_lineage: int | None
    before_plan: bool = False


class Registration:
    """One shard's view of Redis and its entries there.

    Args:
        url: Redis URL.
        cluster: cluster name.
        timeout_s: seconds until a Redis call has failed; a half-open connection is noticed by it.

    All methods raise RedisUnreachable if Redis does not answer, or holds what this version cannot read.
    """

    def __init__(self, url: str, cluster: str, timeout_s: float) -> None:
        self._url = url
        self.keys = Keys(cluster)
        self._redis = connect_redis(url, timeout_s)

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except redis.exceptions.ReadOnlyError as error:
            # This server is a replica now. The address may lead to its successor, but only for a new connection.
            self._redis.connection_pool.disconnect()
            raise redis_unreachable(self._url, error) from error
        except redis.RedisError as error:
            raise redis_unreachable(self._url, error) from error
        except (ValueError, TypeError, KeyError) as error:
            raise RedisUnreachable(
                f"Redis at {display_url(self._url)} holds an entry of cluster {self.keys.cluster!r} that this version cannot "
                f"read ({error}): use another --cluster name, or matching shardam packages"
            ) from error

    def view(self) -> ClusterView:
        """Reads the cluster."""
        with self._reaching():
            return read_cluster(self._redis, self.keys)

    def read_shared(self) -> Shared:
        """Reads what all shards share, at one moment: lineages are of states from the plan on."""
        keys = self.keys
        with self._reaching(), self._redis.pipeline(transaction=True) as pipeline:
            pipeline.get(keys.cluster_entry)
            pipeline.get(keys.route_map)
            pipeline.hgetall(keys.lineages)
            pipeline.hlen(keys.tables)
            pipeline.hgetall(keys.marks)
            pipeline.get(keys.plan)
            cluster, route_map, lineages, num_tables, marks, plan = pipeline.execute()
            return Shared(
                None if cluster is None else ClusterEntry.from_json(cluster),
                None if route_map is None else route_map_from_json(route_map),
                {int(index): int(lineage) for index, lineage in lineages.items()},
                num_tables,
                {int(index): HighMark.from_text(mark.decode()) for index, mark in marks.items()},
                None if plan is None else Plan.from_json(plan),
            )

    def eviction_policy(self) -> str | None:
        """Returns what Redis does when its memory is full, or None if it does not say or need not."""
        try:
            info = cast("dict[str, object]", self._redis.info("memory"))
        except redis.RedisError:
            return None  # an access list may forbid it; nothing depends on it
        policy = info.get("maxmemory_policy")
        return policy if isinstance(policy, str) else None

    # -- the cluster

    def create_cluster(self, num_shards: int, seed: int) -> ClusterEntry:
        """Creates the cluster's entry, or returns the one that is there."""
        return self.publish_cluster(ClusterEntry(cluster_id=secrets.token_hex(8), num_shards=num_shards, seed=seed))

    def publish_cluster(self, entry: ClusterEntry, route_map: RouteMap | None = None) -> ClusterEntry:
        """Writes the cluster's entry if it is absent, and with it the map, if known; returns the entry that is there."""
        with self._reaching():
            value = self._redis.eval(
                PUBLISH_CLUSTER,
                2,
                self.keys.cluster_entry,
                self.keys.route_map,
                entry.to_json(),
                "" if route_map is None else route_map_to_json(route_map),
            )
            return ClusterEntry.from_json(cast(bytes, value))

    def publish_route_map(self, route_map: RouteMap) -> RouteMap:
        """Writes the route map if there is none or one of a lower epoch, and returns the one that is there.

        Raises:
            BadOption: it was made by a routing version that this program does not know.
        """
        with self._reaching():
            value = self._redis.eval(PUBLISH_MAP, 1, self.keys.route_map, route_map_to_json(route_map), str(route_map.epoch))
        try:
            return route_map_from_json(cast(bytes, value))
        except ValueError as error:
            raise BadOption(f"cluster {self.keys.cluster!r} in Redis: {error}") from error

    # -- the name

    def claim(self, claim: Claim) -> Standing:
        """Takes or renews the shard's name; writes again what Redis has lost of the cluster."""
        entry, route_map = claim.entry, claim.route_map
        replaceable = (_folder_text(entry.folder), _LOST_TEXT) if claim.has_folder and entry.lineage else ("", "")
        names = self.keys
        keys = (names.shard(entry.index), names.cluster_entry, names.route_map, names.lineages, names.marks, names.plan)
        with self._reaching():
            answer = self._redis.eval(
                CLAIM,
                len(keys),
                *keys,
                entry.to_json(),
                _incarnation_text(entry.incarnation),
                str(int(claim.lease_s * 1000)),
                _cluster_text(claim.cluster.cluster_id),
                claim.cluster.to_json(),
                str(entry.index),
                str(entry.lineage or ""),
                "" if claim.change_number is None else str(claim.change_number),
                *replaceable,
                "" if route_map is None else route_map_to_json(route_map),
                "" if route_map is None else str(route_map.epoch),
                "accepts loss" if claim.accepts_loss else "",
                str(len(claim.lineages)),
                str(claim.timeline),
                str(0 if route_map is None else route_map.epoch),
                *(str(number) for pair in claim.lineages.items() for number in pair),
                *(text for index, mark in claim.marks.items() for text in (str(index), mark.to_text())),
            )
            lease, had_map, known, before_plan = cast("tuple[bytes, int, bytes, int]", answer)
        return Standing(Lease(lease.decode()), bool(had_map), int(known) if known else None, bool(before_plan))

    def release(self, index: int, incarnation: int) -> None:
        """Gives the name back, if this incarnation holds it."""
        with self._reaching():
            self._redis.eval(RELEASE, 1, self.keys.shard(index), _incarnation_text(incarnation))

    def replace_lineage(self, index: int, incarnation: int, known: int | None, lineage: int) -> bool:
        """Records that a shard starts anew, if this incarnation has the name and Redis knows no other lineage than `known`."""
        with self._reaching():
            done = self._redis.eval(
                REPLACE_LINEAGE,
                2,
                self.keys.shard(index),
                self.keys.lineages,
                _incarnation_text(incarnation),
                str(index),
                str(known or ""),
                str(lineage),
            )
        return bool(done)

    # -- plans

    def decide_plan(self, entry: PlanEntry, former: Plan | None, incarnation: int) -> PlanAnswer:
        """Decides a plan, if this incarnation is home and no other plan than the former one is there; may be repeated."""
        return self._put_plan(PUT_PLAN, entry, "" if former is None else former.to_json(), _incarnation_text(incarnation))

    def decide_move(self, entry: PlanEntry, former: Plan | None, incarnation: int, hold_id: int, num_shards: int) -> PlanAnswer:
        """Decides a plan as decide_plan does, if that is still allowed under a final hold of so many shards."""
        moved = [self.keys.move(hold_id), *(self.keys.shard(index) for index in range(num_shards))]
        former_text = "" if former is None else former.to_json()
        return self._put_plan(DECIDE_MOVE, entry, former_text, _incarnation_text(incarnation), moved)

    def put_plan_back(self, entry: PlanEntry) -> PlanAnswer:
        """Writes a plan, and what holds since, where Redis has lost it."""
        return self._put_plan(PUT_PLAN, entry, "", "")

    def _put_plan(
        self, script: str, entry: PlanEntry, former: str, incarnation: str, more_keys: Sequence[str] = ()
    ) -> PlanAnswer:
        names, plan = self.keys, entry.plan
        states = (names.cluster_entry, names.route_map, names.tables, names.lineages, names.marks, names.plan)
        keys = (*states, names.shard(0), *more_keys)
        with self._reaching():
            answer = self._redis.eval(
                script,
                len(keys),
                *keys,
                _cluster_text(entry.cluster.cluster_id),
                incarnation,
                former,
                plan.to_json(),
                str(plan.timeline),
                str(plan.epoch),
                entry.cluster.to_json(),
                route_map_to_json(RouteMap(plan.epoch, plan.num_shards)),
                str(len(entry.tables)),
                str(len(entry.lineages)),
                *(part for table in entry.tables for part in (table.spec.name, _schema_bytes(table))),
                *(str(number) for pair in entry.lineages.items() for number in pair),
                *(text for index, mark in entry.marks.items() for text in (str(index), mark.to_text())),
            )
        text = cast(bytes, answer).decode()
        return PlanAnswer.NOT_ALLOWED if text == "not allowed" else PlanAnswer(text)

    # -- a move to other shards

    def allow_move(self, hold_id: int, incarnations: Sequence[int]) -> None:
        """Allows to decide a plan under a final hold, until a shard goes on instead.

        Args:
            hold_id: the hold.
            incarnations: the processes that are cut, by shard; once another one has a name there is nothing to decide.
        """
        texts = [_incarnation_text(incarnation) for incarnation in incarnations]
        with self._reaching():
            self._redis.set(self.keys.move(hold_id), json.dumps(texts), ex=MOVE_ALLOWED_S)

    def end_move(self, hold_id: int) -> Plan | None:
        """Has no plan decided any more under a final hold; returns the last plan that was decided."""
        with self._reaching():
            value = cast(bytes, self._redis.eval(END_MOVE, 2, self.keys.move(hold_id), self.keys.plan))
            return Plan.from_json(value) if value else None

    # -- tables

    def publish_tables(self, tables: Sequence[common_pb2.TableInfo]) -> list[common_pb2.TableInfo]:
        """Writes schemas that are absent, and returns the entry that is there for each name, in order."""
        if not tables:
            return []
        with self._reaching(), self._redis.pipeline(transaction=False) as pipeline:
            for table in tables:
                pipeline.hsetnx(self.keys.tables, table.spec.name, _schema_bytes(table))
            pipeline.hmget(self.keys.tables, [table.spec.name for table in tables])
            values = cast("list[bytes]", pipeline.execute()[-1])
        return [common_pb2.TableInfo.FromString(value) for value in values]

    def present_tables(self, names: Sequence[str]) -> dict[str, common_pb2.TableInfo]:
        """Reads the schemas of those names that are taken."""
        with self._reaching():
            values = cast("list[bytes | None]", self._redis.hmget(self.keys.tables, list(names)))
        return {
            name: common_pb2.TableInfo.FromString(value) for name, value in zip(names, values, strict=True) if value is not None
        }

    def load_tables(self) -> list[common_pb2.TableInfo]:
        """Reads all schemas."""
        with self._reaching():
            values = cast("list[bytes]", self._redis.hvals(self.keys.tables))
        return [common_pb2.TableInfo.FromString(value) for value in values]

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()


def _schema_bytes(table: common_pb2.TableInfo) -> bytes:
    """Returns a table's entry."""
    schema = common_pb2.TableInfo(
        spec=table.spec, table_id=table.table_id, table_seed=table.table_seed, read_only=table.read_only
    )
    return schema.SerializeToString(deterministic=True)


_LOST_TEXT = '"lost": true'
"""How ShardEntry.to_json writes that a shard is LOST."""


def _incarnation_text(incarnation: int) -> str:
    """Returns how ShardEntry.to_json writes an incarnation; the comma ends the number."""
    return f'"incarnation": {incarnation},'


def _folder_text(folder: str) -> str:
    """Returns how ShardEntry.to_json writes a folder."""
    return f'"folder": {json.dumps(folder)}' if folder else ""


def _cluster_text(cluster_id: str) -> str:
    """Returns how ClusterEntry.to_json writes a cluster's id."""
    return f'"cluster_id": "{cluster_id}"'
