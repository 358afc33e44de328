"""Work of a shard beside its changes: what is left of it once it is given up."""

from __future__ import annotations

import asyncio

from shardam_proto.v1 import checkpoint_pb2, job_pb2
from shardam_server.shard.checkpoints.tasks import Progress, Tasks


class _Writes:
    """Writes at once, and notes when that is taken back."""

    def __init__(self) -> None:
        self.discarded = False

    def run(self, progress: Progress) -> checkpoint_pb2.CheckpointShard:
        progress.add(3)
        return checkpoint_pb2.CheckpointShard(index=1)

    def discard(self) -> None:
        self.discarded = True


async def _done(tasks: Tasks, task_id: int, work: _Writes) -> None:
    tasks.start(task_id, work)
    async with asyncio.timeout(30):
        while tasks.describe(task_id) != job_pb2.JOB_STATE_DONE:
            await asyncio.sleep(0)


def test_a_task_that_is_given_up_by_its_id_takes_back_what_it_wrote() -> None:
    async def run() -> None:
        tasks, work = Tasks(), _Writes()
        await _done(tasks, 5, work)
        await tasks.drop(5)
        assert (work.discarded, tasks.knows(5)) == (True, False)

    asyncio.run(run())


def test_a_home_that_starts_gives_up_what_runs_and_not_what_is_part_of_complete_checkpoints() -> None:
    async def run() -> None:
        tasks, work = Tasks(), _Writes()
        await _done(tasks, 5, work)
        await tasks.drop(0)
        assert (work.discarded, tasks.knows(5)) == (False, False)

    asyncio.run(run())


def test_progress_never_has_more_done_than_there_is_in_all() -> None:
    progress = Progress(10)
    progress.add(7)
    assert (progress.done_bytes, progress.total_bytes) == (7, 10)
    progress.add(7)
    assert (progress.done_bytes, progress.total_bytes) == (14, 14)
    unknown = Progress()
    unknown.add(7)
    assert unknown.total_bytes == 0
