"""Shards that keep PROTOCOL.md section 4 and fail as a test tells them: for tests of the client's side of numbered changes."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import numpy as np
import numpy.typing as npt

from shardam._backoff import Deadline
from shardam._endings import ends_client
from shardam._group import GroupOptions
from shardam._session import Session
from shardam._session_options import SessionOptions
from shardam._values import TableInfo
from shardam_proto.errors import ClientClosed, SequenceError, ShardamError, ShardNotReady, StaleState
from shardam_proto.limits import SERVER_OPTIONS
from shardam_proto.registry import ClusterEntry, ClusterView, Keys, ShardEntry, connect_redis
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import common_pb2, embedding_pb2, job_pb2, row_pb2
from shardam_testing.scripted_groups import ScriptedGroup, StagedPart
from shardam_testing.scripted_services import CLUSTER_ID, abort, add_services
from shardam_testing.scripted_streams import HOLD, LOSE_ANSWER, SWALLOW, BrokenConnection, Fault

__all__ = [
    "CLUSTER_ID",
    "FAIL_BEFORE",
    "HOLD",
    "INFO",
    "LOSE_ANSWER",
    "SWALLOW",
    "WINDOW",
    "Ending",
    "Fault",
    "ScriptedShard",
    "scripted_cluster",
    "scripted_session",
    "view_of",
]

FAIL_BEFORE = "fail before"
"""The caller sees the connection fail; the shard has done nothing."""

WINDOW = 64
"""Numbers whose outcome a shard keeps."""

MAX_GATE_S = 60.0
"""A gate that a failed test leaves shut opens by itself."""

INFO = TableInfo(TableSpec("t", 2), table_id=77, table_seed=1)

Ending = tuple[int, str, list[int]]

_RowChange = row_pb2.AssignRowsRequest | row_pb2.DeleteRowsRequest | row_pb2.ClearMomentsRequest
_Change = embedding_pb2.PushRequest | embedding_pb2.CloseNumberRequest | _RowChange
_Request = _Change | embedding_pb2.PullRequest | embedding_pb2.PullChangedRequest | embedding_pb2.ArriveRequest
_Context = grpc.ServicerContext


@dataclasses.dataclass
class ScriptedShard:
    """One shard; `faults_of[number]`, then `faults`, are used up one per Push, row change, CloseNumber or Pull.

    Attributes:
        client_id: the client that opened last.
        cuts: chunk indexes: at this chunk of the next push that has it the connection fails.
        open_faults: errors of the next calls of Open.
        stream_faults: errors of the next streams.
        beat_faults: errors of the next calls of Heartbeat.
        fired: faults and cuts that were used.
        refused: reasons given on streams.
        seen: (method, number, row ids) of each such call.
        closed: (number, how it ended: "push", "assign", "delete", "clear", "skip" or "void", tables).
        num_chunks: chunks that arrived.
        rows_of: gradients of the last push under each number.
        applied: ids of each push that was applied, by number.
        held_after: changes above this number wait for the move to other shards; None: nothing is held.
        jobs: what home does in the background.
        seeded_last: last number in the checkpoint that it began with; whatever comes under one of these is a repeat.
        group: home and the other ranks, where the client is in a group.
        staged: the client's part of a step that is not decided.
        cut_answer: makes the messages in which an answer on a stream comes.
        change_number: changes applied, as answers say it.
        pulls: the pulls themselves.
        changed: ids whose rows have changed -> by which change; their values are negative.
    """

    index: int
    incarnation: int = 11
    lineage: int = 21
    timeline: int = 1
    epoch: int = 1
    client_id: bytes = b""
    last: int = 0
    client_lease_s: float = 30.0
    is_closed: bool = False
    faults: collections.deque[Fault] = dataclasses.field(default_factory=collections.deque)
    faults_of: dict[int, collections.deque[Fault]] = dataclasses.field(default_factory=dict)
    cuts: collections.deque[int] = dataclasses.field(default_factory=collections.deque)
    open_faults: collections.deque[ShardamError] = dataclasses.field(default_factory=collections.deque)
    stream_faults: collections.deque[ShardamError] = dataclasses.field(default_factory=collections.deque)
    beat_faults: collections.deque[ShardamError] = dataclasses.field(default_factory=collections.deque)
    fired: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    seen: list[tuple[str, int, list[int]]] = dataclasses.field(default_factory=list)
    closed: list[Ending] = dataclasses.field(default_factory=list)
    outcomes: dict[int, bytes] = dataclasses.field(default_factory=dict)
    rows_of: dict[int, bytes] = dataclasses.field(default_factory=dict)
    opened: int = 0
    wants_heartbeats: bool = False
    beats: int = 0
    num_chunks: int = 0
    num_streams: int = 0
    num_repeats: int = 0
    left: list[bytes] = dataclasses.field(default_factory=list)
    headers: list[common_pb2.RequestHeader] = dataclasses.field(default_factory=list)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    address: str = ""
    applied: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    held_after: int | None = None
    jobs: list[job_pb2.Job] = dataclasses.field(default_factory=list)
    seeded_last: int = 0
    group: ScriptedGroup | None = None
    staged: StagedPart | None = None
    cut_answer: Callable[[embedding_pb2.ExchangeResponse], list[embedding_pb2.ExchangeResponse]] = lambda answer: [answer]
    change_number: int = 0
    pulls: list[embedding_pb2.PullRequest] = dataclasses.field(default_factory=list)
    changed: dict[int, int] = dataclasses.field(default_factory=dict)
    server: grpc.Server | None = None
    handlers: futures.ThreadPoolExecutor | None = None

    # -- the process

    def start(self, port: int = 0) -> None:
        """Serves on a port, 0: a free one."""
        self.handlers = futures.ThreadPoolExecutor(16, thread_name_prefix=f"scripted-{self.index}")
        server = grpc.server(self.handlers, options=SERVER_OPTIONS)
        add_services(self, server)
        self.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        server.start()
        self.server = server

    def stop(self) -> None:
        """Stops serving; connections break."""
        if self.server is not None:
            self.server.stop(None).wait()
            self.server = None
        if self.handlers is not None:
            self.handlers.shutdown()
            self.handlers = None

    def restart(self, *, lineage: int | None = None) -> None:
        """Becomes another process life; with another lineage, one that knows nothing."""
        self.incarnation += 1
        if lineage is not None:
            self.lineage, self.last, self.staged = lineage, 0, None
            self.outcomes.clear()

    def entry(self, *, ready: bool = True, lost: bool = False) -> ShardEntry:
        address = self.address
        return ShardEntry(self.index, address, address, self.incarnation, self.lineage, "cpu", 1, ready=ready, lost=lost)

    def meet(self, client_id: bytes) -> None:
        """Takes a client for its own; what a former one had taken or closed is not the new one's."""
        with self.lock:
            if self.client_id not in (b"", client_id):
                self.last, self.staged, self.is_closed = 0, None, False
                self.outcomes.clear()
            self.client_id = client_id

    # -- what it does

    def header(self) -> common_pb2.ResponseHeader:
        taken = self.last if self.staged is None else self.staged.number
        return common_pb2.ResponseHeader(
            shard=self.index,
            incarnation=self.incarnation,
            lineage=self.lineage,
            timeline=self.timeline,
            epoch=self.epoch,
            last_number=taken,
            change_number=self.change_number,
        )

    def require_group(self) -> ScriptedGroup:
        if self.group is None:
            raise AssertionError(f"shard {self.index} has no group")
        return self.group

    def change(self, method: str, request: _Change, ending: tuple[str, list[int]], content: bytes) -> tuple[bool, Fault]:
        """Runs a numbered call.

        Returns:
            Whether it is a repeat, and what is to become of its answer.
        """
        row_ids = b"" if isinstance(request, embedding_pb2.CloseNumberRequest) else request.row_ids
        fault = self.enter(method, request.header, row_ids)
        with self.lock:
            number = request.header.number
            if number > self.last + 1:
                raise StaleState(f"{number} after {self.last}", reason="SEQUENCE_GAP", metadata={"last": str(self.last)})
            if number <= self.seeded_last:
                self.num_repeats += 1
                return True, fault
            if number <= self.last:
                if number not in self.outcomes:
                    raise SequenceError(f"{number} is too old", reason="SEQUENCE_EXPIRED")
                if self.outcomes[number] != content:
                    raise SequenceError(f"{number} had another content", reason="SEQUENCE_REUSED")
                self.num_repeats += 1
                return True, fault
            self.last = number
            self.outcomes[number] = content
            if method == "push":
                self.applied[number] = np.frombuffer(row_ids, "<i8").tolist()
            self.outcomes.pop(number - WINDOW, None)
            self.closed.append((number, *ending))
            return False, fault

    def enter(self, method: str, header: common_pb2.RequestHeader, row_ids: bytes) -> Fault:
        """Notes a call and lets a fault happen that comes before it."""
        with self.lock:
            self.seen.append((method, header.number, np.frombuffer(row_ids, "<i8").tolist()))
            self.headers.append(header)
            if header.incarnation != self.incarnation:
                raise StaleState("another life", reason="NEW_INCARNATION")
            if self.is_closed:
                raise ClientClosed("client has left or was dropped")
            if header.epoch != self.epoch:
                raise StaleState("another map", reason="STALE_ROUTE")
            if self.held_after is not None and header.number > self.held_after:
                self.fired["held"] += 1
                raise ShardNotReady("the cluster is resharded", metadata={"resharding": "true"})
            own = self.faults_of.get(header.number)
            queue = own if own else self.faults
            fault = queue.popleft() if queue else None
            if isinstance(fault, ShardamError) and self._is_final(fault) and not self._may_refuse(method, header.number):
                fault = None
            if fault is not None:
                self.fired[fault if isinstance(fault, str) else type(fault).__name__] += 1
        if isinstance(fault, ShardamError):
            raise fault
        if isinstance(fault, threading.Event):
            fault.wait(MAX_GATE_S)
            return None
        if fault == FAIL_BEFORE:
            raise BrokenConnection
        return fault

    def _is_final(self, error: ShardamError) -> bool:
        """True: a shard has decided against a change for good; it was not applied there, and the number is open."""
        return not error.rule.retryable and not ends_client(error, is_member=self.group is not None)

    def _may_refuse(self, method: str, number: int) -> bool:
        """Whether a shard may refuse a call for good: a repeat or a gap is told before a change is looked at."""
        return method not in ("close", "arrive") and number in (0, self.last + 1) and self.staged is None

    def answer(self, request: _Request) -> tuple[embedding_pb2.ExchangeResponse, Fault]:
        """Does what a request says."""
        answer = embedding_pb2.ExchangeResponse(request_id=request.header.request_id)
        fault: Fault
        match request:
            case embedding_pb2.PullRequest():
                fault = self.enter("pull", request.header, request.row_ids)
                self.pulls.append(request)
                rows = self.weights(np.frombuffer(request.row_ids, "<i8"))
                answer.pull.MergeFrom(embedding_pb2.PullResponse(sections=request.sections, rows=rows.tobytes()))
                answer.pull.header.CopyFrom(self.header())
            case embedding_pb2.PullChangedRequest():
                fault = self.enter("pull_changed", request.header, request.row_ids)
                self.answer_changed(request, answer.pull_changed)
            case embedding_pb2.PushRequest() if request.contribution:
                fault = self.require_group().stage(self, request, answer.push)
            case embedding_pb2.ArriveRequest():
                fault = self.require_group().arrive(self, request, answer.arrive)
            case embedding_pb2.PushRequest():
                tables = [section.table_id for section in request.sections]
                content = b"".join(part.SerializeToString() for part in (*request.options, *request.sections))
                content += request.row_ids + request.rows
                repeated, fault = self.change("push", request, ("push", tables), b"push" + content)
                self.rows_of[request.header.number] = request.rows
                steps = [common_pb2.TableStep(table_id=table, table_step=request.header.number) for table in tables]
                answer.push.MergeFrom(embedding_pb2.PushResponse(steps=steps, repeated_number=repeated))
                answer.push.header.CopyFrom(self.header())
            case embedding_pb2.CloseNumberRequest():
                kind = {embedding_pb2.CLOSE_KIND_SKIP: "skip", embedding_pb2.CLOSE_KIND_VOID: "void"}[request.kind]
                ending = (kind, list(request.table_ids))
                repeated, fault = self.change("close", request, ending, repr(ending).encode())
                answer.close_number.repeated_number = repeated
            case row_pb2.AssignRowsRequest():
                repeated, fault = self.change("assign", request, ("assign", []), b"assign" + request.row_ids + request.weight)
                answer.assign_rows.num_assigned = len(request.row_ids) // 8
                answer.assign_rows.repeated_number = repeated
            case row_pb2.DeleteRowsRequest():
                repeated, fault = self.change("delete", request, ("delete", []), b"delete" + request.row_ids)
                answer.delete_rows.num_deleted = 1
                answer.delete_rows.repeated_number = repeated
            case row_pb2.ClearMomentsRequest():
                repeated, fault = self.change("clear", request, ("clear", []), b"clear" + request.row_ids)
                answer.clear_moments.num_cleared = 1
                answer.clear_moments.repeated_number = repeated
        return answer, fault

    def weights(self, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Returns each row: its id, negative once it has changed, in all places."""
        values = [-row_id if row_id in self.changed else row_id for row_id in row_ids.tolist()]
        return np.repeat(np.array(values, "<f4"), INFO.spec.dim)

    def answer_changed(self, request: embedding_pb2.PullChangedRequest, answer: embedding_pb2.PullChangedResponse) -> None:
        """Answers with the rows that have changed since the request's change."""
        row_ids = np.frombuffer(request.row_ids, "<i8")
        is_changed = np.array([self.changed.get(row_id, 0) > request.change_number for row_id in row_ids.tolist()], bool)
        start = 0
        for section in request.sections:
            count = int(is_changed[start : start + section.num_rows].sum())
            answer.sections.add(table_id=section.table_id, num_rows=count, dtype=section.dtype)
            start += section.num_rows
        answer.header.CopyFrom(self.header())
        answer.positions = np.flatnonzero(is_changed).astype("<u4").tobytes()
        answer.rows = self.weights(row_ids[is_changed]).tobytes()

    def answer_unary(self, request: _Request, context: _Context) -> embedding_pb2.ExchangeResponse:
        """Answers a unary call, or fails it as told."""
        try:
            answer, fault = self.answer(request)
        except ShardamError as error:
            abort(context, error)
            raise
        except BrokenConnection:
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection refused")
            raise
        if fault == LOSE_ANSWER:
            context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return answer


def view_of(shards: list[ScriptedShard]) -> ClusterView:
    """Returns what Redis would say of the shards now."""
    entries = {shard.index: shard.entry() for shard in shards}
    return ClusterView(ClusterEntry(CLUSTER_ID, len(shards), seed=0), RouteMap(shards[0].epoch, len(shards)), entries)


@contextlib.contextmanager
def scripted_cluster(count: int) -> Iterator[tuple[ClusterView, list[ScriptedShard]]]:
    """Starts scripted shards and yields the view of them that Redis would give."""
    shards = [ScriptedShard(index) for index in range(count)]
    try:
        for shard in shards:
            shard.start()
        yield view_of(shards), shards
    finally:
        for shard in shards:
            shard.stop()


@contextlib.contextmanager
def scripted_session(
    count: int,
    shard_timeout_s: float = 20.0,
    client_lease_s: float = 30.0,
    group: GroupOptions | None = None,
    chunk_bytes: int | None = None,
) -> Iterator[tuple[Session, list[ScriptedShard]]]:
    """Starts scripted shards and opens a client on them. There is no Redis behind it: addresses stay as they are.

    With a group, the client joins it.
    """
    nowhere = "redis://127.0.0.1:1/0"
    with scripted_cluster(count) as (view, shards):
        scripted_group = None if group is None else ScriptedGroup(shards)
        for shard in shards:
            shard.client_lease_s = client_lease_s
            shard.group = scripted_group
        options = SessionOptions(nowhere, "scripted", None, shard_timeout_s, group)
        if chunk_bytes is not None:
            options = dataclasses.replace(options, chunk_bytes=chunk_bytes)
        session = Session(options, connect_redis(nowhere), Keys("scripted"))
        try:
            session.start(view, Deadline(shard_timeout_s))
            session.join(Deadline(shard_timeout_s))
            yield session, shards
        finally:
            session.close()
