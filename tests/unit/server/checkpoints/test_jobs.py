"""Home's jobs: one at a time of those that change the state's files, and what is known of each."""

from __future__ import annotations

import asyncio

import pytest

from shardam_proto.errors import CheckpointFailed, CheckpointRunning, UnknownCheckpoint
from shardam_proto.v1 import job_pb2
from shardam_server.shard.checkpoints.jobs import MAX_ENDED, Job, Jobs


def create() -> Job:
    return Job(job_pb2.JOB_KIND_CREATE)


async def nothing() -> None:
    return


def test_a_job_that_has_to_be_alone_is_refused_while_another_one_runs() -> None:
    async def run() -> None:
        jobs, go = Jobs(), asyncio.Event()
        first = create()
        first.checkpoint = "first"

        async def work() -> None:
            await go.wait()

        jobs.begin(first, work, alone=True)
        await asyncio.sleep(0)
        with pytest.raises(CheckpointRunning, match="first"):
            jobs.begin(create(), work, alone=True)
        jobs.begin(verify := Job(job_pb2.JOB_KIND_VERIFY), nothing, alone=False)
        await verify.ended.wait()
        go.set()
        await first.ended.wait()
        jobs.begin(second := create(), nothing, alone=True)
        await second.ended.wait()
        assert second.state == job_pb2.JOB_STATE_DONE

    asyncio.run(run())


def test_a_failed_job_says_why_and_the_next_one_may_begin() -> None:
    async def run() -> None:
        jobs, job = Jobs(), create()

        async def work() -> None:
            raise CheckpointFailed("no space in /x")

        jobs.begin(job, work, alone=True)
        await job.ended.wait()
        message = jobs.find(job.job_id).message()
        assert (message.state, message.reason, message.problem) == (
            job_pb2.JOB_STATE_FAILED,
            "CHECKPOINT_FAILED",
            "no space in /x",
        )
        assert jobs.last_checkpoint is job
        jobs.check_free()

    asyncio.run(run())


def test_a_defect_fails_its_job_and_nothing_else() -> None:
    async def run() -> None:
        jobs, job = Jobs(), create()

        async def work() -> None:
            raise ZeroDivisionError("defect")

        jobs.begin(job, work, alone=True)
        await job.ended.wait()
        assert job.message().reason == "INTERNAL"
        assert "defect" in job.problem

    asyncio.run(run())


def test_stopping_ends_jobs_as_failed() -> None:
    async def run() -> None:
        jobs, job = Jobs(), create()
        jobs.begin(job, asyncio.Event().wait, alone=True)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await jobs.stop()
        assert job.state == job_pb2.JOB_STATE_FAILED

    asyncio.run(run())


def test_old_jobs_are_forgotten_and_an_unknown_one_is_named() -> None:
    async def run() -> None:
        jobs = Jobs()
        first = create()
        for number in range(MAX_ENDED + 2):
            job = first if number == 0 else create()
            jobs.begin(job, nothing, alone=False)
            await job.ended.wait()
        with pytest.raises(UnknownCheckpoint, match=first.job_id):
            jobs.find(first.job_id)
        assert len(jobs.all()) <= MAX_ENDED + 1

    asyncio.run(run())
