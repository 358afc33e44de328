"""Work of a shard that goes on beside its changes, on a thread each: writing a cut, checking files."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from typing import Protocol

from shardam_proto.errors import ShardamError
from shardam_proto.v1 import checkpoint_pb2, job_pb2

logger = logging.getLogger(__name__)

MAX_ENDED = 16
"""Ended tasks that are remembered: home asks for each at once, and for few at a time."""


class Dropped(Exception):
    """The task was given up."""


class Progress:
    """How far a task is, and whether it is to go on; from any thread.

    Attributes:
        done_bytes: bytes read or written so far.
        total_bytes: bytes there will be, at least those that are done; zero: not known.
    """

    def __init__(self, total_bytes: int = 0) -> None:
        self.done_bytes = 0
        self.total_bytes = total_bytes
        self._dropped = threading.Event()

    def add(self, num_bytes: int) -> None:
        """Notes bytes that are done.

        Raises:
            Dropped: the task was given up.
        """
        if self._dropped.is_set():
            raise Dropped
        self.done_bytes += num_bytes
        if self.total_bytes:  # an estimate, of which small files have less than their headers
            self.total_bytes = max(self.total_bytes, self.done_bytes)

    def drop(self) -> None:
        """Has the task end at its next step."""
        self._dropped.set()


class Work(Protocol):
    """What a task does; on a thread of its own."""

    def run(self, progress: Progress) -> checkpoint_pb2.CheckpointShard | None:
        """Does it; returns what was written, if anything was.

        Raises:
            ShardamError: it failed; nothing of it is left.
            Dropped: it was given up; nothing of it is left.
        """
        ...

    def discard(self) -> None:
        """Removes what it has written; called for a task that is given up after it was done."""
        ...


@dataclasses.dataclass
class _Task:
    work: Work
    progress: Progress
    written: checkpoint_pb2.CheckpointShard | None = None
    error: ShardamError | None = None
    done: bool = False
    running: asyncio.Task[None] | None = None


class Tasks:
    """The tasks of one shard. Used on the event loop."""

    def __init__(self) -> None:
        self._tasks: dict[int, _Task] = {}

    def knows(self, task_id: int) -> bool:
        """Whether a task was begun, and not given up."""
        return task_id in self._tasks

    def start(self, task_id: int, work: Work, total_bytes: int = 0) -> None:
        """Begins a task; one that was begun already goes on."""
        if task_id in self._tasks:
            return
        task = self._tasks[task_id] = _Task(work, Progress(total_bytes))
        task.running = asyncio.create_task(self._run(task))
        ended = [one for one, known in self._tasks.items() if known.done]
        for one in ended[:-MAX_ENDED]:
            del self._tasks[one]

    async def _run(self, task: _Task) -> None:
        try:
            task.written = await asyncio.to_thread(task.work.run, task.progress)
        except Dropped:
            task.error = ShardamError("the task was given up")
        except ShardamError as error:
            logger.warning("%s", error.message)
            task.error = error
        except Exception as error:  # the thread's edge: home is told, the shard goes on
            logger.error("a task of checkpoints failed", exc_info=error)
            task.error = ShardamError(f"{type(error).__name__}: {error}; the shard's log has the details")
        finally:
            task.done = True

    def describe(self, task_id: int) -> job_pb2.JobState.ValueType:
        """Returns how far a task is; JOB_STATE_UNSPECIFIED: it is not known."""
        task = self._tasks.get(task_id)
        if task is None:
            return job_pb2.JOB_STATE_UNSPECIFIED
        if not task.done:
            return job_pb2.JOB_STATE_RUNNING
        return job_pb2.JOB_STATE_DONE if task.error is None else job_pb2.JOB_STATE_FAILED

    def progress(self, task_id: int) -> Progress:
        """Returns how many bytes of a known task are done."""
        return self._tasks[task_id].progress

    def result(self, task_id: int) -> tuple[checkpoint_pb2.CheckpointShard | None, ShardamError | None]:
        """Returns what a known task wrote, and why it failed."""
        return self._tasks[task_id].written, self._tasks[task_id].error

    async def drop(self, task_id: int) -> None:
        """Gives a task up, or all with id zero, and waits until it has ended.

        Nothing is left of one that is named. Of all, what was written whole stays: it may be part of a complete checkpoint, and
        home removes the folders of those that are not.
        """
        for one in [task_id] if task_id else list(self._tasks):
            task = self._tasks.get(one)
            if task is None:
                continue
            task.progress.drop()
            if task.running is not None:
                await asyncio.wait({task.running})
            if task.error is None and task_id:
                await asyncio.to_thread(task.work.discard)
            self._tasks.pop(one, None)

    async def stop(self) -> None:
        """Ends all tasks; for a shard that ends. What is written whole stays."""
        for task in self._tasks.values():
            task.progress.drop()
        running = {task.running for task in self._tasks.values() if task.running is not None}
        if running:
            await asyncio.wait(running)
