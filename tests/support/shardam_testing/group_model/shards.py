"""A shard as its peers and clients see it: the product's state behind a journal that a crash may cut, and its answers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

from shardam_proto.errors import ClientClosed, ShardamError
from shardam_proto.registry import ClusterEntry
from shardam_proto.v1 import common_pb2, group_pb2, journal_pb2
from shardam_server.shard.clients import Origin
from shardam_server.shard.groups.changes import IncomingPart, check_here, stage, update_group
from shardam_server.shard.groups.messages import decode_decision, decode_group
from shardam_server.shard.groups.values import Group, GroupTerms, Refusal
from shardam_server.shard.groups.waits import change_passage
from shardam_server.shard.journal.base_file import BaseReader, write_base
from shardam_server.shard.journal.current import Current
from shardam_server.shard.journal.file_names import base_name
from shardam_server.shard.journal.file_operations import FileOperations
from shardam_server.shard.journal.interface import Arrays
from shardam_server.shard.journal.journal_file import JournalFile
from shardam_server.shard.journal.replay import Replay
from shardam_server.shard.last_numbers import end_here, settle_here
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.snapshots import Snapshot
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import GradientSection
from shardam_testing.group_model.contents import ROW_IDS, SPECS
from shardam_testing.group_model.messages import (
    Address,
    Check,
    Checked,
    Close,
    Closed,
    End,
    Ended,
    Gone,
    Message,
    Open,
    Opened,
    Part,
    PartAnswer,
    Settle,
    Settled,
    Update,
    Updated,
)
from shardam_testing.group_model.network import Network
from shardam_testing.group_model.oracle import GROUP, Oracle
from shardam_testing.matrix import num_threads
from shardam_testing.shard_states import MemoryJournal, make_tables, seen

NO_GROUP = Group(GROUP, GroupTerms("sync", 1))

GONE = ("NOT_A_MEMBER", "CLIENT_CLOSED")
"""Refusals that say that a client was dropped."""


class WatchedJournal(MemoryJournal):
    """Shows the decisions that are put into it."""

    def __init__(self, decided: Callable[[group_pb2.Decision], None]) -> None:
        super().__init__()
        self._decided = decided

    def append(self, record: journal_pb2.JournalRecord, arrays: Arrays) -> None:
        super().append(record, arrays)
        if record.HasField("decision"):
            self._decided(record.decision.decision)


class ModelShard:
    """One shard.

    Args:
        index: its index.
        network: what it answers to.
        oracle: watches it.
        max_rows: rows that it may hold; 0: no limit.
        syncs: False: what it journals is not on its disk, and not answered, before `sync`.

    Attributes:
        state: its state in this life.
    """

    def __init__(self, index: int, network: Network, oracle: Oracle, max_rows: int, *, syncs: bool) -> None:
        self.index = index
        self._network = network
        self._oracle = oracle
        self._max_rows = max_rows
        self._syncs = syncs
        self._journal = WatchedJournal(self._decided)
        self._base: bytes | None = None
        self._num_durable = 0
        self._waiting: list[tuple[int, Message]] = []
        self.state = self._rebuilt()
        self.state.install(make_tables(SPECS))
        self.sync()

    def _decided(self, message: group_pb2.Decision) -> None:
        entry = self.state.groups.find(GROUP)
        self._oracle.journaled(self.index, message, NO_GROUP if entry is None else entry.group)

    # -- its disk

    def send(self, to: Address, body: object) -> None:
        """Sends a message once all that was journaled before is on the disk."""
        if self._num_durable == len(self._journal.frames):
            self._network.post(to, body)
        else:
            self._waiting.append((len(self._journal.frames), Message(to, body)))

    def sync(self) -> None:
        """Brings the journal to the disk and sends what waits for it."""
        self._num_durable = len(self._journal.frames)
        for _, message in self._waiting:
            self._network.post(message.to, message.body)
        self._waiting.clear()

    def settle_disk(self) -> None:
        """What follows each change."""
        if self._syncs:
            self.sync()

    def write_base(self) -> None:
        """Writes the state to a base, from which the journal goes on."""
        self.sync()
        self._base = _base_of(self.state)
        self._journal.frames.clear()
        self._num_durable = 0

    def crash(self, *, power_loss: bool) -> None:
        """Ends its life and begins another with what is on the disk; only a power loss takes what was not synced."""
        before, frames = self.seen(), self._journal.frames
        lost = [frame for frame in frames[self._num_durable :] if power_loss]
        if lost:
            del frames[self._num_durable :]
            records = [journal_pb2.JournalRecord.FromString(message) for message, _ in lost]
            self._oracle.lost(self.index, sum(record.HasField("decision") for record in records))
        self._num_durable = len(frames)  # a new life finds it on the disk
        self._waiting.clear()
        self.state = self._rebuilt()
        if not lost:
            assert self.seen() == before, "a shard comes back as another"
        self._oracle.check_shard(self.index, self.state)

    def _rebuilt(self) -> ShardState:
        state = ShardState(CpuDevice(num_threads()), self._max_rows)
        if self._base is not None:
            _read_base(self._base, state)
        replay = Replay(state, CpuDevice(num_threads()).make_records)
        for record, data in self._journal.records():
            replay.apply(record, data)
        state.journal = self._journal
        return state

    def seen(self) -> Mapping[str, object]:
        """Returns all that the state shows."""
        groups = self.state.groups
        parts = [
            (
                part.origin,
                part.group,
                part.step,
                part.rank,
                part.kind,
                [
                    (table_id, one.row_ids.tobytes(), one.gradients.tobytes(), one.options, one.grad_scale, one.peak)
                    for table_id, one in part.tables.items()
                ],
            )
            for part in groups.parts()
        ]
        entries = [(entry.group, entry.step, entry.decision) for entry in groups]
        return {**seen(self.state, ROW_IDS.tolist()), "groups": entries, "parts": parts}

    # -- its answers

    def receive(self, body: object) -> bool:
        """Handles a message; False: it is none for an ordinary shard."""
        handle = self._ways.get(type(body))
        if handle is None:
            return False
        handle(self, body)
        self.settle_disk()
        return True

    def _open(self, body: Open) -> None:
        try:
            self.state.open_client(body.client_id, heartbeats=True)
        except ClientClosed as error:
            self.send(body.client_id, Gone(error.reason))
        else:
            self.send(body.client_id, Opened(self.index))

    def _part(self, body: Part) -> None:
        if self._waits(body.client_id, self._oracle.contents[body.client_id, body.number].step):
            return
        before = self.state.change_number
        try:
            staging = stage(self.state, self.incoming(body.client_id, body.number))
        except ShardamError as error:
            assert self.state.change_number == before, "what is refused changes something"
            if error.reason in GONE:
                self.send(body.client_id, Gone(error.reason))
            elif not error.rule.retryable:
                self.send(body.client_id, PartAnswer(self.index, body.number, {}, refusal=Refusal.of(error)))
        else:
            result = None if staging.outcome is None else staging.outcome.result
            self.send(body.client_id, PartAnswer(self.index, body.number, staging.peaks, result))

    def incoming(self, client_id: bytes, number: int) -> IncomingPart:
        """Returns this shard's part of a number."""
        content = self._oracle.contents[client_id, number]
        sections = [
            GradientSection(self.state.table(table_id), *gradient, content.options, content.grad_scale)
            for table_id, gradient in content.part(self.index).items()
        ]
        return IncomingPart(Origin(client_id, number, content.digest), content.step, content.rank, content.kind, sections)

    def _close(self, body: Close) -> None:
        if self._waits(body.client_id, body.step):
            return
        origin = Origin(body.client_id, body.number, b"close")
        try:
            self.state.run_number(origin, lambda: self.state.void([], origin))
        except ClientClosed as error:
            self.send(body.client_id, Gone(error.reason))
        else:
            self.send(body.client_id, Closed(self.index, body.number))

    def _waits(self, client_id: bytes, step: int) -> bool:
        """Whether the step before is not carried out here; what has to wait is sent again here."""
        return change_passage(self.state, common_pb2.RequestHeader(client_id=client_id, step=step)) is None

    def _update(self, body: Update) -> None:
        request = body.request
        decision = decode_decision(request.decision) if request.HasField("decision") else None
        entry = update_group(self.state, decode_group(request.group), request.step, decision)
        self.send(0, Updated(body.life, self.index, entry.group.version, entry.step))

    def _check(self, body: Check) -> None:
        before = self.state.change_number
        refusal = check_here(self.state, decode_decision(body.request.decision))
        assert self.state.change_number == before
        self.send(0, Checked(body.life, self.index, body.request, refusal))

    def _end(self, body: End) -> None:
        self.send(0, Ended(body.life, self.index, body.client_id, end_here(self.state, body.client_id)))

    def _settle(self, body: Settle) -> None:
        last = body.numbers[-1][0] if body.numbers else 0
        try:
            settle_here(self.state, body.client_id, body.numbers, settled=body.settled)
        except ShardamError:
            self.send(0, Settled(body.life, self.index, body.client_id, None, body.settled))
        else:
            self.send(0, Settled(body.life, self.index, body.client_id, last, body.settled))

    _ways: ClassVar[Mapping[type, Callable[..., None]]] = {
        Open: _open,
        Part: _part,
        Close: _close,
        Update: _update,
        Check: _check,
        End: _end,
        Settle: _settle,
    }


# -- bases; through a real file, without waiting for the disk


class _NoSync(FileOperations):
    def sync(self, descriptor: int) -> None:
        pass


_CURRENT = Current("oak", ClusterEntry("c1", 3, 0), 0, 1, 1, 1, base_name(1), 1)


def _base_of(state: ShardState) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / base_name(1)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        file = JournalFile(path, descriptor, 0, _NoSync())
        write_base(file, _CURRENT, Snapshot(state))
        file.close()
        return path.read_bytes()


def _read_base(content: bytes, state: ShardState) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / base_name(1)
        path.write_bytes(content)
        BaseReader(state, CpuDevice(num_threads()).make_records).read(path, _CURRENT)
