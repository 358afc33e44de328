"""Reads of weights from all shards at once, over their streams and behind this client's changes.

Every shard is asked before any answer is waited for, by the thread that reads; only what has to be asked again takes threads.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from shardam._arrays import Float32s
from shardam._calls import Question, StreamCall
from shardam._changed_rows import ChangedQuestion, ShardVersion, Versions, are_current, oldest
from shardam._membership import step_of_read
from shardam._pull_plan import PullQuestion, ShardRead, TableRead, Wanted, plan_reads
from shardam._session import Session
from shardam._shards import Shards
from shardam_proto.errors import ShardUnreachable
from shardam_proto.limits import MAX_MESSAGE_BYTES
from shardam_proto.v1 import common_pb2

__all__ = ["PendingRead", "Versions", "read_changed", "read_weights", "read_weights_later"]


def read_weights(session: Session, wanted: Wanted, *, training: bool = False, behind: int = 0) -> list[Float32s]:
    """Reads weights of any number of tables, one message per shard where the answer fits one.

    Args:
        session: the client.
        wanted: tables and ids, int64 [N], duplicates allowed.
        training: True: a gradient of what is read will be pushed, so a member of a bounded group waits until no other is too
            far behind. In a sync group any read waits until each shard has applied what this client knows to be decided.
        behind: number of a change of this client that the read has to see; 0: of none.

    Returns:
        float32 [N, dim] for each, writable.

    Raises:
        ShardamError: as Session.answer; or a shard has read before the change.
    """
    read = read_weights_later(session, wanted, training=training)
    rows = read.result()
    _check_seen(read.last_numbers, behind)
    return rows


def read_weights_later(session: Session, wanted: Wanted, *, training: bool = False) -> PendingRead:
    """Asks for weights as read_weights does, and does not wait for them.

    Raises:
        ShardamError: the client has ended.
    """
    return PendingRead(session, wanted, step_of_read(session, training=training))


class PendingRead:
    """A read that is under way; made by read_weights_later. One that nobody waits for costs nothing but its answer.

    Attributes:
        versions: which rows they are, for read_changed; once result has returned.
        last_numbers: the last of this client's changes that each answer saw; likewise.
    """

    def __init__(self, session: Session, wanted: Wanted, step: int) -> None:
        self.versions: Versions = {}
        self.last_numbers: list[int] = []
        self._session = session
        self._wanted = wanted
        self._step = step
        self._rows: list[Float32s] | None = None
        self._begin(session.shards)

    def result(self) -> list[Float32s]:
        """Waits for the rows; may be called again.

        Returns:
            float32 [N, dim] of each table, writable.

        Raises:
            ShardamError: as Session.answer.
        """
        if self._rows is None:
            started = time.perf_counter()
            self._rows = self._session.ask(self._finish)
            self._session.timings.add("wait", time.perf_counter() - started)
        return self._rows

    def _begin(self, shards: Shards) -> None:
        session = self._session
        self._shards = shards
        with session.timings.measured("split"):
            self._tables, reads = _split(shards, self._wanted)
            questions = [PullQuestion(read, session.options.chunk_bytes) for read in reads]
        self._calls = _send_all(session, reads, questions, self._step)

    def _finish(self, shards: Shards) -> list[Float32s]:
        if shards is not self._shards:
            self._begin(shards)
        headers = _answers(self._session, self._calls)
        answered = zip(self._calls, headers, strict=True)
        self.versions = oldest([(call.link.index, ShardVersion.of(header)) for call, header in answered])
        self.last_numbers = [header.last_number for header in headers]
        return [table.result() for table in self._tables]


def read_changed(
    session: Session,
    wanted: Wanted,
    versions: Versions,
    rows: Sequence[Float32s],
    *,
    training: bool = False,
    behind: int = 0,
) -> int:
    """Brings rows that were read before to the state of now.

    Args:
        session: the client.
        wanted: as they were read.
        versions: of that read.
        rows: its results; rows that have changed since are replaced in place. After an error they are of no single moment.
        training: as for read_weights.
        behind: as for read_weights.

    Returns:
        How many rows came: those that a change has touched since, or all, if a shard cannot say.

    Raises:
        ShardamError: as read_weights.
    """
    change = functools.partial(_replace_changed, session, wanted, versions, rows, step_of_read(session, training=training))
    num_changed = session.ask(functools.partial(change, behind))
    if num_changed is not None:
        return num_changed
    for old, new in zip(rows, read_weights(session, wanted, training=training, behind=behind), strict=True):
        old[...] = new
    return sum(len(old) for old in rows)


def _replace_changed(
    session: Session,
    wanted: Wanted,
    versions: Versions,
    rows: Sequence[Float32s],
    step: int,
    behind: int,
    shards: Shards,
) -> int | None:
    """Returns how many rows came; None: a shard is not in the state that was read, and all have to be read."""
    started = time.perf_counter()
    tables, reads = _split(shards, wanted)
    if not are_current(versions, shards, reads):
        return None
    rows_of = dict(zip(tables, rows, strict=True))
    since = [versions[read.link.index] for read in reads]
    chunk_bytes = session.options.chunk_bytes
    questions = [ChangedQuestion(read, version, rows_of, chunk_bytes) for read, version in zip(reads, since, strict=True)]
    session.timings.add("split", time.perf_counter() - started)
    with session.timings.measured("wait"):
        headers = _answers(session, _send_all(session, reads, questions, step))
    _check_seen([header.last_number for header in headers], behind)
    for version, header in zip(since, headers, strict=True):
        now = ShardVersion.of(header)
        if not now.same_state(version) or now.change_number < version.change_number:
            return None
    return sum(question.num_changed for question in questions)


def _split(shards: Shards, wanted: Wanted) -> tuple[list[TableRead], list[ShardRead]]:
    tables = [TableRead(info, row_ids, len(shards.links)) for info, row_ids in wanted]
    return tables, plan_reads(shards, tables, MAX_MESSAGE_BYTES)


def _send_all(session: Session, reads: Sequence[ShardRead], questions: Sequence[Question], step: int) -> list[StreamCall]:
    """Asks all shards, once; what goes wrong is told by whoever waits.

    Raises:
        ShardamError: the client has ended.
    """
    session.check()
    calls = [StreamCall(read.link, question, step, session.timings) for read, question in zip(reads, questions, strict=True)]
    for call in calls:
        session.fill_header(call, session.try_s)
        call.send(session.try_s)
    return calls


def _check_seen(last_numbers: Sequence[int], number: int) -> None:
    """Refuses a read of which a shard's part came before a change that it has to see.

    Raises:
        ShardUnreachable: it did.
    """
    if min(last_numbers, default=number) < number:
        raise ShardUnreachable(f"a read that has to see change {number} saw changes up to {min(last_numbers)}; read again")


def _answers(session: Session, calls: Sequence[StreamCall]) -> list[common_pb2.ResponseHeader]:
    """Waits for all; those that fail are asked again, side by side, and the first problem is raised after all have ended."""
    try:
        failed = [call for call in calls if call.has_failed()]
        if len(failed) < 2:
            return [session.answer(call, call.wait) for call in calls]
        tasks: list[Callable[[], object]] = [functools.partial(session.answer, call, call.wait) for call in failed]
        for result in session.readers.run_all(tasks):
            if isinstance(result, BaseException):
                raise result
        return [call.wait() for call in calls]
    except BaseException:
        for call in calls:
            call.abandon()
        raise
