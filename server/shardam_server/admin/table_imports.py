"""Reads a table's file into the cluster; the command line and REST do it alike.

The file is checked as a whole before anything is written. Rows then travel as numbered changes, a block each, all shards at
once; each block is whole on each shard, the import as a whole is not: one that fails half way says what is written.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from shardam_proto.errors import CheckpointMismatch, SchemaMismatch, ShardamError, UnknownTable, make_error
from shardam_proto.limits import CLIENT_ID_BYTES, MAX_SCAN_ROWS
from shardam_proto.schema import TableSpec, check_name
from shardam_proto.table_files import TableFile, TableRows, rows_per_block
from shardam_proto.v1 import common_pb2, row_pb2, table_pb2
from shardam_server.admin.change_clients import ChangeClient, raise_with
from shardam_server.admin.shard_calls import Request, Response, Select, ShardCalls
from shardam_server.admin.table_infos import ClusterTable, find_table
from shardam_server.admin.table_writes import HOME
from shardam_server.table_words import Words

Tell = Callable[[int, int], None]
"""Is told the rows written so far, and how many there are."""


@dataclasses.dataclass(frozen=True)
class ImportTerms:
    """How a file is imported.

    Attributes:
        table: name of the table; None: the name in the file.
        overwrite: a table that has rows or steps becomes what the file says; rows that are not in it are deleted.
        weights_only: moments and steps begin anew; else they are the file's.
    """

    table: str | None = None
    overwrite: bool = False
    weights_only: bool = False


@dataclasses.dataclass(frozen=True)
class Imported:
    """A file that was read into a table.

    Attributes:
        table: the table's name.
        created: the cluster did not have it before.
        num_rows: rows written.
        num_deleted: rows that the table had and the file has not (overwrite).
        table_step: the table's step since.
        moments_reset: moments and steps were not read.
        other_seed: rows that are in no file start from other initial weights than in the exported table.
        one_moment: as in the file.
    """

    table: str
    created: bool
    num_rows: int
    num_deleted: int
    table_step: int
    moments_reset: bool
    other_seed: bool
    one_moment: bool

    def to_json(self) -> dict[str, Words]:
        """Returns it as `--json` and REST show it."""
        return dict(dataclasses.asdict(self))


def import_table(
    calls: ShardCalls, file: TableFile, terms: ImportTerms, request_id: int, tell: Tell = lambda done, total: None
) -> Imported:
    """Writes the rows of a file into a table, which is created if there is none of that name.

    Raises:
        SchemaMismatch: the table has another schema than the file's.
        CheckpointMismatch: the table has rows or steps, and overwrite is not set; or it is at another step than the file's.
        ShardamError: the file breaks a rule of tables (nothing is written), or a shard refused or did not answer (the message
            says how many rows are written).
    """
    spec = file.spec if terms.table is None else dataclasses.replace(file.spec, name=check_name(terms.table))
    row_ids = file.check_rows()
    present = _find(calls, spec.name, request_id)
    if present is not None:
        _check_present(present, file, spec, terms)
    info = _create(calls, spec, file.info.table_seed, request_id)
    changes = _BlockChanges(calls, info, request_id)
    table_step = None if terms.weights_only else file.info.table_step
    changes.assign(_EMPTY, table_step)  # sets the step of a table without rows, too; and a shard that refuses it does so here
    num_deleted = changes.delete_others(row_ids) if present is not None and present.num_rows else 0
    done = 0
    for rows in file.blocks():
        try:
            changes.assign(_without_moments(rows) if terms.weights_only else rows, table_step)
        except ShardamError as error:
            message = (
                f"{error.message}; {done} of {file.num_rows} rows of table {spec.name!r} are written, import it again with "
                "overwrite to write all of them"
            )
            raise make_error(error.reason, message, error.metadata) from error
        done += len(rows.row_ids)
        tell(done, file.num_rows)
    return Imported(
        table=spec.name,
        created=present is None,
        num_rows=done,
        num_deleted=num_deleted,
        table_step=info.table_step if table_step is None else table_step,
        moments_reset=terms.weights_only,
        other_seed=info.table_seed != file.info.table_seed,
        one_moment=file.info.one_moment,
    )


def _find(calls: ShardCalls, name: str, request_id: int) -> ClusterTable | None:
    try:
        return find_table(calls, name, request_id)
    except UnknownTable:
        return None


def _create(calls: ShardCalls, spec: TableSpec, table_seed: int, request_id: int) -> common_pb2.TableInfo:
    """Creates the table, or finds it; one that is made takes over the file's seed, so that its untouched rows start alike."""
    request = table_pb2.CreateTablesRequest(specs=[spec.to_proto()], table_seeds={spec.name: table_seed})
    return calls.call(HOME, lambda stubs: stubs.tables.CreateTables, request, request_id).tables[0]


