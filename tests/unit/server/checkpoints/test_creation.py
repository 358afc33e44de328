"""How home makes a checkpoint: which requests may join one, and what becomes of tries that fail."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import cast

import pytest
from shardam_testing.matrix import num_threads

from shardam_proto.errors import CheckpointRunning, StaleState
from shardam_proto.registry import ClusterEntry, Plan
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import checkpoint_pb2, cut_pb2, job_pb2, shard_pb2
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.creation import Creation, Terms
from shardam_server.shard.checkpoints.cutting import Cutting
from shardam_server.shard.checkpoints.extras import Extras
from shardam_server.shard.checkpoints.file_names import segment_name
from shardam_server.shard.checkpoints.home import HomeCheckpoints, Replacing, Reshards, Schedule
from shardam_server.shard.checkpoints.jobs import Job, ReportProgress
from shardam_server.shard.context import ShardContext
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.metrics import ShardMetrics
from shardam_server.shard.peer_cuts import PeerCuts
from shardam_server.shard.records import CpuDevice
from shardam_server.shard.sequencer import Sequencer
from shardam_server.shard.state import ShardState
from shardam_server.shard.tenure import Tenure


class OneShard:
    """A shard with one small file, as home's calls see it."""

    def __init__(self, root: Path, terms: Terms | None = None) -> None:
        self.root = root
        self.folder = ""
        self.shards = range(1)
        self.terms = terms or Terms()
        self.task_ids: list[int] = []
        self.dropped: list[int] = []
        self.joinable_at_release: list[bool] = []
        self.cut_errors: list[StaleState] = []

    async def refresh(self) -> None:
        """Nothing moves here."""

    async def hold(self, index: int, request: cut_pb2.HoldRequest) -> cut_pb2.HoldResponse:
        return cut_pb2.HoldResponse(root_id="r")

    async def advance(self, index: int, request: cut_pb2.AdvanceRequest, hold_s: float) -> cut_pb2.AdvanceResponse:
        return cut_pb2.AdvanceResponse()

    async def cut(self, index: int, request: cut_pb2.CutRequest) -> cut_pb2.CutResponse:
        self.task_ids.append(request.task_id)
        self.folder = request.folder
        if self.cut_errors:
            raise self.cut_errors.pop(0)
        return cut_pb2.CutResponse()

    async def release(self, index: int, request: cut_pb2.ReleaseRequest) -> cut_pb2.ReleaseResponse:
        self.joinable_at_release.append(not self.terms.cut)
        return cut_pb2.ReleaseResponse()

    async def drop_task(self, index: int, request: cut_pb2.DropTaskRequest) -> cut_pb2.DropTaskResponse:
        self.dropped.append(request.task_id)
        return cut_pb2.DropTaskResponse()

    async def get_task(self, index: int, request: cut_pb2.GetTaskRequest) -> cut_pb2.GetTaskResponse:
        assert request.task_id == self.task_ids[-1]
        written = checkpoint_pb2.CheckpointShard(index=0, host_name="h", folder=self.folder)
        file = written.files.add(name=segment_name(0, 1, 0), size_bytes=1, xxh3="0" * 32)
        (self.root / self.folder / file.name).write_bytes(b"x")
        return cut_pb2.GetTaskResponse(state=job_pb2.JOB_STATE_DONE, written=written)


def shard() -> ShardContext:
    identity = ShardIdentity(0, cluster=ClusterEntry("c" * 32, 1, 0), route_map=RouteMap(epoch=1, num_shards=1))
    device = CpuDevice(num_threads())
    return ShardContext(
        identity,
        ShardState(device),
        Sequencer(),
        ShardMetrics("test", 0),
        device,
        Tenure(3600.0),
        serving=shard_pb2.SERVING_STATE_SERVING,
    )


def creation(home: ShardContext, shards: OneShard, catalogue: Catalogue) -> Creation:
    cuts = cast(PeerCuts, shards)
    return Creation(home.identity, Cutting(cuts, 2.0), cuts, catalogue, Extras(catalogue.folder), 0)


