"""Checkpoints without processes: states written as the shards of a cluster, and loaded as those of another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from shardam_kernels.factors import AdamOptions
from shardam_proto.registry import Plan
from shardam_proto.routing import RouteMap
from shardam_proto.schema import Constant, TableSpec
from shardam_proto.v1 import common_pb2
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.checking import CheckFiles
from shardam_server.shard.checkpoints.file_messages import decode_shard
from shardam_server.shard.checkpoints.loading import load
from shardam_server.shard.checkpoints.manifest import CheckpointFile, Manifest, ShardFiles, StoredTable
from shardam_server.shard.checkpoints.tasks import Progress
from shardam_server.shard.checkpoints.writing import WriteCut, WriteTerms
from shardam_server.shard.records import CpuDevice, Device
from shardam_server.shard.snapshots import Snapshot
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, Table, table_from_info
from shardam_testing.matrix import num_threads

CPU = CpuDevice(num_threads())
CLUSTER = "oak"
CLUSTER_ID = "c0ffee"
CHECKPOINT_ID = 2**62 + 5
SEED = 77

SPECS = (
    TableSpec("words", 3),
    TableSpec("users", 4, dtype="bfloat16", step="row", num_embeddings=40, padding_idx=0),
    TableSpec("items", 2, dtype="float16"),
    TableSpec("empty", 1, init=Constant(0.5)),
)

IDS = [0, 1, -1, 2**62, -(2**63), *range(5, 40)]
USERS = list(range(40))

RowBits = tuple[bytes, bytes, bytes, int, int]
"""A row's weight, exp_avg and exp_avg_sq, its own step and the last step that touched it."""

TableRows = dict[str, dict[int, RowBits]]
"""Table -> id -> row."""


def make_states(specs: Sequence[TableSpec], num_shards: int, device: Device = CPU) -> list[ShardState]:
    """Empty states of the shards of a cluster, each with the same tables."""
    states = []
    for _ in range(num_shards):
        state = ShardState(device)
        state.install([make_table(spec, place, device) for place, spec in enumerate(specs, 1)])
        states.append(state)
    return states


def make_table(spec: TableSpec, table_id: int, device: Device = CPU) -> Table:
    info = common_pb2.TableInfo(spec=spec.to_proto(), table_id=table_id, table_seed=SEED + table_id)
    return table_from_info(info, device.make_records)


def push_rows(states: Sequence[ShardState], name: str, row_ids: Sequence[int], seed: int = 0, lr: float = 0.1) -> None:
    """One push to all shards, split by the rows they own; each row's gradient depends on its id and the seed alone."""
    ids = np.array(row_ids, np.int64)
    owners = RouteMap(1, len(states)).shards_of(ids)
    for index, state in enumerate(states):
        table = state.find_table(name)
        assert table is not None
        own = ids[owners == index]
        gradients = [np.random.default_rng([seed, row_id % 2**64]).standard_normal(table.spec.dim) for row_id in own.tolist()]
        values = np.array(gradients, np.float32).reshape(own.size, table.spec.dim)
        state.push([GradientSection(table, own, values, AdamOptions(lr=lr), 1.0)])


def rows_of(states: Sequence[ShardState]) -> TableRows:
    """All rows of a cluster; change numbers apart, which belong to shards."""
    rows: TableRows = {table.spec.name: {} for state in states for table in state.tables()}
    for state in states:
        for table in state.tables():
            row_ids, _ = table.storage.scan(0, 10**6)
            slots = table.storage.lookup(row_ids)
            counters = table.storage.counters(slots)
            columns = [table.storage.read(name, slots) for name in ("weight", "exp_avg", "exp_avg_sq")]
            for place, row_id in enumerate(row_ids.tolist()):
                assert row_id not in rows[table.spec.name], "a row is on two shards"
                weight, exp_avg, exp_avg_sq = (column[place].tobytes() for column in columns)
                steps = int(counters.row_step[place]), int(counters.touched_step[place])
                rows[table.spec.name][row_id] = (weight, exp_avg, exp_avg_sq, *steps)
    return rows


