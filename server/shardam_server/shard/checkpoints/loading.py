"""Puts one shard's share of a checkpoint into its state, whatever the number of shards that wrote it.

One record is in memory at a time. The state's tables appear once all of them are loaded, so that a failure leaves it as it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from shardam_proto.errors import CheckpointMismatch, OutOfMemory, ShardamError
from shardam_proto.registry import Plan
from shardam_proto.routing import buckets_of
from shardam_proto.v1 import common_pb2, journal_pb2
from shardam_server.shard.checkpoints.manifest import Manifest, StoredTable
from shardam_server.shard.checkpoints.merging import Remembered, merge_clients, merge_groups
from shardam_server.shard.checkpoints.segments import SegmentReader
from shardam_server.shard.checkpoints.shares import Segment, bucket_range, share_of, states_of
from shardam_server.shard.checkpoints.tasks import Progress
from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.groups.entries import GroupEntry
from shardam_server.shard.journal.base_file import client_entry, group_entry
from shardam_server.shard.journal.replay import ArrayReader
from shardam_server.shard.row_counters import RowCounters
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import MakeRecords
from shardam_server.shard.table import Table, table_from_info

_DEVIATIONS = 4
"""Room is made for as many standard deviations more than the average shard's rows; a shard with more grows once."""


def load(
    state: ShardState,
    manifest: Manifest,
    folder: Path,
    plan: Plan,
    index: int,
    make_records: MakeRecords,
    progress: Progress,
) -> None:
    """Loads the tables that a plan names, and its clients and groups if it keeps them.

    Args:
        state: where to; it has none of these tables, and no clients or groups if the plan keeps the checkpoint's.
        manifest: of the checkpoint.
        folder: the checkpoint's folder.
        plan: what is loaded, and for how many shards.
        index: index of this shard.
        make_records: makes an empty record store for a table.
        progress: told of the bytes that are read.

    Raises:
        CheckpointDamaged: a file is not as it was written; names it.
        CheckpointMismatch: the checkpoint lacks a table that the plan names, or the state has one of them.
        VersionMismatch: another shardam wrote a file.
        OutOfMemory: there is no room.
        Dropped: it was given up.
    """
    _Loading(manifest, folder, plan, index, progress).run(state, make_records)