class Restores:
    """Counts restores."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def run(
        self,
        name: str,
        options: checkpoint_pb2.RestoreOptions,
        *,
        only_if_empty: bool,
        report_progress: ReportProgress,
        alone: AbstractAsyncContextManager[None],
    ) -> job_pb2.RestoreReport:
        async with alone:
            self.names.append(name)
        return job_pb2.RestoreReport(name=name)


def checkpoints(home: ShardContext, root: Path, shards: OneShard, restores: Restores | None = None) -> HomeCheckpoints:
    catalogue = Catalogue(root, "oak")
    catalogue.prepare()
    make = creation(home, shards, catalogue)
    replacing = Replacing(restores or Restores(), cast(Reshards, None), lambda: None)
    cutting = Cutting(cast(PeerCuts, shards), 2.0)
    return HomeCheckpoints(home, catalogue, Extras(catalogue.folder), make, cutting, replacing, Schedule(0.0, 1.0))


def test_nobody_joins_a_checkpoint_once_a_shard_may_have_gone_on(tmp_path: Path) -> None:
    async def run() -> None:
        terms = Terms()
        shards = OneShard(tmp_path, terms)
        await creation(shard(), shards, Catalogue(tmp_path, "oak")).run(Job(job_pb2.JOB_KIND_CREATE), terms)
        assert shards.joinable_at_release == [False]

    asyncio.run(run())


def test_a_try_that_fails_leaves_nothing_that_the_next_one_could_take_for_its_own(tmp_path: Path) -> None:
    async def run() -> None:
        terms = Terms()
        shards = OneShard(tmp_path, terms)
        shards.cut_errors = [StaleState("the hold ran out", reason="HOLD_EXPIRED")]
        await creation(shard(), shards, Catalogue(tmp_path, "oak")).run(Job(job_pb2.JOB_KIND_CREATE), terms)
        assert shards.joinable_at_release == [True, False]
        assert len(set(shards.task_ids)) == 2
        assert shards.dropped == shards.task_ids[:1]

    asyncio.run(run())


def test_a_checkpoint_is_the_newest_even_if_the_clock_was_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        catalogue = Catalogue(tmp_path, "oak")
        make = creation(shard(), OneShard(tmp_path), catalogue)
        monkeypatch.setattr("time.time", lambda: 5000.0)
        await make.run(Job(job_pb2.JOB_KIND_CREATE), Terms("former"))
        monkeypatch.setattr("time.time", lambda: 1000.0)
        await make.run(Job(job_pb2.JOB_KIND_CREATE), Terms("later"))
        latest = catalogue.latest()
        assert latest is not None
        assert latest.name == "later"

    asyncio.run(run())


def test_a_repeat_that_comes_while_the_first_call_is_looked_at_begins_nothing_more(tmp_path: Path) -> None:
    async def run() -> None:
        home = checkpoints(shard(), tmp_path, OneShard(tmp_path))
        home.extras.put(b"e" * 16, 0, 1, b"x")
        request = checkpoint_pb2.CreateCheckpointRequest(request_key=b"k" * 16, extra_id=b"e" * 16)
        first, repeat = await asyncio.gather(home.create(request, 60.0), home.create(request, 60.0))
        assert first is repeat
        await first.ended.wait()
        assert first.error is None
        await home.stop()

    asyncio.run(run())


@pytest.mark.parametrize("named", ["one", "latest", "oak/one", "./oak/../oak/one"])
def test_what_a_job_uses_is_not_deleted(tmp_path: Path, named: str) -> None:
    async def run() -> None:
        home = checkpoints(shard(), tmp_path, OneShard(tmp_path))
        restore = Job(job_pb2.JOB_KIND_RESTORE, named)
        home.jobs.add(restore)
        with pytest.raises(CheckpointRunning, match=restore.job_id):
            home.check_unused("one")
        restore.ended.set()
        home.check_unused("one")
        home.jobs.add(Job(job_pb2.JOB_KIND_RESHARD))
        with pytest.raises(CheckpointRunning):
            home.check_unused("reshard-20260101T000000-to-2-abcd")

    asyncio.run(run())


def test_what_the_cluster_goes_on_from_is_not_deleted_before_all_serve(tmp_path: Path) -> None:
    async def run() -> None:
        context = shard()
        home = checkpoints(context, tmp_path, OneShard(tmp_path))
        context.identity.plan = Plan("p", 1, 1, 1, 0, "oak/one", 5)
        home.check_unused("one")
        context.serving = shard_pb2.SERVING_STATE_STARTING
        with pytest.raises(CheckpointRunning, match="goes on from"):
            home.check_unused("one")
        home.check_unused("two")

    asyncio.run(run())


def test_a_restore_that_is_asked_for_again_replaces_nothing_once_more(tmp_path: Path) -> None:
    async def run() -> None:
        restores = Restores()
        home = checkpoints(shard(), tmp_path, OneShard(tmp_path), restores)
        request = checkpoint_pb2.RestoreCheckpointRequest(request_key=b"k" * 16, name="one")
        first = home.restore(request)
        assert home.restore(request) is first
        await first.ended.wait()
        assert home.restore(request) is first
        request.request_key = b"l" * 16
        again = home.restore(request)
        await again.ended.wait()
        assert restores.names == ["one", "one"]

    asyncio.run(run())
