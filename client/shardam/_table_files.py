"""Export of a table to a file and import from one (the format is shardam_proto.table_files)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardam._arrays import check_flag
from shardam._parts import RowWrite, options_message, options_value
from shardam._table_state import check_replaceable, delete_others, moment_of, write_rows
from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import SchemaMismatch, UnknownTable
from shardam_proto.schema import TableSpec
from shardam_proto.table_file_writing import TableFileWriter
from shardam_proto.table_files import TableFile, TableFileInfo, TableRows, rows_per_block

if TYPE_CHECKING:
    from shardam.table import Table


@dataclasses.dataclass(frozen=True)
class ExportReport:
    """A table that was written to a file.

    Attributes:
        path: the file.
        num_rows: rows in it.
        size_bytes: its bytes.
        table_step: the table's step.
        one_moment: True: nothing was changed on any shard while the table was read. False: something was, perhaps in it; then
            its rows may be of different moments, and the file says so. Pause the training, or take a checkpoint.
    """

    path: Path
    num_rows: int
    size_bytes: int
    table_step: int
    one_moment: bool


@dataclasses.dataclass(frozen=True)
class ImportReport:
    """A table that was filled from a file or a state_dict.

    Attributes:
        table: its name.
        num_rows: rows written.
        num_deleted: rows that the table had and the source has not (overwrite).
        created: True: the table did not exist.
        table_step: the table's step now.
        moments: False: weights alone; moments and the rows' own steps are zero.
        same_initial_rows: True: rows that were never written start from the weights that they had in the source, too, since a
            table that is made takes over the source's seed; False: it existed, with another one.
        one_moment: as ExportReport.
        options: hyper-parameters of the source's last step; they are not set anywhere: hand them to SparseAdam. None: it says
            none.
    """

    table: str
    num_rows: int
    num_deleted: int
    created: bool
    table_step: int
    moments: bool
    same_initial_rows: bool
    one_moment: bool
    options: AdamOptions | None


class ClusterTableFiles(abc.ABC):
    """What a cluster's client does with files of tables: a part of Cluster."""

    @abc.abstractmethod
    def table(self, name: str) -> Table:
        """Returns a table, or raises UnknownTable."""

    @abc.abstractmethod
    def _create_tables(self, specs: Sequence[TableSpec], seeds: Mapping[str, int]) -> list[Table]:
        """Creates tables; one that is made now has the seed given by its name."""

    def import_table(
        self, path: str | Path, table: str | None = None, *, overwrite: bool = False, weights_only: bool = False
    ) -> ImportReport:
        """Fills a table from a file that Table.export wrote; it is created with the file's schema if it does not exist.

        The whole file is checked before anything is written. An import that breaks off leaves a part of the rows; it can be
        repeated with overwrite. The table must not be trained meanwhile: a step in between is noticed, and refused.

        Args:
            path: ends in .safetensors or .npz.
            table: its name here; None: the name that it had.
            overwrite: a table with rows or steps becomes what the file says; rows that are not in it are deleted.
            weights_only: moments and the rows' steps are zero, and the table's step stays.

        Raises:
            BadOption, VersionMismatch, CheckpointDamaged, WrongShape, NonFiniteState, IdOutOfRange: the file, with the reason.
            SchemaMismatch: the table exists with another schema; the message shows both values of what differs.
            CheckpointMismatch: the table has rows or steps and overwrite is False, or has another step than the file and
                weights_only is False.
        """
        check_flag(overwrite, "import_table: overwrite")
        check_flag(weights_only, "import_table: weights_only")
        return _import_table(self, path, table, overwrite=overwrite, weights_only=weights_only)


def export_table(table: Table, path: str | Path) -> ExportReport:
    """Writes a table to a file; see Table.export."""
    before = moment_of(table)
    with TableFileWriter(path, table.spec) as writer:
        for rows in table.scan(batch_size=min(10_000, rows_per_block(table.dim))):
            steps = rows.step.astype(np.uint32) if table.spec.step == "row" else None
            writer.add(TableRows(rows.row_ids, rows.weight, rows.exp_avg, rows.exp_avg_sq, steps))
        options = table.stats().last_options
        after = moment_of(table)
        one_moment = before == after and after.steps_agree
        info = TableFileInfo(
            table.spec,
            after.table_step,
            table.info().table_seed,
            None if options is None else options_message(options, 1.0),
            one_moment,
        )
        num_rows = writer.finish(info)
    return ExportReport(Path(path), num_rows, Path(path).stat().st_size, after.table_step, one_moment)


def _import_table(
    cluster: ClusterTableFiles, path: str | Path, name: str | None, *, overwrite: bool, weights_only: bool
) -> ImportReport:
    """Fills a table from a file; see ClusterTableFiles.import_table."""
    file = TableFile(path)
    spec = file.spec if name is None else dataclasses.replace(file.spec, name=name)
    ids = file.check_rows()
    step = None if weights_only else file.info.table_step
    table = _existing(cluster, spec, file.path)
    created = table is None
    num_deleted = 0
    if table is None:
        table = cluster._create_tables([spec], {spec.name: file.info.table_seed})[0]
    else:
        stats = check_replaceable(table, step, overwrite=overwrite, source=str(file.path))
        if stats.num_rows:
            num_deleted = delete_others(table, ids)
    num_rows = write_rows(table, _step_alone(spec, step))  # first of all: a shard that refuses the step refuses it here
    for rows in file.blocks():
        num_rows += write_rows(table, _as_write(rows, weights_only=weights_only, table_step=step))
    return ImportReport(
        table=table.name,
        num_rows=num_rows,
        num_deleted=num_deleted,
        created=created,
        table_step=table.stats().table_step,
        moments=not weights_only,
        same_initial_rows=table.info().table_seed == file.info.table_seed,
        one_moment=file.info.one_moment,
        options=None if file.info.last_options is None else options_value(file.info.last_options),
    )


def _existing(cluster: ClusterTableFiles, spec: TableSpec, path: Path) -> Table | None:
    """Returns the table that a file shall go into, if there is one.

    Raises:
        SchemaMismatch: it has another schema than the file's.
    """
    try:
        table = cluster.table(spec.name)
    except UnknownTable:
        return None
    if table.spec != spec:
        fields = [field.name for field in dataclasses.fields(TableSpec)]
        differing = [name for name in fields if getattr(table.spec, name) != getattr(spec, name)]
        described = "; ".join(
            f"{name} is {getattr(spec, name)!r} in the file and {getattr(table.spec, name)!r} in the cluster"
            for name in differing
        )
        raise SchemaMismatch(
            f"table {spec.name!r} of {path} does not fit the cluster's table of this name: {described}; import it under "
            "another name (table=...); nothing was changed",
            metadata={"table": spec.name, "file": str(path)},
        )
    return table


def _step_alone(spec: TableSpec, table_step: int | None) -> RowWrite:
    nothing = np.empty((0, spec.dim), np.float32)
    return RowWrite(np.empty(0, np.int64), nothing, nothing, nothing, table_step=table_step)


def _as_write(rows: TableRows, *, weights_only: bool, table_step: int | None) -> RowWrite:
    if weights_only:
        zeros = np.zeros_like(rows.weight)
        steps = None if rows.row_steps is None else np.zeros_like(rows.row_steps)
        return RowWrite(rows.row_ids, rows.weight, zeros, zeros, row_steps=steps)
    return RowWrite(rows.row_ids, rows.weight, rows.exp_avg, rows.exp_avg_sq, row_steps=rows.row_steps, table_step=table_step)
