"""A table of a cluster: pull, push, and rows with their optimizer state, in NumPy; no torch needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardam._arrays import Float32s, Int64s, Values, as_flat_row_ids, as_rows, check_bounds, check_flag, check_rows_shape, some
from shardam._parts import RowWrite, assign_change, delete_change
from shardam._push_checks import as_gradient, check_options, merged_gradient
from shardam._reads import PendingRead, read_weights_later
from shardam._row_reads import read_rows, scan_rows
from shardam._table_files import ExportReport, export_table
from shardam._values import PushResult, Rows, TableInfo, TableStats
from shardam_kernels.factors import AdamOptions
from shardam_kernels.native import distinct_ids
from shardam_proto.errors import BadOption, NonFiniteState, SchemaMismatch, WrongShape
from shardam_proto.limits import MAX_SCAN_ROWS
from shardam_proto.schema import TableSpec

if TYPE_CHECKING:
    from shardam.cluster import Cluster

__all__ = ["PendingPull", "PushResult", "Rows", "Table", "TableInfo", "TableStats"]


class PendingPull:
    """A pull that is under way; made by Table.pull_async."""

    def __init__(self, read: PendingRead, places: Int64s | None) -> None:
        self._read = read
        self._places = places

    def result(self) -> Float32s:
        """Waits for the rows; what it raises pull would.

        Returns:
            float32 [N, dim] in the order of the ids; private and writable. A second call returns the same rows.
        """
        (rows,) = self._read.result()
        return rows if self._places is None else np.take(rows, self._places, axis=0)  # half the time of an index


class Table:
    """One table; made by Cluster.table or Cluster.create_table. Thread-safe.

    Ids are any integers that fit int64, as an array, a CPU tensor or a list, of shape [N]; other dtypes raise WrongIdDtype,
    ids outside a bounded table IdOutOfRange. Every read first waits for this client's queued pushes; in a sync group only until
    every shard has its part of the step, since no read waits for other ranks, while a change of rows waits until the step that
    was pushed before it is decided. Every call raises ShardUnreachable when a shard does not answer within shard_timeout_s,
    ShardLost once a shard has lost its rows, NotAMember once this worker was dropped from its group, and ClientClosed after
    close.

    A pickle carries the cluster's address and the table's schema; where it is opened, the table is found by its name when it is
    first used. Copies are the same table.
    """

    def __init__(self, cluster: Cluster, info: TableInfo | TableSpec) -> None:
        self._cluster = cluster
        self._spec = info if isinstance(info, TableSpec) else info.spec
        self._found = None if isinstance(info, TableSpec) else info
        self._found_after = cluster._restores

    @property
    def name(self) -> str:
        """The table's name."""
        return self._spec.name

    @property
    def spec(self) -> TableSpec:
        """The table's schema."""
        return self._spec

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self._spec.dim

    @property
    def cluster(self) -> Cluster:
        """The cluster that holds it."""
        return self._cluster

    def info(self) -> TableInfo:
        """Returns schema, id and seed.

        Raises:
            UnknownTable: this table came out of a pickle, or the cluster was restored, and the cluster has none of its name.
            SchemaMismatch: likewise, and the cluster's table has another schema.
        """
        restores = self._cluster._restores
        if self._found is None or self._found_after != restores:
            found = self._cluster.table(self.name).info()
            if found.spec != self._spec:
                raise SchemaMismatch(
                    f"table {self.name!r} was {self._spec} for this object and is {found.spec} in the cluster now",
                    metadata={"table": self.name},
                )
            self._found, self._found_after = found, restores
        return self._found

    def stats(self) -> TableStats:
        """Returns step, rows and bytes over all shards."""
        return self._cluster._table_stats(self.info())

    def pull(self, row_ids: Values) -> Float32s:
        """Reads weights and creates nothing: a row never pushed reads as it would start.

        A pull larger than a message is several reads, each of one moment of its shard.

        Args:
            row_ids: ids [N], duplicates allowed; N may be 0.

        Returns:
            float32 [N, dim] in the order of the ids; private and writable.
        """
        return self.pull_async(row_ids).result()

    def pull_async(self, row_ids: Values) -> PendingPull:
        """Asks for weights as pull does, and does not wait for them: several may be under way, and their order is kept.

        Args:
            row_ids: as for pull.
        """
        ids = self._ids(row_ids)
        session = self._cluster._ready_to_read()
        with session.timings.measured("unique"):
            distinct, places, _ = distinct_ids(ids, session.route_map.num_shards)
        read = read_weights_later(session, [(self.info(), distinct)])
        in_order = distinct.size == ids.size and session.route_map.num_shards == 1
        return PendingPull(read, None if in_order else places)

    def push(self, row_ids: Values, gradients: Values, options: AdamOptions, *, grad_scale: float = 1.0) -> PushResult:
        """Makes one optimizer step of this table and waits until every shard has applied it.

        In a sync group it is this rank's contribution to a step and waits for those of the others. One that is refused, by a
        shard or here for its values or size, is refused for all ranks, and the next push is for the next step.

        Gradients of an id that is named several times are summed, left to right in float32. Rows not named do not change.
        No ids are a step, too: t advances and nothing else changes.

        Args:
            row_ids: ids [N].
            gradients: [N, dim], float32, float16 or bfloat16; with N = 0 also [0] or [0, 0].
            options: hyper-parameters of this step.
            grad_scale: loss scale by which the gradients were multiplied; the shard divides the sum by it.

        Raises:
            WrongShape: shapes that do not fit each other; the message has both.
            BadOption: a hyper-parameter out of range, or gradients of another dtype.
            NonFiniteGradient: a merged, unscaled value is NaN or at least 2**64; nothing was sent.
            MessageTooLarge: a shard's part is above 512 MiB; nothing was sent.
            RowLimit: the table or a shard is full; the message has each shard's outcome.
            NotAMember: this client was dropped from its group; or it is in none, and a sync group trains.
            ShardamError: in a sync group, why the step was refused for all ranks (GroupMismatch, StepTimeout and others).
        """
        check_options(options, grad_scale, self.name)
        ids, rows = as_gradient(self.info(), row_ids, gradients)
        with self._cluster._refusing_step():
            step = merged_gradient(self.info(), ids, rows, options, grad_scale)
        return self._cluster._push_now(step)

    def rows(self, row_ids: Values) -> Rows:
        """Reads rows with their moments and step, and creates nothing.

        Args:
            row_ids: ids [N], duplicates allowed.
        """
        ids = self._ids(row_ids)
        return read_rows(self._cluster._ready_to_read(), self.info(), ids)

    def assign(
        self,
        row_ids: Values,
        weight: Values,
        *,
        exp_avg: Values | None = None,
        exp_avg_sq: Values | None = None,
        if_absent: bool = False,
    ) -> int:
        """Writes rows as they are, the padding row too; no step is counted.

        Args:
            row_ids: ids [N], each once.
            weight: [N, dim], float32, float16 or bfloat16, finite.
            exp_avg: as weight. None: an old row keeps its own, a new one gets zero.
            exp_avg_sq: as exp_avg, not negative.
            if_absent: True: rows that exist are left as they are.

        Returns:
            How many rows were written.

        Raises:
            WrongShape: shapes that do not fit, or an id named twice.
            BadOption: if_absent is no bool, or values are of another dtype.
            NonFiniteState: a value is not finite, or exp_avg_sq is negative; nothing was sent.
            MessageTooLarge: a shard's part is above 64 MiB; nothing was sent.
            RowLimit: the table or a shard is full.
        """
        check_flag(if_absent, f"table {self.name!r}: if_absent")
        ids = self._ids(row_ids)
        distinct, counts = np.unique(ids, return_counts=True)
        if distinct.size != ids.size:
            raise WrongShape(f"table {self.name!r}: ids {some(distinct[counts > 1])} are named twice; name each id once")
        write = RowWrite(
            ids,
            self._state(ids, weight, "weight"),
            None if exp_avg is None else self._state(ids, exp_avg, "exp_avg"),
            None if exp_avg_sq is None else self._state(ids, exp_avg_sq, "exp_avg_sq"),
            if_absent,
        )
        session, pusher = self._cluster._ready_to_write()
        change = assign_change(self.name, self.info().table_id, write, session.route_map)
        pusher.run(change)
        return sum(answer.num_assigned for answer in change.answers.values())

    def delete(self, row_ids: Values) -> int:
        """Deletes rows; one that comes back starts anew, with its initial weight and zero moments.

        Args:
            row_ids: ids [N]; those that do not exist are passed over.

        Returns:
            How many rows existed.
        """
        ids = np.unique(self._ids(row_ids))
        session, pusher = self._cluster._ready_to_write()
        change = delete_change(self.name, self.info().table_id, ids, session.route_map)
        pusher.run(change)
        return sum(answer.num_deleted for answer in change.answers.values())

    def scan(self, *, batch_size: int = 10_000) -> Iterator[Rows]:
        """Reads all existing rows in the shards' own order; a row that exists throughout appears exactly once.

        Args:
            batch_size: rows of one batch at most, 1 to 100,000; wide rows come in smaller batches.

        Raises:
            BadOption: batch_size is out of range.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or not 1 <= batch_size <= MAX_SCAN_ROWS:
            raise BadOption(f"batch_size must be an integer from 1 to {MAX_SCAN_ROWS}, got {batch_size!r}")
        return scan_rows(self._cluster._ready_to_read(), self.info(), batch_size)

    def export(self, path: str | Path) -> ExportReport:
        """Writes all rows with their moments and steps to one file, which Cluster.import_table and other programs read.

        Arrays: ids int64 [N], sorted; weight, exp_avg, exp_avg_sq float32 [N, dim]; row_steps uint32 [N] where rows count their
        own. Beside them schema, seed, step and last hyper-parameters. Rows are read a page at a time while others may push;
        the report and the file say whether all are of one moment. Takes about 28 bytes of memory a row, and disk for twice the
        file in its folder.

        Args:
            path: ends in .safetensors or .npz; replaced in one moment if it exists.

        Raises:
            BadOption: another suffix, a folder that is not there or cannot be written, or a full disk; the former file is as it
                was.
        """
        return export_table(self, path)

    def _ids(self, row_ids: Values) -> Int64s:
        ids = as_flat_row_ids(row_ids)
        check_bounds(ids, self.spec.num_embeddings, self.name)
        return ids

    def _state(self, ids: Int64s, values: Values, what: str) -> Float32s:
        rows = check_rows_shape(ids, as_rows(values, what), self.dim, what)
        bad = ~np.isfinite(rows).all(axis=1)
        rule = "finite"
        if what == "exp_avg_sq":
            bad |= (rows < 0).any(axis=1)
            rule = "finite and not negative"
        if bad.any():
            raise NonFiniteState(
                f"table {self.name!r}: {what} must be {rule}; it is not for ids {some(ids[bad])}; nothing was sent",
                metadata={"table": self.name, "row_ids": some(ids[bad]), "column": what},
            )
        return rows

    def __repr__(self) -> str:
        return f"Table({self.spec!r})"

    def __reduce__(self) -> tuple[type[Table], tuple[Cluster, TableSpec]]:
        return type(self), (self._cluster, self._spec)

    def __copy__(self) -> Table:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Table:
        return self
