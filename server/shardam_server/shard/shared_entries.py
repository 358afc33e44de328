"""What all shards of a cluster share in Redis, as values."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

from shardam_proto.registry import ClusterEntry, Plan
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2
from shardam_server.shard.known_lineages import HighMark


@dataclasses.dataclass(frozen=True)
class PlanEntry:
    """A plan, and what holds in Redis from there on.

    Attributes:
        plan: the plan.
        cluster: the cluster's entry.
        tables: schemas of all tables.
        lineages: lineages of those that have taken it over, by shard.
        marks: their high marks.
    """

    plan: Plan
    cluster: ClusterEntry
    tables: Sequence[common_pb2.TableInfo]
    lineages: Mapping[int, int] = dataclasses.field(default_factory=dict)
    marks: Mapping[int, HighMark] = dataclasses.field(default_factory=dict)


class PlanAnswer(enum.Enum):
    """What became of a plan that was to be written."""

    DONE = "done"
    OTHER_CLUSTER = "other cluster"
    NAME_NOT_HELD = "name not held"
    OTHER_PLAN = "other plan"
    NOT_ALLOWED = "a shard that was cut has gone on or was replaced"


@dataclasses.dataclass(frozen=True)
class Shared:
    """What all shards of a cluster share in Redis.

    Attributes:
        cluster: the cluster's entry, if any.
        route_map: the route map, if any.
        lineages: lineage by shard.
        num_tables: number of table schemas.
        marks: the highest change that a shard's folder is known to have held, by shard.
        plan: the last plan, if any.
    """

    cluster: ClusterEntry | None
    route_map: RouteMap | None
    lineages: dict[int, int]
    num_tables: int
    marks: dict[int, HighMark]
    plan: Plan | None = None
