"""Reads a table's file into the cluster; the command line and REST do it alike.

The file is checked as a whole before anything is written. Rows then travel as numbered changes, a block each, all shards at
once; each block is whole on each shard, the import as a whole is not: one that fails half way says what is written.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from shardam_proto.errors import BadOption, ShardamError, UnknownTable, make_error
from shardam_proto.limits import CLIENT_ID_BYTES
from shardam_proto.schema import TableSpec, check_name
from shardam_proto.table_files import TableFile, TableRows
from shardam_proto.v1 import common_pb2, row_pb2
from shardam_server.admin.change_clients import ChangeClient, raise_with
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.admin.table_infos import ClusterTable, find_table
from shardam_server.admin.table_writes import create_table
from shardam_server.table_words import Words

Tell = Callable[[int, int], None]
"""Is told the rows written so far, and how many there are."""


@dataclasses.dataclass(frozen=True)
class ImportTerms:
    """How a file is imported.

    Attributes:
        table: name of the table; None: the name in the file.
        overwrite: write into a table that has rows: those with an id of the file are replaced, others stay.
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
        table_step: the table's step since.
        moments_reset: moments and steps were not read.
        other_seed: rows that are in no file start from other initial weights than in the exported table.
        one_moment: as in the file.
    """

    table: str
    created: bool
    num_rows: int
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
        BadOption: the table has rows, and overwrite is not set; or it is at another step than the file's.
        ShardamError: the file breaks a rule of tables (nothing is written), or a shard refused or did not answer (the message
            says how many rows are written).
    """
    spec = file.spec if terms.table is None else dataclasses.replace(file.spec, name=check_name(terms.table))
    file.check_rows()
    present = _find(calls, spec.name, request_id)
    if present is not None:
        _check_present(present, file, spec, terms)
    table = create_table(calls, spec, None, request_id).table
    info = next(iter(table.by_shard.values()))
    writer = _Writer(calls, info, None if terms.weights_only else file.info.table_step, request_id)
    writer.write(_EMPTY)  # sets the step of a table without rows, too; and shows what shards refuse before the first row
    done = 0
    for rows in file.blocks():
        try:
            writer.write(_without_moments(rows) if terms.weights_only else rows)
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
        table_step=info.table_step if terms.weights_only else file.info.table_step,
        moments_reset=terms.weights_only,
        other_seed=info.table_seed != file.info.table_seed,
        one_moment=file.info.one_moment,
    )


def _find(calls: ShardCalls, name: str, request_id: int) -> ClusterTable | None:
    try:
        return find_table(calls, name, request_id)
    except UnknownTable:
        return None


def _check_present(present: ClusterTable, file: TableFile, spec: TableSpec, terms: ImportTerms) -> None:
    num_rows = sum(info.num_rows for info in present.by_shard.values())
    if present.spec == spec and num_rows and not terms.overwrite:
        raise BadOption(
            f"table {spec.name!r} has {num_rows} rows already; import with overwrite to replace those with an id of the file, "
            "or under another name",
            metadata={"table": spec.name, "num_rows": str(num_rows)},
        )
    if not terms.weights_only and present.table_step not in (0, file.info.table_step):
        raise BadOption(
            f"table {spec.name!r} is at step {present.table_step}, the file at step {file.info.table_step}, and moments of the "
            "one step are wrong at the other: import weights only, or under another name",
            metadata={"table": spec.name, "table_step": str(present.table_step), "file_step": str(file.info.table_step)},
        )


_EMPTY = TableRows(
    np.empty(0, np.int64), np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.float32), np.empty(0, np.uint32)
)


def _without_moments(rows: TableRows) -> TableRows:
    zeros = np.zeros_like(rows.weight)
    row_steps = None if rows.row_steps is None else np.zeros_like(rows.row_steps)
    return dataclasses.replace(rows, exp_avg=zeros, exp_avg_sq=zeros, row_steps=row_steps)


class _Writer:
    """Writes blocks of rows, each as the one change of a client of its own."""

    def __init__(self, calls: ShardCalls, info: common_pb2.TableInfo, table_step: int | None, request_id: int) -> None:
        self._calls = calls
        self._info = info
        self._table_step = table_step
        self._request_id = request_id

    def write(self, rows: TableRows) -> None:
        """Writes rows on the shards that own them.

        Raises:
            ShardamError: a shard refused or did not answer.
        """
        route_map = self._calls.reader.formed().route_map
        owners = route_map.shards_of(rows.row_ids)
        parts = {shard: self._part(rows, np.flatnonzero(owners == shard)) for shard in range(route_map.num_shards)}
        client = ChangeClient(self._calls, parts, secrets.token_bytes(CLIENT_ID_BYTES), self._request_id)
        try:
            client.open()
            deadline = time.monotonic() + self._calls.timeout_s
            delivery = client.deliver(parts, lambda stubs: stubs.rows.AssignRows, deadline)
            if delivery.unknown:
                raise_with(delivery.unknown[min(delivery.unknown)], "whether all of the block was written is not known")
            if delivery.refusals:
                client.close_number(delivery.refusals, applied_elsewhere=bool(delivery.answers))
                raise delivery.refusals[min(delivery.refusals)]
        finally:
            client.leave()

    def _part(self, rows: TableRows, positions: npt.NDArray[np.intp]) -> row_pb2.AssignRowsRequest:
        part = row_pb2.AssignRowsRequest(
            table_id=self._info.table_id,
            table_step=self._table_step,
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
