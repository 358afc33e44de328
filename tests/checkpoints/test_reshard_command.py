"""`shardam reshard` against a real Redis and a home that does as a test tells it."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent import futures

import grpc
import pytest
from shardam_testing.processes import Valkey, running_valkey
from shardam_testing.waiting import wait_for

from shardam_proto.limits import SERVER_OPTIONS
from shardam_proto.registry import ClusterEntry, Keys, ShardEntry, connect_redis, route_map_to_json
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc, job_pb2
from shardam_server.__main__ import main

CLUSTER = ClusterEntry("0123456789abcdef", 2, 0)
KEYS = Keys("default")


class ScriptedHome(checkpoint_pb2_grpc.CheckpointServiceServicer):
    """Home: answers Reshard, and GetJob by its script; each answer is given once, the last one for ever."""

    def __init__(self) -> None:
        self.jobs: list[job_pb2.Job] = []
        self.asked: list[int] = []
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.when_asked: Callable[[], None] = lambda: None

    def Reshard(  # noqa: N802 - the service's name
        self, request: checkpoint_pb2.ReshardRequest, context: grpc.ServicerContext
    ) -> checkpoint_pb2.ReshardResponse:
        if self.refusal is not None:
            context.abort(*self.refusal)
        self.asked.append(request.num_shards)
        return checkpoint_pb2.ReshardResponse(job=job_pb2.Job(id="7a"))

    def GetJob(  # noqa: N802 - the service's name
        self, request: checkpoint_pb2.GetJobRequest, context: grpc.ServicerContext
    ) -> checkpoint_pb2.GetJobResponse:
        assert request.id == "7a"
        job = self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
        self.when_asked()
        return checkpoint_pb2.GetJobResponse(job=job)


@dataclasses.dataclass
class Stage:
    """A cluster in Redis, and its home."""

    valkey: Valkey
    home: ScriptedHome
    server: grpc.Server
    address: str

    def put(self, num_shards: int, incarnation: int, *, epoch: int = 1, indexes: range | None = None) -> None:
        """Writes a cluster; its shards, or some of them, are registered as ready."""
        with contextlib.closing(connect_redis(self.valkey.url)) as redis:
            redis.set(KEYS.cluster_entry, dataclasses.replace(CLUSTER, num_shards=num_shards).to_json())
            redis.set(KEYS.route_map, route_map_to_json(RouteMap(epoch, num_shards)))
            for index in indexes if indexes is not None else range(num_shards):
                entry = ShardEntry(index, self.address, "127.0.0.1:2", incarnation + index, 5, "cpu", 1, ready=True)
                redis.set(KEYS.shard(index), entry.to_json())

    def forget(self, indexes: range) -> None:
        with contextlib.closing(connect_redis(self.valkey.url)) as redis:
            redis.delete(*(KEYS.shard(index) for index in indexes))

    def end_home(self) -> None:
        """Breaks off the call under way, too."""
        self.server.stop(None)

    def run(self, *flags: str) -> int:
        return main(["reshard", "--redis", self.valkey.url, "--shard-timeout-s", "10", *flags])


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def stage(valkey: Valkey) -> Iterator[Stage]:
    with contextlib.closing(valkey.client()) as connection:
        connection.flushall()
    home = ScriptedHome()  # type: ignore[abstract]  # the other methods are not called
    server = grpc.server(futures.ThreadPoolExecutor(4), options=SERVER_OPTIONS)
    checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server(home, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield Stage(valkey, home, server, f"127.0.0.1:{port}")
    finally:
        server.stop(None).wait()


def running(phase: str, done: int = 0, total: int = 0) -> job_pb2.Job:
    return job_pb2.Job(id="7a", state=job_pb2.JOB_STATE_RUNNING, phase=phase, done_bytes=done, total_bytes=total)


def test_it_says_how_far_home_is_and_ends_when_all_new_shards_serve_though_home_has_ended(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.put(2, 100)
    stage.home.jobs = [
        running("brings all shards to the same changes"),
        running("writes files", 1, 4),
        running("decides"),
        running(""),
    ]

    def end_with_the_move() -> None:
        if len(stage.home.jobs) == 1:
            stage.put(4, 100, epoch=2, indexes=range(0))
            stage.end_home()

    stage.home.when_asked = end_with_the_move
    outcome: list[int] = []
    said: list[str] = []

    def heard(text: str) -> bool:
        said.append(capsys.readouterr().out)
        return text in "".join(said)

    command = threading.Thread(target=lambda: outcome.append(stage.run("--shards", "4")))
    command.start()
    wait_for("the command to wait for new shards", lambda: heard("shards 0, 1, 2, 3 to start"), 60)
    stage.put(4, 200, epoch=2, indexes=range(3))
    wait_for("the command to wait for the last one", lambda: heard("waits for shard 3 to start"), 60)
    assert outcome == []
    stage.put(4, 200, epoch=2)
    command.join(60)
    said.append(capsys.readouterr().out)
    lines = "".join(said).splitlines()
    assert outcome == [0]
    assert stage.home.asked == [4]
    assert lines[:3] == [
        "job 7a: cluster 'default' moves from 2 to 4 shards; workers wait and go on",
        "brings all shards to the same changes",
        "writes files (25 %)",
    ]
    assert lines[-1] == "cluster 'default' serves on 4 shards"


def test_a_move_that_fails_is_an_error_with_homes_words(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.put(2, 100)
    stage.home.jobs = [job_pb2.Job(id="7a", state=job_pb2.JOB_STATE_FAILED, problem="shard 1 could not write: no space")]
    assert stage.run("--shards", "3") == 1
    assert capsys.readouterr().err == "shardam: nothing has moved: shard 1 could not write: no space\n"


def test_a_home_that_is_started_anew_before_it_was_decided_is_an_error(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.put(2, 100)
    stage.home.jobs = [running("writes files")]

    def start_anew() -> None:
        stage.put(2, 300)
        stage.end_home()

    stage.home.when_asked = start_anew
    assert stage.run("--shards", "3") == 1
    assert "nothing has moved; run the command again" in capsys.readouterr().err


def test_without_waiting_it_ends_once_it_has_begun(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.put(2, 100)
    assert stage.run("--shards", "1", "--no-wait") == 0
    assert stage.home.asked == [1]
    assert capsys.readouterr().out.startswith("job 7a: cluster 'default' moves from 2 to 1 shards")


def test_the_number_that_there_is_already_is_said_and_is_no_error(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.put(2, 100)
    assert stage.run("--shards", "2") == 0
    assert stage.home.asked == []
    assert capsys.readouterr().out == "cluster 'default' has 2 shards already: there is nothing to move\n"


@pytest.mark.parametrize("count", ["0", "4097", "-1", "two"])
def test_a_number_that_cannot_be_is_refused_with_its_bounds(
    stage: Stage, capsys: pytest.CaptureFixture[str], count: str
) -> None:
    assert stage.run(f"--shards={count}") == 2
    assert "--shards" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_or_has_no_home_is_an_error(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    assert stage.run("--shards", "2") == 1
    assert "does not exist in this Redis" in capsys.readouterr().err
    stage.put(2, 100)
    stage.forget(range(1))
    assert stage.run("--shards", "3") == 1
    assert "shard 0 of cluster 'default', which moves the rows, is not registered" in capsys.readouterr().err


def test_what_home_refuses_is_an_error_with_its_words(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    stage.put(2, 100)
    stage.home.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "shard 1 is LOST")
    assert stage.run("--shards", "3") == 1
    assert "shard 1 is LOST" in capsys.readouterr().err


def test_a_wait_that_takes_too_long_ends_and_says_that_the_move_goes_on(
    stage: Stage, capsys: pytest.CaptureFixture[str]
) -> None:
    stage.put(2, 100)
    stage.home.jobs = [running("writes files")]
    assert stage.run("--shards", "3", "--wait-s", "0.3") == 1
    assert "waited for 0.3 s (--wait-s): job 7a of home goes on" in capsys.readouterr().err


def test_ctrl_c_ends_the_wait_and_says_that_the_move_goes_on(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(move: object, state: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardam_server.reshard_command._Move._pause", interrupt)
    stage.put(2, 100)
    stage.home.jobs = [running("writes files")]
    assert stage.run("--shards", "3") == 130
    assert "the move to 3 shards goes on in the cluster" in capsys.readouterr().err
