"""Random runs of numbered changes, crashes and closings against a model of PROTOCOL.md section 4.

The model knows the rules of numbers and nothing of journals; rows are held against the NumPy reference, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from shardam_testing.number_model import Model, ModelClient
from shardam_testing.reference_table import COMPONENTS, Float32s, Int64s
from shardam_testing.shard_states import MemoryJournal, journaled_state, make_tables, replayed, seen, table_steps

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import NonFiniteGradient, ShardamError
from shardam_proto.schema import Normal, TableSpec
from shardam_server.shard.clients import IDLE_S, WINDOW, Origin, Outcome
from shardam_server.shard.last_numbers import LastNumbers, end_here, settle_here
from shardam_server.shard.row_writes import RowWrite
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection, Table

SPECS = [
    TableSpec("plain", 3, init=Normal()),
    TableSpec("rows_step", 3, init=Normal(), step="row"),
    TableSpec("narrow", 3, init=Normal(), dtype="bfloat16"),
]
ROW_IDS = range(-2, 4)
OPTIONS = AdamOptions(lr=0.1, weight_decay=0.01)

NUM_CLIENTS = 2

clients = st.integers(0, NUM_CLIENTS - 1)
table_sets = st.sets(st.integers(1, len(SPECS))).map(sorted)
some_rows = st.lists(st.sampled_from(ROW_IDS), min_size=1, max_size=4, unique=True)
pushed_rows = st.lists(st.sampled_from(ROW_IDS), max_size=6)
seeds = st.integers(0, 2**16)

rarely = st.sampled_from([True, False, False, False])
"""Whether a rule that ends a client acts: numbers should come between."""


def values(seed: int, num_rows: int) -> Float32s:
    return np.random.default_rng(seed).standard_normal((num_rows, 3)).astype(np.float32)


def reason_of(action: Callable[[], object]) -> str:
    with pytest.raises(ShardamError) as error:
        action()
    return error.value.reason


class NumberMachine(RuleBasedStateMachine):
    """One shard with a journal in memory, and the model beside it."""

    state: ShardState
    journal: MemoryJournal
    model: Model
    client_ids: list[bytes]

    @initialize()
    def start(self) -> None:
        self.model = Model(SPECS)
        self.state, self.journal = journaled_state()
        self.state.install(make_tables(SPECS))
        self.client_ids = [b"%016d" % place for place in range(NUM_CLIENTS)]
        for place in range(NUM_CLIENTS):
            self.open(place)

    # -- one numbered change, whatever it is

    def send(
        self,
        client_id: bytes,
        number: int,
        digest: bytes,
        change: Callable[[Origin], Outcome],
        expect: Callable[[], Outcome],
    ) -> None:
        """Sends a number and holds the answer against the model.

        Args:
            client_id: the client.
            number: the number.
            digest: digest of its content.
            change: applies it to the shard.
            expect: applies it to the model and returns the outcome without a change number.
        """
        verdict = self.model.verdict(client_id, number, digest)
        origin = Origin(client_id, number, digest)
        before = self.state.change_number
        if verdict == "apply":
            outcome, repeated = self.state.run_number(origin, lambda: change(origin))
            expected = expect()
            if outcome.change_number:
                assert outcome.change_number == before + 1
                expected = dataclasses.replace(expected, change_number=before + 1)
            assert (outcome, repeated) == (expected, False)
            assert self.state.change_number == before + 1
            self.model.clients[client_id].close_number(digest, expected)
        elif verdict == "repeat":
            assert self.state.run_number(origin, lambda: change(origin)) == (
                self.model.clients[client_id].window[number][1],
                True,
            )
            assert self.state.change_number == before
        else:
            assert reason_of(lambda: self.state.run_number(origin, lambda: change(origin))) == verdict
            assert self.state.change_number == before

    def table(self, table_id: int) -> Table:
        return self.state.table(table_id)

    def sections(self, table_ids: list[int], row_ids: Int64s, gradients: Float32s) -> list[GradientSection]:
        return [GradientSection(self.table(table_id), row_ids, gradients, OPTIONS, 1.0) for table_id in table_ids]

    # -- clients

    @rule(place=clients)
    def open(self, place: int) -> None:
        client_id = self.client_ids[place]
        client = self.model.clients.get(client_id)
        if client is not None and client.closed:
            assert reason_of(lambda: self.state.open_client(client_id)) == "CLIENT_CLOSED"
            return
        entry = self.state.open_client(client_id, heartbeats=place == 0)
        expected = self.model.clients.setdefault(client_id, ModelClient(heartbeats=place == 0))
        assert entry.last_number == expected.last

    @rule(place=clients)
    def come_as_another(self, place: int) -> None:
        """A worker whose client is gone connects again: with another client id."""
        client = self.model.clients.get(self.client_ids[place])
        if client is None or client.closed:
            self.client_ids[place] = b"%016d" % (int(self.client_ids[place]) + NUM_CLIENTS)
            self.open(place)

    @rule(place=clients, really=rarely)
    def leave(self, place: int, really: bool) -> None:
        if not really:
            return
        client_id = self.client_ids[place]
        answer = end_here(self.state, client_id)
        client = self.model.clients.get(client_id)
        if client is None:
            assert answer == LastNumbers()
            self.model.clients[client_id] = ModelClient(closed=True)
            return
        client.closed = True
        tables = {number: tuple(outcome.steps) for number, (_, outcome) in client.window.items()}
        assert answer == LastNumbers(client.last, tables, client.settled)

    @rule(place=clients, really=rarely)
    def note_settled(self, place: int, really: bool) -> None:
        if not really:
            return
        client_id = self.client_ids[place]
        self.state.end_client(client_id, settled=True)
        if client_id in self.model.clients:
            self.model.clients[client_id].closed = self.model.clients[client_id].settled = True

    @rule(really=rarely)
    def forget(self, really: bool) -> None:
        if not really:
            return
        self.state.forget_idle_clients(now=max((entry.last_contact for _, entry in self.state.clients), default=0) + IDLE_S + 1)
        self.model.clients = {
            client_id: client
            for client_id, client in self.model.clients.items()
            if (not client.settled and client.last if client.closed else client.heartbeats)
        }

    @rule(place=clients, really=rarely, extra=st.integers(-2, 2), steps=st.lists(table_sets, min_size=1, max_size=3))
    def settle(self, place: int, really: bool, extra: int, steps: list[list[int]]) -> None:
        """Home closes numbers: from the next one on, some that are closed already, or with a gap."""
        if not really:
            return
        client_id = self.client_ids[place]
        first = max(1, self.model.next_number(client_id) + extra)
        numbers = [(first + place, tuple(table_ids)) for place, table_ids in enumerate(steps)]
        client = self.model.clients.setdefault(client_id, ModelClient())
        client.closed = True
        if client.settled:
            settle_here(self.state, client_id, numbers)
            return
        if first > client.last + 1:
            assert reason_of(lambda: settle_here(self.state, client_id, numbers)) == "UNKNOWN_CLIENT"
            return
        settle_here(self.state, client_id, numbers)
        for number, table_ids in numbers:
            if number == client.last + 1:
                client.close_number(b"closed by home", Outcome(steps=self.model.step(list(table_ids))))

    # -- numbers

    @rule(place=clients, table_ids=table_sets, row_ids=pushed_rows, seed=seeds)
    def push(self, place: int, table_ids: list[int], row_ids: list[int], seed: int) -> None:
        client_id = self.client_ids[place]
        number = self.model.next_number(client_id)
        ids, gradients = np.array(row_ids, np.int64), values(seed, len(row_ids))

        def expect() -> Outcome:
            for table_id in table_ids:
                self.model.tables[table_id].push(ids, gradients, OPTIONS)
            return Outcome(steps={table_id: self.model.tables[table_id].t for table_id in table_ids})

        digest = f"push {table_ids} {row_ids} {seed}".encode()
        self.send(
            client_id, number, digest, lambda origin: self.state.push(self.sections(table_ids, ids, gradients), origin), expect
        )

    @rule(place=clients, offset=st.sampled_from([1, 2, -1, -2, -WINDOW, -WINDOW - 1]))
    def misuse(self, place: int, offset: int) -> None:
        """A gap, another content under a used number, or a number that is too old."""
        client_id = self.client_ids[place]
        self.send(client_id, self.model.next_number(client_id) + offset, b"other", _must_not_run, _must_not_run_either)

    @rule(place=clients, data=st.data())
    def repeat(self, place: int, data: st.DataObject) -> None:
        """A number that is remembered is sent again; the change would fail if it were applied."""
        client_id = self.client_ids[place]
        client = self.model.clients.get(client_id)
        number = data.draw(st.sampled_from(sorted(client.window))) if client is not None and client.window else 1
        digest = client.window[number][0] if client is not None and client.window else b"first"
        if self.model.verdict(client_id, number, digest) != "apply":
            self.send(client_id, number, digest, _must_not_run, _must_not_run_either)

    @rule(place=clients, seed=seeds, row_ids=some_rows)
    def refuse(self, place: int, seed: int, row_ids: list[int]) -> None:
        """One table's gradients are not finite: no table changes, and the number stays open."""
        client_id = self.client_ids[place]
        number = self.model.next_number(client_id)
        origin = Origin(client_id, number, b"refused")
        good = values(seed, len(row_ids))
        bad = good.copy()
        bad[-1, -1] = np.inf
        ids = np.array(row_ids)
        if self.model.verdict(client_id, number, origin.digest) != "apply":
            return
        before = self.state.change_number
        sections = [*self.sections([1], ids, good), *self.sections([2], ids, bad)]
        with pytest.raises(NonFiniteGradient):
            self.state.run_number(origin, lambda: self.state.push(sections, origin))
        assert self.state.change_number == before

    @rule(place=clients, table_ids=table_sets)
    def close_number(self, place: int, table_ids: list[int]) -> None:
        """SKIP without tables, VOID with them."""
        client_id = self.client_ids[place]
        digest = f"close {table_ids}".encode()
        self.send(
            client_id,
            self.model.next_number(client_id),
            digest,
            lambda origin: self.state.void(table_ids, origin),
            lambda: Outcome(steps=self.model.step(table_ids)),
        )

    @rule(place=clients)
    def skip_a_window(self, place: int) -> None:
        for _ in range(WINDOW + 1):
            self.close_number(place, [])

    @rule(place=clients, table_id=st.integers(1, len(SPECS)), row_ids=some_rows, moments=st.booleans(), seed=seeds)
    def assign(self, place: int, table_id: int, row_ids: list[int], moments: bool, seed: int) -> None:
        client_id = self.client_ids[place]
        weight = values(seed, len(row_ids))
        squares = np.square(weight) if moments else None
        write = RowWrite(np.array(row_ids), weight, squares, squares)

        def expect() -> Outcome:
            self.model.tables[table_id].assign(row_ids, weight, squares)
            return Outcome(num_rows=len(row_ids))

        digest = f"assign {table_id} {row_ids} {moments} {seed}".encode()
        self.send(
            client_id,
            self.model.next_number(client_id),
            digest,
            lambda origin: self.state.assign(self.table(table_id), write, origin=origin),
            expect,
        )

    @rule(place=clients, table_id=st.integers(1, len(SPECS)), row_ids=some_rows)
    def delete(self, place: int, table_id: int, row_ids: list[int]) -> None:
        client_id = self.client_ids[place]
        self.send(
            client_id,
            self.model.next_number(client_id),
            f"delete {table_id} {row_ids}".encode(),
            lambda origin: self.state.delete(self.table(table_id), np.array(row_ids), origin=origin),
            lambda: Outcome(num_rows=self.model.tables[table_id].delete(row_ids)),
        )

    @rule(place=clients, table_id=st.integers(1, len(SPECS)), row_ids=some_rows)
    def clear_moments(self, place: int, table_id: int, row_ids: list[int]) -> None:
        client_id = self.client_ids[place]
        self.send(
            client_id,
            self.model.next_number(client_id),
            f"clear {table_id} {row_ids}".encode(),
            lambda origin: self.state.clear_moments(self.table(table_id), np.array(row_ids), origin=origin),
            lambda: Outcome(num_rows=self.model.tables[table_id].clear_moments(row_ids)),
        )

    # -- the end of a process

    @rule()
    def crash_and_replay(self) -> None:
        before, journal = seen(self.state, ROW_IDS), self.journal
        self.state = replayed(journal.records())
        self.state.journal = journal
        assert seen(self.state, ROW_IDS) == before

    # -- what holds after every step

    @invariant()
    def numbers_agree(self) -> None:
        assert len(self.journal.frames) == self.state.change_number
        assert {client_id for client_id, _ in self.state.clients} == set(self.model.clients)
        for client_id, entry in self.state.clients:
            client = self.model.clients[client_id]
            assert (entry.last_number, entry.closed, entry.settled) == (client.last, client.closed, client.settled)
            assert entry.outcomes == client.window
        assert self.state.clients.num_open == sum(not client.closed for client in self.model.clients.values())

    @invariant()
    def steps_agree(self) -> None:
        assert table_steps(self.state) == {table_id: table.t for table_id, table in self.model.tables.items()}

    @invariant()
    def rows_agree(self) -> None:
        for table_id, table in self.model.tables.items():
            expected = table.rows()
            ids = np.array(sorted(expected), np.int64)
            batch = self.table(table_id).read(ids, include_optimizer=True)
            assert self.table(table_id).num_rows == len(expected)
            columns = [getattr(batch, name) for name in COMPONENTS]
            got = {row_id: b"".join(column[place].tobytes() for column in columns) for place, row_id in enumerate(ids.tolist())}
            assert got == expected

    def teardown(self) -> None:
        if hasattr(self, "journal"):
            self.crash_and_replay()


def _must_not_run(origin: Origin) -> Outcome:
    raise AssertionError(f"number {origin.number} was applied again")


def _must_not_run_either() -> Outcome:
    raise AssertionError("the model takes the number for a new one")


TestNumberMachine = NumberMachine.TestCase
TestNumberMachine.settings = settings(
    deadline=None, derandomize=True, print_blob=True, max_examples=100, stateful_step_count=50
)
