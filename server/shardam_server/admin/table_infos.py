"""Tables as the whole cluster sees them: what each shard says of a table, put together."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from shardam_proto.errors import ShardamError, UnknownTable
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec, check_name
from shardam_proto.v1 import common_pb2, table_pb2
from shardam_server.admin.encoding import Json
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.table_words import options_to_json, spec_to_json

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_MOMENT_BYTES = 4  # moments are float32 whatever the weights are


@dataclasses.dataclass(frozen=True)
class ClusterTable:
    """A table over all shards.

    Attributes:
        spec: the schema.
        by_shard: the table as each shard that answered sees it.
        missing_shards: shards that did not answer; what is summed over shards is then unknown.
    """

    spec: TableSpec
    by_shard: dict[int, common_pb2.TableInfo]
    missing_shards: tuple[int, ...]

    @property
    def table_step(self) -> int:
        """The highest step of any shard; with pushes in flight some shards may be behind."""
        return self.latest.table_step

    @property
    def num_rows(self) -> int | None:
        """Rows over all shards; None while one does not answer."""
        return self._total([info.num_rows for info in self.by_shard.values()])

    @property
    def latest(self) -> common_pb2.TableInfo:
        """The table as the shard sees it that has stepped most."""
        return max(self.by_shard.values(), key=lambda info: info.table_step)

    def to_json(self) -> Json:
        """Returns the table as /v1/tables shows it."""
        infos = self.by_shard.values()
        latest, num_rows = self.latest, self.num_rows
        moments = None if num_rows is None else num_rows * self.spec.dim * _MOMENT_BYTES
        return {
            "name": self.spec.name,
            "table_id": str(latest.table_id),
            "table_seed": str(latest.table_seed),
            "spec": spec_to_json(self.spec),
            "table_step": self.table_step,
            "num_rows": num_rows,
            "memory": {
                "weight_bytes": None if num_rows is None else num_rows * self.spec.dim * _ITEM_BYTES[self.spec.dtype],
                "exp_avg_bytes": moments,
                "exp_avg_sq_bytes": moments,
                "record_bytes": self._total([info.record_bytes for info in infos]),
                "index_bytes": self._total([info.index_bytes for info in infos]),
            },
            "last_options": options_to_json(latest.last_options) if latest.HasField("last_options") else None,
            "saturated_values": self._total([info.saturated_values for info in infos]),
            "nonfinite_pushes": self._total([info.nonfinite_pushes for info in infos]),
            "read_only": any(info.read_only for info in infos),
            "shards": [_shard_to_json(shard, info) for shard, info in sorted(self.by_shard.items())],
            "missing_shards": list(self.missing_shards),
        }

    def _total(self, counts: Sequence[int]) -> int | None:
        return None if self.missing_shards else sum(counts)


def _shard_to_json(shard: int, info: common_pb2.TableInfo) -> Json:
    return {
        "shard": shard,
        "table_step": info.table_step,
        "num_rows": info.num_rows,
        "record_bytes": info.record_bytes,
        "index_bytes": info.index_bytes,
        "saturated_values": info.saturated_values,
        "nonfinite_pushes": info.nonfinite_pushes,
    }


def list_tables(calls: ShardCalls, after_name: str, page_size: int, request_id: int) -> tuple[list[ClusterTable], str]:
    """Returns a page of tables by name, and the name after which the next page starts ("" after the last page).

    Raises:
        ShardamError: no shard answered; the first shard's reason.
    """
    answers = _list_on_all(calls, table_pb2.ListTablesRequest(page_size=page_size, after_name=after_name), request_id)
    first = answers.reached[min(answers.reached)]
    tables = [_merge(info, answers) for info in first.tables]
    return tables, first.next_after_name


def find_table(calls: ShardCalls, name: str, request_id: int) -> ClusterTable:
    """Returns one table.

    Raises:
        BadOption: the name is outside the alphabet, so no table can have it.
        UnknownTable: no shard that answered has it.
        ShardamError: no shard answered; the first shard's reason.
    """
    check_name(name)
    answers = _list_on_all(calls, table_pb2.ListTablesRequest(names=[name]), request_id)
    for _, answer in sorted(answers.reached.items()):
        for info in answer.tables:
            return _merge(info, answers)
    raise unknown_table(name)


def find_infos(calls: ShardCalls, names: Sequence[str], shard: int, request_id: int) -> list[common_pb2.TableInfo]:
    """Returns tables as one shard sees them: their ids and dims are the same on all.

    Args:
        calls: reaches the shards.
        names: names of tables, at least one.
        shard: the shard to ask.
        request_id: for the shard's log.

    Raises:
        BadOption: a name is outside the alphabet, so no table can have it.
        UnknownTable: the shard does not have a table.
        ShardamError: the shard did not answer.
    """
    for name in names:
        check_name(name)
    request = table_pb2.ListTablesRequest(names=names)
    return list(calls.call(shard, lambda stubs: stubs.tables.ListTables, request, request_id).tables)


def find_info(calls: ShardCalls, name: str, shard: int, request_id: int) -> common_pb2.TableInfo:
    """Returns one table as one shard sees it; as find_infos."""
    return find_infos(calls, [name], shard, request_id)[0]


def unknown_table(name: str) -> UnknownTable:
    """Returns the error for a table that does not exist."""
    return UnknownTable(
        f"table {name!r} does not exist; GET /v1/tables lists the tables, POST /v1/tables creates one", metadata={"table": name}
    )


@dataclasses.dataclass(frozen=True)
class _Answers:
    reached: dict[int, table_pb2.ListTablesResponse]
    by_table_id: dict[int, dict[int, common_pb2.TableInfo]]
    missing: tuple[int, ...]


def _list_on_all(calls: ShardCalls, request: table_pb2.ListTablesRequest, request_id: int) -> _Answers:
    return calls.by_route_map(lambda route_map: _list(calls, request, request_id, route_map))


def _list(calls: ShardCalls, request: table_pb2.ListTablesRequest, request_id: int, route_map: RouteMap) -> _Answers:
    requests = {}
    for shard in range(route_map.num_shards):
        requests[shard] = table_pb2.ListTablesRequest()
        requests[shard].CopyFrom(request)  # each shard's header may differ
    outcomes = calls.call_many(requests, lambda stubs: stubs.tables.ListTables, request_id, epoch=route_map.epoch)
    reached: dict[int, table_pb2.ListTablesResponse] = {}
    errors: dict[int, ShardamError] = {}
    for shard, outcome in outcomes.items():
        if isinstance(outcome, ShardamError):
            errors[shard] = outcome
        else:
            reached[shard] = outcome
    replaced = [error for error in errors.values() if error.reason == "STALE_ROUTE"]
    if replaced:  # what other shards answered is not the whole table
        raise replaced[0]
    if not reached:
        # A reason that stays (no such table, a wrong token) says more than a shard that is away.
        raise min(errors.items(), key=lambda item: (item[1].rule.retryable, item[0]))[1]
    by_table_id: dict[int, dict[int, common_pb2.TableInfo]] = collections.defaultdict(dict)
    for shard, answer in reached.items():
        for info in answer.tables:
            by_table_id[info.table_id][shard] = info
    return _Answers(reached, by_table_id, tuple(sorted(errors)))


def _merge(info: common_pb2.TableInfo, answers: _Answers) -> ClusterTable:
    return ClusterTable(TableSpec.from_proto(info.spec), answers.by_table_id[info.table_id], answers.missing)
