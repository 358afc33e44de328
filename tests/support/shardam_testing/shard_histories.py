"""A shard's state without a process: tables of every kind, changes of every kind, and all of its bits for a comparison."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from shardam_kernels.factors import AdamOptions
from shardam_proto.registry import ClusterEntry
from shardam_proto.schema import Constant, Normal, TableSpec, Uniform
from shardam_proto.v1 import common_pb2
from shardam_server.shard.clients import Outcome
from shardam_server.shard.groups.entries import GroupEntry
from shardam_server.shard.journal.base_writer import BaseCopy, BaseReport
from shardam_server.shard.journal.options import JournalOptions
from shardam_server.shard.journal.store import StateStore
from shardam_server.shard.last_numbers import settle_number
from shardam_server.shard.records import CpuDevice, Device
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, Table, table_from_info
from shardam_testing.group_changes import group_changes
from shardam_testing.matrix import num_threads
from shardam_testing.state_changes import Change, find, origin, part_bits, rows

DEVICE = CpuDevice(num_threads())
CLUSTER = ClusterEntry("c0ffee", 1, 7)
CLUSTER_NAME = "oak"
LINEAGE, TIMELINE, EPOCH = 2**60 + 1, 1, 3

SPECS = (
    TableSpec("words", 3, init=Normal()),
    TableSpec("users", 4, dtype="bfloat16", step="row", init=Uniform(-0.5, 0.5), num_embeddings=40, padding_idx=0),
    TableSpec("items", 2, dtype="float16", init=Constant(0.25)),
    TableSpec("tags", 1, step="row", num_embeddings=30),
)
"""Every dtype, both step modes, bounded and unbounded, with and without a padding row."""

CLIENTS = (b"a" * 16, b"b" * 16)
OTHER_CLIENT = b"o" * 16


def new_state() -> ShardState:
    return ShardState(DEVICE)


def make_tables(device: Device = DEVICE) -> list[Table]:
    infos = [
        common_pb2.TableInfo(spec=spec.to_proto(), table_id=2**61 + place, table_seed=90 + place)
        for place, spec in enumerate(SPECS)
    ]
    return [table_from_info(info, device.make_records) for info in infos]


def push(rng: np.random.Generator, *names: str, client_id: bytes = CLIENTS[0], num_rows: int = 6) -> Change:
    """A push over tables, with duplicates, and the padding row where there is one."""
    parts = {name: (rng.integers(0, 20, num_rows), rng.integers(0, 2**31)) for name in names}
    options = AdamOptions(lr=float(rng.uniform(0.01, 0.1)), weight_decay=0.01, decoupled_weight_decay=bool(rng.integers(2)))

    def change(state: ShardState) -> Outcome:
        sections = []
        for name, (row_ids, seed) in parts.items():
            table = find(state, name)
            ids = row_ids if table.spec.num_embeddings is not None else row_ids * 2**50 - 2**51
            gradients = rows(np.random.default_rng(seed), num_rows, table.spec.dim)
            sections.append(GradientSection(table, ids, gradients, options, 2.0))
        return state.push(sections, origin(state, client_id))

    return change


def assign(rng: np.random.Generator, name: str, *, moments: bool, if_absent: bool = False) -> Change:
    row_ids = rng.permutation(20)[:5]
    seed = rng.integers(0, 2**31)

    def change(state: ShardState) -> Outcome:
        table, values = find(state, name), np.random.default_rng(seed)
        weight, exp_avg, exp_avg_sq = (rows(values, 5, table.spec.dim) for _ in range(3))
        weight[0] = 1e6  # beyond float16: saturated, and counted
        write = RowWrite(row_ids, weight, exp_avg if moments else None, exp_avg_sq**2 if moments else None, if_absent)
        return state.assign(table, write, origin=origin(state, CLIENTS[0]))

    return change


def void(*names: str, client_id: bytes = CLIENTS[1]) -> Change:
    return lambda state: state.void([find(state, name).table_id for name in names], origin(state, client_id))


def delete(rng: np.random.Generator, name: str) -> Change:
    row_ids = rng.integers(0, 20, 4)
    return lambda state: state.delete(find(state, name), row_ids, origin=origin(state, CLIENTS[0]))


def clear_moments(rng: np.random.Generator, name: str) -> Change:
    row_ids = rng.integers(0, 20, 6)
    return lambda state: state.clear_moments(find(state, name), row_ids, origin=origin(state, CLIENTS[1]))


def settle(state: ShardState) -> None:
    entry = state.clients.find(OTHER_CLIENT)
    assert entry is not None
    settle_number(state, OTHER_CLIENT, entry.last_number + 1, [find(state, "words").table_id])


def every_change(seed: int = 0) -> list[Change]:
    """A history with every kind of change."""
    rng = np.random.default_rng(seed)
    return [
        lambda state: state.install(make_tables()[:2]),
        lambda state: state.open_client(CLIENTS[0], heartbeats=True),
        push(rng, "words", "users"),
        lambda state: state.open_client(CLIENTS[1]),
        lambda state: state.install(make_tables()),
        push(rng, "words", "users", "items", "tags", client_id=CLIENTS[1]),
        lambda state: state.raise_steps({find(state, "items").table_id: 1000, find(state, "tags").table_id: 7}),
        push(rng, "items", "tags"),
        void("words", "tags"),
        void(),
        assign(rng, "words", moments=True),
        assign(rng, "users", moments=False),
        assign(rng, "items", moments=True, if_absent=True),
        assign(rng, "tags", moments=False),
        push(rng, "users", "tags"),
        delete(rng, "words"),
        delete(rng, "users"),
        clear_moments(rng, "items"),
        clear_moments(rng, "users"),
        push(rng, "words", "users", "items", "tags"),
        lambda state: state.open_client(OTHER_CLIENT),
        lambda state: state.end_client(OTHER_CLIENT),
        settle,
        lambda state: state.end_client(OTHER_CLIENT, settled=True),
        lambda state: state.end_client(CLIENTS[1]),
        push(rng, "words"),
        lambda state: state.forget_idle_clients(now=1e12),  # the clients that do not send heartbeats
        push(rng, "words", num_rows=0),
        *group_changes(rng),
        push(rng, "users", "tags"),
    ]


@dataclasses.dataclass(frozen=True)
class AllBits:
    """Everything that a state is, to be compared."""

    change_number: int
    tables: dict[str, tuple[object, ...]]
    clients: Sequence[tuple[object, ...]]
    groups: Sequence[GroupEntry]
    parts: Sequence[tuple[object, ...]]


def all_bits(state: ShardState) -> AllBits:
    tables = {table.spec.name: _table_bits(table) for table in state.tables()}
    clients = [
        (client_id, entry.last_number, entry.closed, entry.settled, entry.heartbeats, dict(entry.outcomes), entry.clock)
        for client_id, entry in state.clients
    ]
    groups = [dataclasses.replace(entry) for entry in state.groups]
    return AllBits(state.change_number, tables, clients, groups, [part_bits(part) for part in state.groups.parts()])


def _table_bits(table: Table) -> tuple[object, ...]:
    row_ids, key = table.storage.scan(0, 10**6)
    assert key is None
    row_ids = np.sort(row_ids)
    slots = table.storage.lookup(row_ids)
    counters = table.storage.counters(slots)
    floats = [table.storage.gather(slots, row_ids), *(table.storage.read(name, slots) for name in ("exp_avg", "exp_avg_sq"))]
    integers = (counters.row_step.tolist(), counters.touched_step.tolist(), counters.change_number.tolist())
    numbers = (table.step, table.last_options, table.nonfinite_pushes, table.storage.saturated_values)
    rows = (row_ids.tolist(), *(part.tobytes() for part in floats), *integers)
    return table.table_id, table.table_seed, table.spec, numbers, rows


def lock_store(data_dir: Path, options: JournalOptions | None = None) -> StateStore:
    return StateStore.lock(data_dir, CLUSTER_NAME, 0, JournalOptions() if options is None else options)


def begin_store(data_dir: Path, state: ShardState, options: JournalOptions | None = None) -> StateStore:
    store = lock_store(data_dir, options)
    store.begin(CLUSTER, LINEAGE, TIMELINE, EPOCH, state)
    return store


def abandon(store: StateStore) -> None:
    """What a kill leaves: the folder as it is, the lock released. Threads of the journal end."""
    store.journal.end()
    store.release()


@contextlib.contextmanager
def come_back(data_dir: Path, options: JournalOptions | None = None) -> Iterator[tuple[StateStore, ShardState]]:
    """A start with a folder: recovered and resumed; killed at the end."""
    store, state = lock_store(data_dir, options), new_state()
    try:
        store.recover(state, DEVICE.make_records)
        store.resume(state)
    except BaseException:
        store.release()
        raise
    try:
        yield store, state
    finally:
        abandon(store)


def bits_after(data_dir: Path, options: JournalOptions | None = None) -> AllBits:
    """All bits of what a start with a folder brings back."""
    with come_back(data_dir, options) as (_, state):
        return all_bits(state)


async def between_changes(action: Callable[[], BaseCopy]) -> BaseCopy:
    """Stands for Sequencer.change where no change runs meanwhile."""
    return action()


def try_base(store: StateStore) -> BaseReport | None:
    """Writes a base between two changes; None: it failed."""
    return asyncio.run(store.write_base(between_changes))


def write_base(store: StateStore) -> BaseReport:
    report = try_base(store)
    assert report is not None, store.status().problem
    return report


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but LOCK."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "LOCK"}