def _check_present(present: ClusterTable, file: TableFile, spec: TableSpec, terms: ImportTerms) -> None:
    if present.spec != spec:
        fields = [field.name for field in dataclasses.fields(TableSpec)]
        differing = [name for name in fields if getattr(present.spec, name) != getattr(spec, name)]
        described = "; ".join(
            f"{name} is {getattr(spec, name)!r} in the file and {getattr(present.spec, name)!r} in the cluster"
            for name in differing
        )
        raise SchemaMismatch(
            f"the file does not fit the cluster's table {spec.name!r}: {described}; import it under another name",
            metadata={"table": spec.name},
        )
    step, num_rows = present.table_step, sum(info.num_rows for info in present.by_shard.values())
    if (num_rows or step) and not terms.overwrite:
        raise CheckpointMismatch(
            f"table {spec.name!r} has {num_rows} rows and step {step}, which the file would replace; import with overwrite, or "
            "under another name",
            metadata={"table": spec.name, "num_rows": str(num_rows), "table_step": str(step)},
        )
    if not terms.weights_only and step not in (0, file.info.table_step):
        raise CheckpointMismatch(
            f"table {spec.name!r} has taken {step} steps and the file has step {file.info.table_step}: moments go with their "
            "step, and a table's step is only set where it is 0; import under another name, or weights only",
            metadata={"table": spec.name, "table_step": str(step), "file_step": str(file.info.table_step)},
        )


_EMPTY = TableRows(
    np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.uint32)
)


def _without_moments(rows: TableRows) -> TableRows:
    zeros = np.zeros_like(rows.weight)
    row_steps = None if rows.row_steps is None else np.zeros_like(rows.row_steps)
    return dataclasses.replace(rows, exp_avg=zeros, exp_avg_sq=zeros, row_steps=row_steps)


class _BlockChanges:
    """Changes of many rows of one table, each the one change of a client of its own."""

    def __init__(self, calls: ShardCalls, info: common_pb2.TableInfo, request_id: int) -> None:
        self._calls = calls
        self._info = info
        self._request_id = request_id

    def assign(self, rows: TableRows, table_step: int | None) -> None:
        """Writes rows on the shards that own them, and sets the table's step on all.

        Raises:
            ShardamError: a shard refused or did not answer.
        """
        parts = {shard: self._part(rows, positions, table_step) for shard, positions in self._positions(rows.row_ids).items()}
        self._run(parts, lambda stubs: stubs.rows.AssignRows)

    def delete_others(self, kept: npt.NDArray[np.int64]) -> int:
        """Deletes the rows whose ids are not among the given ones; returns how many.

        Raises:
            ShardamError: a shard refused or did not answer.
        """
        num_deleted = 0
        for page in self._pages_of_ids():
            others = page[~np.isin(page, kept)]
            if others.size:
                parts = {
                    shard: row_pb2.DeleteRowsRequest(
                        table_id=self._info.table_id, row_ids=others[positions].astype("<i8").tobytes()
                    )
                    for shard, positions in self._positions(others).items()
                }
                answers = self._run(parts, lambda stubs: stubs.rows.DeleteRows)
                num_deleted += sum(answer.num_deleted for answer in answers.values())
        return num_deleted

    def _pages_of_ids(self) -> Iterator[npt.NDArray[np.int64]]:
        dim = self._info.spec.dim
        for shard in range(self._calls.reader.formed().route_map.num_shards):
            key: int | None = 0
            while key is not None:
                request = row_pb2.ScanRowsRequest(
                    table_id=self._info.table_id, from_key=key, max_rows=min(rows_per_block(dim), MAX_SCAN_ROWS)
                )
                answer = self._calls.call(shard, lambda stubs: stubs.rows.ScanRows, request, self._request_id)
                yield np.frombuffer(answer.rows.row_ids, "<i8").astype(np.int64)
                key = answer.next_key if answer.HasField("next_key") else None

    def _positions(self, row_ids: npt.NDArray[np.int64]) -> dict[int, npt.NDArray[np.intp]]:
        """Returns for every shard, also one without any, where its ids stand."""
        route_map = self._calls.reader.formed().route_map
        owners = route_map.shards_of(row_ids)
        return {shard: np.flatnonzero(owners == shard) for shard in range(route_map.num_shards)}

    def _run(self, parts: Mapping[int, Request], select: Select[Request, Response]) -> dict[int, Response]:
        route_map = self._calls.reader.formed().route_map
        client = ChangeClient(self._calls, route_map, secrets.token_bytes(CLIENT_ID_BYTES), self._request_id)
        try:
            client.open()
            delivery = client.deliver(parts, select, time.monotonic() + self._calls.timeout_s)
            if delivery.unknown:
                raise_with(delivery.unknown[min(delivery.unknown)], "whether all of the block was changed is not known")
            if delivery.refusals:
                client.close_number(delivery.refusals, applied_elsewhere=bool(delivery.answers))
                raise delivery.refusals[min(delivery.refusals)]
            return delivery.answers
        finally:
            client.leave()

    def _part(self, rows: TableRows, positions: npt.NDArray[np.intp], table_step: int | None) -> row_pb2.AssignRowsRequest:
        part = row_pb2.AssignRowsRequest(
            table_id=self._info.table_id,
            table_step=table_step,
            row_ids=rows.row_ids[positions].astype("<i8").tobytes(),
            weight=_floats(rows.weight[positions]),
        )
        part.exp_avg = _floats(rows.exp_avg[positions])
        part.exp_avg_sq = _floats(rows.exp_avg_sq[positions])
        if self._info.spec.step_mode == common_pb2.STEP_MODE_ROW and rows.row_steps is not None:
            part.row_steps = rows.row_steps[positions].astype("<u4").tobytes()
        return part


def _floats(values: npt.NDArray[np.float32]) -> bytes:
    return values.astype("<f4", copy=False).tobytes()