def steps_of(state: ShardState) -> dict[str, int]:
    return {table.spec.name: table.step for table in state.tables()}


def write_shard(
    root: Path, folder: Path, state: ShardState, index: int, num_shards: int, segment_bytes: int = 2**28
) -> ShardFiles:
    """Writes one state as a shard's part."""
    relative = folder.relative_to(root).as_posix()
    terms = WriteTerms(CLUSTER_ID, CHECKPOINT_ID, index, num_shards, root, relative, None, "host-a", 0, segment_bytes)
    return decode_shard(WriteCut(Snapshot(state), terms).run(Progress()))


def manifest_of(name: str, states: Sequence[ShardState], shards: Sequence[ShardFiles], time_s: float = 1e9) -> Manifest:
    tables = []
    for table in states[0].tables():
        num_rows = sum(one.num_rows for state in states for one in state.tables() if one.table_id == table.table_id)
        tables.append(StoredTable(table.spec, table.table_id, table.table_seed, table.step, num_rows, table.last_options))
    clients = {client_id: entry.last_number for client_id, entry in states[0].clients if not entry.is_over}
    return Manifest(
        name=name,
        checkpoint_id=CHECKPOINT_ID,
        created_unix_s=time_s,
        seconds=0.5,
        version="1.2.3",
        cluster_name=CLUSTER,
        cluster_id=CLUSTER_ID,
        seed=SEED,
        timeline=1,
        epoch=1,
        num_shards=len(states),
        tables=tuple(tables),
        shards=tuple(shards),
        clients=clients,
    )


def save(
    root: Path, states: Sequence[ShardState], name: str = "one", segment_bytes: int = 2**28, time_s: float = 1e9
) -> tuple[Manifest, Path]:
    """Makes a complete checkpoint of states."""
    catalogue = Catalogue(root, CLUSTER)
    catalogue.prepare()
    folder = catalogue.new_folder(name)
    shards = [write_shard(root, folder, state, index, len(states), segment_bytes) for index, state in enumerate(states)]
    manifest = manifest_of(folder.name, states, shards, time_s)
    catalogue.complete(manifest)
    return manifest, folder


def make_plan(manifest: Manifest, num_shards: int) -> Plan:
    """A plan that loads all tables and nothing else."""
    names = tuple(table.spec.name for table in manifest.tables)
    folder = f"{CLUSTER}/{manifest.name}"
    return Plan("p1", 2, 1, num_shards, manifest.seed, folder, manifest.checkpoint_id, load=names)


def restore(manifest: Manifest, folder: Path, plan: Plan, device: Device = CPU) -> list[ShardState]:
    """Loads a checkpoint into empty states, one for each shard of the plan."""
    states = [ShardState(device) for _ in range(plan.num_shards)]
    for index, state in enumerate(states):
        load(state, manifest, folder, plan, index, device.make_records, Progress())
    return states


def with_files(manifest: Manifest, index: int, files: Sequence[CheckpointFile]) -> Manifest:
    """The manifest with other files of one shard."""
    shards = list(manifest.shards)
    shards[index] = dataclasses.replace(shards[index], files=tuple(files))
    return dataclasses.replace(manifest, shards=tuple(shards))


def trained(num_shards: int) -> list[ShardState]:
    """A cluster with rows of all tables but one."""
    states = make_states(SPECS, num_shards)
    for seed in range(3):
        push_rows(states, "words", IDS[seed:], seed)
        push_rows(states, "users", USERS[seed * 5 :], seed)
        push_rows(states, "items", IDS[: 30 + seed], seed)
    return states


def check(root: Path, folder: Path, num_shards: int) -> None:
    """Checks all files as so many shards would."""
    relative = folder.relative_to(root).as_posix()
    for index in range(num_shards):
        progress = Progress()
        CheckFiles(root, relative, index, num_shards).run(progress)
        assert progress.done_bytes == progress.total_bytes
