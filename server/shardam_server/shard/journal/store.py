"""STAND-IN, to be replaced at merge by the store of the branch `journal`: a folder's lock, CURRENT, and a list of records."""

# ruff: noqa: D102, D103
from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import struct
from pathlib import Path
from typing import BinaryIO

from shardam_proto.registry import ClusterEntry
from shardam_proto.v1 import journal_pb2, shard_pb2
from shardam_server.command_errors import CommandError
from shardam_server.shard.journal.interface import Arrays, Journal, NoJournal
from shardam_server.shard.journal.replay import Replay
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import MakeRecords

_LENGTHS = struct.Struct("<QQ")


class FolderHeld(CommandError):
    """Another process holds the folder."""


@dataclasses.dataclass(frozen=True)
class StoreOptions:
    """How a store keeps its state."""

    mode: str = "write"
    on_full: str = "suspend"
    limit_bytes: int = 2**30
    truncate: bool = False


@dataclasses.dataclass(frozen=True)
class Current:
    """What a folder holds."""

    cluster: ClusterEntry
    shard: int
    lineage: int
    timeline: int
    epoch: int


@dataclasses.dataclass(frozen=True)
class Recovery:
    """What was recovered."""

    num_records: int


@dataclasses.dataclass(frozen=True)
class JournalStatus:
    """How the journal does."""

    mode: shard_pb2.JournalMode.ValueType
    state: shard_pb2.JournalState.ValueType
    problem: str
    size_bytes: int


class StateStore:
    """One shard's folder."""

    def __init__(self, folder: Path, lock: int, options: StoreOptions) -> None:
        self.folder = folder
        self._lock = lock
        self._options = options
        self.journal: Journal = NoJournal()
        self._file: _RecordFile | None = None
        path = folder / "CURRENT"
        self.current: Current | None = None
        if path.exists():
            fields = json.loads(path.read_text())
            self.current = Current(**{**fields, "cluster": ClusterEntry(**fields["cluster"])})

    @classmethod
    def lock(cls, data_dir: Path, cluster: str, index: int, options: StoreOptions) -> StateStore:
        folder = data_dir / cluster / f"shard-{index}"
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            pid = os.pread(lock, 32, 0).decode().strip()
            raise FolderHeld(
                f"{folder} is held by process {pid}, even if that is only stopped: kill it first (kill -9 {pid})"
            ) from error
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return cls(folder, lock, options)

    def recover(self, state: ShardState, make_records: MakeRecords) -> Recovery:
        replay, count, end = Replay(state, make_records), 0, 0
        data = (self.folder / "records").read_bytes()
        while end + _LENGTHS.size <= len(data):
            sizes = _LENGTHS.unpack_from(data, end)
            start, middle = end + _LENGTHS.size, end + _LENGTHS.size + sizes[0]
            if middle + sizes[1] > len(data):
                break
            replay.apply(journal_pb2.JournalRecord.FromString(data[start:middle]), data[middle : middle + sizes[1]])
            count, end = count + 1, middle + sizes[1]
        os.truncate(self.folder / "records", end)
        return Recovery(count)

    def begin(self, cluster: ClusterEntry, lineage: int, timeline: int, epoch: int, state: ShardState) -> None:
        (self.folder / "records").write_bytes(b"")
        self.current = Current(cluster, state_index(self.folder), lineage, timeline, epoch)
        self._write_current()
        self.resume(state)

    def resume(self, state: ShardState) -> None:
        if self._options.mode != "off":
            self._file = _RecordFile((self.folder / "records").open("ab", buffering=0))
            self.journal = self._file

    def note_epoch(self, epoch: int) -> None:
        if self.current is not None and self.current.epoch != epoch:
            self.current = dataclasses.replace(self.current, epoch=epoch)
            self._write_current()

    def _write_current(self) -> None:
        assert self.current is not None
        new = self.folder / "CURRENT.new"
        new.write_text(json.dumps(dataclasses.asdict(self.current)))
        new.rename(self.folder / "CURRENT")

    def status(self) -> JournalStatus:
        size_bytes = (self.folder / "records").stat().st_size if self._file is not None else 0
        mode = shard_pb2.JOURNAL_MODE_WRITE if self._options.mode != "off" else shard_pb2.JOURNAL_MODE_OFF
        return JournalStatus(mode, shard_pb2.JOURNAL_STATE_OK, "", size_bytes)

    def needs_base(self) -> bool:
        return False

    def write_base(self, state: ShardState) -> None:
        raise AssertionError("the stand-in needs none")

    def close(self, state: ShardState) -> None:
        if self._file is not None:
            self._file.file.close()
        os.close(self._lock)


def state_index(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


class _RecordFile:
    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._before = 0

    def append(self, record: journal_pb2.JournalRecord, arrays: Arrays) -> None:
        message = record.SerializeToString()
        data = b"".join(array.tobytes() for array in arrays)
        self._before = self.file.tell()
        self.file.write(_LENGTHS.pack(len(message), len(data)) + message + data)

    def retract(self) -> None:
        self.file.truncate(self._before)

    async def durable(self) -> None:
        return
