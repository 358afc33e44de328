"""What a client does while home makes a checkpoint or goes back to one: waits, asks again, and says why it failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from shardam_testing.scripted_home import DONE, FAILED, RUNNING, WAITING, HomeProcess, ScriptedHome, scripted_home
from shardam_testing.scripted_members import PLACE, scripted_member

from shardam import Cluster, _checkpoint_job, _checkpointing
from shardam._extra import encode_extra
from shardam.errors import (
    BadOption,
    CheckpointDamaged,
    CheckpointFailed,
    CheckpointRunning,
    ClientClosed,
    ShardNotReady,
    StepTimeout,
    UnknownCheckpoint,
    WrongRole,
)
from shardam_proto.v1 import job_pb2


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[HomeProcess]:
    with scripted_home(monkeypatch) as process:
        yield process


@pytest.fixture
def home(process: HomeProcess) -> ScriptedHome:
    return process.home


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with scripted_member(1, None, monkeypatch) as member:
        yield member.cluster


def job(
    state: job_pb2.JobState.ValueType,
    kind: job_pb2.JobKind.ValueType = job_pb2.JOB_KIND_CREATE,
    *,
    phase: str = "",
    problem: str = "",
    reason: str = "",
) -> job_pb2.Job:
    return job_pb2.Job(id="j1", kind=kind, state=state, checkpoint="c1", phase=phase, problem=problem, reason=reason)


def test_a_checkpoint_is_asked_for_again_until_the_state_is_cut_and_then_waited_for(
    home: ScriptedHome, cluster: Cluster
) -> None:
    home.created = [job(WAITING), job(WAITING), job(RUNNING)]
    home.jobs = [job(RUNNING), job(DONE)]
    done = cluster.checkpoint(name="c1")
    assert (done.name, done.state) == ("c1", "done")
    assert len(home.creates) == 3
    assert len({request.request_key for request in home.creates}) == 1
    assert home.creates[0].header.client_id == cluster._session.client_id


def test_without_waiting_a_job_is_returned_that_says_how_far_it_is(home: ScriptedHome, cluster: Cluster) -> None:
    home.created = [job(RUNNING, phase="writes files")]
    begun = cluster.checkpoint(wait=False)
    assert (begun.state, begun.phase) == ("running", "writes files")
    home.jobs = [job_pb2.Job(id="j1", state=RUNNING, checkpoint="c1", done_bytes=3, total_bytes=9)]
    assert (begun.refresh().done_bytes, begun.total_bytes) == (3, 9)
    assert repr(begun) == "CheckpointJob('c1', running, 3 of 9 bytes)"
    with pytest.raises(CheckpointRunning, match=r"3 of 9 bytes\) has not ended within 0.2 s"):
        begun.wait(0.2)


def test_a_checkpoint_that_fails_says_why(home: ScriptedHome, cluster: Cluster) -> None:
    home.created = [job(RUNNING)]
    home.jobs = [job(FAILED, problem="shard 1 could not write its files: no space", reason="CHECKPOINT_FAILED")]
    with pytest.raises(CheckpointFailed, match="checkpoint 'c1' was not made: shard 1 could not write its files: no space"):
        cluster.checkpoint()


def test_another_job_is_waited_for_within_a_time(home: ScriptedHome, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    home.created, home.jobs = [job(RUNNING)], [job(DONE)]
    home.faults["create"].extend([CheckpointRunning("a checkpoint (c0, 40 % done) runs")] * 3)
    cluster.checkpoint()
    monkeypatch.setattr(_checkpoint_job, "OTHER_JOB_S", 0.2)
    home.faults["create"].extend([CheckpointRunning("a checkpoint (c0, 40 % done) runs")] * 100)
    with pytest.raises(CheckpointRunning, match=r"c0, 40 % done\) runs \(waited 0.2 s for it\)"):
        cluster.checkpoint()


def test_an_addition_is_brought_in_parts_and_named(
    home: ScriptedHome, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_checkpointing, "PART_BYTES", 100)
    home.created, home.jobs = [job(RUNNING)], [job(DONE)]
    extra = {"order": np.arange(200)}
    cluster.checkpoint(extra)
    assert home.brought == {home.creates[0].extra_id: encode_extra(extra)}


def test_an_addition_is_brought_again_to_a_home_that_was_started_anew(
    process: HomeProcess, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = process.home
    monkeypatch.setattr(_checkpointing, "PART_BYTES", 1000)
    home.created, home.jobs = [job(WAITING), job(RUNNING)], [job(DONE)]
    actual, restarts = _checkpointing._bring, iter([process.restart])

    def bring(*args: object) -> bytes:
        extra_id = actual(*args)  # type: ignore[arg-type]
        for restart in restarts:
            restart()
            return extra_id
        return extra_id

    monkeypatch.setattr(_checkpointing, "_bring", bring)
    cluster.checkpoint({"order": np.arange(1000)})
    assert list(home.brought) == [home.creates[-1].extra_id]


def test_what_cannot_be_is_refused_as_home_says_it(home: ScriptedHome, cluster: Cluster) -> None:
    home.faults["create"].extend([BadOption("the name 'c1' is taken")] * 9)
    with pytest.raises(BadOption, match="is taken"):
        cluster.checkpoint(name="c1")
    assert len(home.faults["create"]) == 8
    home.faults["put"].extend([BadOption("no folder")] * 9)
    with pytest.raises(BadOption, match="no folder"):
        cluster.checkpoint(b"x")


@pytest.mark.parametrize("name", ["", 7, b"c1"])
def test_a_name_that_is_none_is_refused_before_anything_is_sent(home: ScriptedHome, cluster: Cluster, name: str) -> None:
    for call in (cluster.restore, cluster.extra, cluster.verify, cluster.delete_checkpoint):
        with pytest.raises(BadOption, match="a checkpoint is named by a string that is not empty"):
            call(name)
    with pytest.raises(BadOption, match="a checkpoint is named by a string that is not empty"):
        cluster.checkpoint(name=name)
    with pytest.raises(BadOption, match=r"tables takes a list of names, got 'items'; write \['items'\]"):
        cluster.restore(tables="items")
    assert home.headers == []


def test_home_is_looked_up_again_while_it_is_not_there(process: HomeProcess, cluster: Cluster) -> None:
    home = process.home
    home.complete = ["c2", "c1"]
    home.faults["list"].extend([ShardNotReady("starts"), WrongRole("shard 1 is not home")])
    assert [info.name for info in cluster.checkpoints()] == ["c2", "c1"]
    process.restart()
    assert [info.name for info in cluster.checkpoints()] == ["c2", "c1"]


def test_a_job_that_a_new_home_does_not_know_is_looked_up_among_complete_checkpoints(
    home: ScriptedHome, cluster: Cluster
) -> None:
    home.created = [job(RUNNING)]
    first, second = cluster.checkpoint(wait=False), cluster.checkpoint(wait=False)
    with pytest.raises(CheckpointFailed, match="the home shard was started anew"):
        first.wait()
    home.complete = ["c1"]
    assert second.wait().state == "done"


def test_members_of_a_group_say_after_which_step_they_ask(home: ScriptedHome, monkeypatch: pytest.MonkeyPatch) -> None:
    home.created, home.jobs = [job(RUNNING)], [job(DONE)]
    with scripted_member(1, PLACE, monkeypatch) as member:
        member.cluster.checkpoint({"rank": 1})
        header = home.creates[0].header
        assert (header.rank, header.step) == (1, member.cluster.group_step)
        home.faults["create"].append(StepTimeout("ranks [2] of group 'workers' did not ask for a checkpoint"))
        with pytest.raises(StepTimeout, match="ranks \\[2\\]"):
            member.cluster.checkpoint()
        home.extra = encode_extra({"rank": 1})
        assert member.cluster.extra() == {"rank": 1}


def test_a_client_that_has_ended_while_it_waits_for_others_says_so(home: ScriptedHome, cluster: Cluster) -> None:
    home.created = [job(WAITING)]
    cluster._session.fail(ClientClosed("it was silent"))
    with pytest.raises(ClientClosed, match="it was silent"):
        cluster.checkpoint()


# -- going back


def report() -> job_pb2.Job:
    done = job(DONE, job_pb2.JOB_KIND_RESTORE)
    done.report.name, done.report.timeline = "c1", 2
    loaded = done.report.tables.add(table="t", outcome=job_pb2.TABLE_OUTCOME_LOADED, num_rows=3, table_step=7)
    loaded.last_options.lr = 0.5
    done.report.tables.add(table="u", outcome=job_pb2.TABLE_OUTCOME_KEPT)
    return done


@pytest.mark.case("C017")
def test_a_restore_reports_what_it_did_and_the_object_goes_on_as_a_new_client(
    home: ScriptedHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.created, home.jobs = [job(WAITING, job_pb2.JOB_KIND_RESTORE)], [report()]
    with scripted_member(1, None, monkeypatch) as member:
        cluster = member.cluster
        former = cluster._session
        found = cluster.restore("c1", tables=["t"], weights_only=True)
        options = home.restores[0].options
        assert (home.restores[0].name, list(options.tables), options.weights_only, options.read_only) == (
            "c1",
            ["t"],
            True,
            False,
        )
        assert (found.timeline, found.table("t").table_step, found.table("u").outcome) == (2, 7, "kept")
        last = found.table("t").last_options
        assert last is not None
        assert last.lr == 0.5
        with pytest.raises(KeyError):
            found.table("v")
        assert former.ended
        assert cluster._session is not former
        assert len(member.opened) == 2
        cluster._session.check()


def test_a_restore_that_fails_raises_what_a_caller_can_do_something_about(home: ScriptedHome, cluster: Cluster) -> None:
    former = cluster._session
    home.created = [job(RUNNING, job_pb2.JOB_KIND_RESTORE)]
    home.jobs = [job(FAILED, job_pb2.JOB_KIND_RESTORE, problem="shard-0-of-1-000.rows differs", reason="CHECKPOINT_DAMAGED")]
    with pytest.raises(CheckpointDamaged, match="rows differs"):
        cluster.restore()
    home.faults["restore"].append(UnknownCheckpoint("there is no checkpoint"))
    with pytest.raises(UnknownCheckpoint):
        cluster.restore()
    assert cluster._session is former
    former.check()


def test_a_client_that_has_ended_may_restore(home: ScriptedHome, monkeypatch: pytest.MonkeyPatch) -> None:
    home.created, home.jobs = [job(RUNNING, job_pb2.JOB_KIND_RESTORE)], [report()]
    with scripted_member(1, None, monkeypatch) as member:
        member.cluster._session.fail(ClientClosed("silent"))
        member.cluster.restore()
        member.cluster._session.check()


def test_a_closed_object_is_not_opened_by_a_restore(home: ScriptedHome, cluster: Cluster) -> None:
    cluster.close()
    with pytest.raises(ClientClosed, match="connect again"):
        cluster.restore()
    with contextlib.suppress(ClientClosed):
        cluster.checkpoint()
    assert home.headers == []


def test_an_addition_of_many_parts_is_read_from_the_checkpoint_that_was_the_newest_at_its_beginning(
    home: ScriptedHome, cluster: Cluster
) -> None:
    home.extra = encode_extra({"order": np.arange(500)})
    found = cluster.extra()
    assert isinstance(found, dict)
    assert (found["order"] == np.arange(500)).all()


def test_an_addition_whose_file_has_changed_is_not_returned(home: ScriptedHome, cluster: Cluster) -> None:
    home.extra_written = encode_extra({"order": np.arange(500)})
    home.extra = encode_extra({"order": np.arange(1, 501)})
    with pytest.raises(CheckpointDamaged, match=r"extra-rank-0\.safetensors"):
        cluster.extra()


def test_an_addition_to_a_checkpoint_that_a_path_names_is_read_from_there_alone(home: ScriptedHome, cluster: Cluster) -> None:
    home.extra = encode_extra({"order": np.arange(500)})
    cluster.extra("other/one")
    assert home.asked_for == {"other/one"}