class _Loading:
    def __init__(self, manifest: Manifest, folder: Path, plan: Plan, index: int, progress: Progress) -> None:
        self._manifest = manifest
        self._folder = folder
        self._plan = plan
        self._index = index
        self._progress = progress
        self._own = bucket_range(index, plan.num_shards)
        self._tables: dict[int, Table] = {}
        self._known = {table.table_id for table in manifest.tables}
        self._saturated: dict[int, int] = {}

    def run(self, state: ShardState, make_records: MakeRecords) -> None:
        plan, manifest = self._plan, self._manifest
        share = share_of(manifest, self._index, plan.num_shards)
        same_shards = plan.num_shards == manifest.num_shards
        states = list(states_of(manifest)) if plan.keep_clients and not same_shards else list(share.states)
        self._progress.total_bytes = sum(one.file.size_bytes for one in [*share.rows, *states])
        for stored in self._to_load(state):
            self._tables[stored.table_id] = self._make_table(stored, make_records)
        for segment in share.rows:
            self._read_rows(segment)
        remembered = [self._read_state(segment, counts=segment in share.states) for segment in states]
        for table_id, table in self._tables.items():
            table.storage.finish_restore(self._saturated.get(table_id, 0))
        if plan.keep_clients:
            self._keep_clients(state, remembered, same_shards=same_shards)
        state.put_tables(self._tables.values())
        state.change_number = state.loaded_change = max(state.change_number, manifest.change_number)

    def _to_load(self, state: ShardState) -> Iterable[StoredTable]:
        stored: Mapping[str, StoredTable] = {table.spec.name: table for table in self._manifest.tables}
        missing = [name for name in self._plan.load if name not in stored]
        present = [name for name in self._plan.load if state.find_table(name) is not None]
        taken = {table.table_id for table in state.tables()} & {
            stored[name].table_id for name in self._plan.load if name in stored
        }
        if missing or present or taken:
            raise CheckpointMismatch(
                f"checkpoint {self._manifest.name!r} cannot be loaded: it lacks the tables {missing}, and the shard has "
                f"{present or sorted(taken)} already; restore it again",
                metadata={"checkpoint": self._manifest.name},
            )
        return [stored[name] for name in self._plan.load]

    def _make_table(self, stored: StoredTable, make_records: MakeRecords) -> Table:
        info = common_pb2.TableInfo(
            spec=stored.spec.to_proto(),
            table_id=stored.table_id,
            table_seed=stored.table_seed,
            table_step=0 if self._plan.weights_only else stored.step,
            read_only=self._plan.makes_read_only(stored.spec.name),
        )
        table = table_from_info(info, make_records)
        table.last_options = stored.last_options
        # Rows come in the index's order, which fills a smaller index's beginning first and makes that slow.
        average = stored.num_rows / self._plan.num_shards
        spread = _DEVIATIONS * math.sqrt(average) if self._plan.num_shards > 1 else 0.0
        table.storage.reserve(min(stored.num_rows, math.ceil(average + spread)))
        return table

    # -- rows

    def _read_rows(self, segment: Segment) -> None:
        with SegmentReader(self._folder, self._manifest, segment.shard, segment.number) as reader:
            written = bucket_range(segment.shard.index, self._manifest.num_shards)
            for record, arrays in reader.records(self._progress.add):
                if not record.HasField("rows"):
                    raise reader.damaged("it holds a record that is not of rows")
                table_id = record.rows.table_id
                if table_id not in self._known:
                    raise reader.damaged(f"it has rows of table {table_id}, which the manifest does not name")
                if table_id in self._tables:
                    try:
                        self._put_rows(self._tables[table_id], record.rows, ArrayReader(arrays), written)
                    except OutOfMemory:
                        raise
                    except ShardamError as error:
                        raise reader.damaged(error.message) from error

    def _put_rows(self, table: Table, message: journal_pb2.StoredRows, arrays: ArrayReader, written: range) -> None:
        num_rows, dim = message.num_rows, table.spec.dim
        row_ids = arrays.take_ids(num_rows)
        components = {name: arrays.take_rows(num_rows, dim) for name in ("weight", "exp_avg", "exp_avg_sq")}
        row_steps = arrays.take("<u4", num_rows).astype(np.int64)
        touched_steps = arrays.take_ids(num_rows)
        change_numbers = arrays.take("<u8", num_rows).astype(np.uint64, copy=False)
        arrays.finish()
        table.check_ids(row_ids)
        if self._plan.weights_only:
            zeros = np.zeros((num_rows, dim), np.float32)
            components = {"weight": components["weight"], "exp_avg": zeros, "exp_avg_sq": zeros}
            row_steps, touched_steps = np.zeros_like(row_steps), np.zeros_like(touched_steps)
        buckets = buckets_of(row_ids)
        if num_rows and not written.start <= buckets.min() <= buckets.max() < written.stop:
            raise CheckpointMismatch("it has rows that its shard does not own")
        own = (buckets >= self._own.start) & (buckets < self._own.stop)
        if not own.all():
            row_ids, components = row_ids[own], {name: values[own] for name, values in components.items()}
            row_steps, touched_steps, change_numbers = row_steps[own], touched_steps[own], change_numbers[own]
        before = table.num_rows
        table.storage.restore(row_ids, components, RowCounters(row_steps, touched_steps, change_numbers))
        if table.num_rows != before + row_ids.size:
            raise CheckpointMismatch(f"table {table.spec.name!r} has a row twice")

    # -- counters, clients, groups

    def _read_state(self, segment: Segment, *, counts: bool) -> Remembered:
        clients: list[tuple[bytes, ClientEntry]] = []
        groups: list[GroupEntry] = []
        with SegmentReader(self._folder, self._manifest, segment.shard, segment.number) as reader:
            for record, arrays in reader.records(self._progress.add):
                if len(arrays):
                    raise reader.damaged("it has a record with arrays, which should have none")
                try:
                    match record.WhichOneof("part"):
                        case "table":
                            if counts:
                                self._count(record.table)
                        case "client":
                            clients.append((record.client.client_id, client_entry(record.client)))
                        case "group":
                            groups.append(group_entry(record.group))
                        case kind:
                            raise reader.damaged(f"it holds a record that is not of a state ({kind})")
                except ShardamError as error:
                    raise reader.damaged(error.message) from error
        return Remembered(clients, groups)

    def _count(self, info: common_pb2.TableInfo) -> None:
        table = self._tables.get(info.table_id)
        if table is not None:
            table.nonfinite_pushes += info.nonfinite_pushes
            self._saturated[info.table_id] = self._saturated.get(info.table_id, 0) + info.saturated_values

    def _keep_clients(self, state: ShardState, remembered: list[Remembered], *, same_shards: bool) -> None:
        clients = remembered[0].clients if same_shards else merge_clients(remembered, self._index)
        for client_id, entry in clients:
            state.clients.put(client_id, entry)
        for group in merge_groups(remembered):
            state.groups.put(group)
