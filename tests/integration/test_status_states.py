"""`shardam status` says how shards, journals and workers are; what stops training is exit status 1, the rest is a note."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from shardam_testing.fake_shards import FakeCluster, running_fake_shards
from shardam_testing.listed_workers import bounded_workers, client_id, sync_workers
from shardam_testing.processes import Valkey, clean_environment, running_valkey

from shardam_proto.v1 import shard_pb2


@pytest.fixture(scope="module")
def valkey() -> Iterator[Valkey]:
    with running_valkey() as server:
        yield server


@pytest.fixture
def shards(valkey: Valkey) -> Iterator[FakeCluster]:
    """Two shards that serve with a journal, registered as cluster `test`."""
    with running_fake_shards(2) as cluster, contextlib.closing(valkey.client()) as connection:
        cluster.register(connection)
        for shard in cluster.shards:
            shard.status = shard_pb2.GetStatusResponse(
                journal_mode=shard_pb2.JOURNAL_MODE_WRITE,
                journal_state=shard_pb2.JOURNAL_STATE_OK,
                journal_bytes=3 * 2**20,
                data_folder=f"/data/shard-{shard.index}",
                queue_bytes=2048,
                reserved_bytes=4096,
                parked_requests=7,
            )
        yield cluster


def status(valkey: Valkey, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "shardam_server", "status", "--cluster", "test", *flags],
        env=clean_environment(SHARDAM_REDIS_URL=valkey.url),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_journal_and_what_waits_are_said_of_every_shard(valkey: Valkey, shards: FakeCluster) -> None:
    done = status(valkey)
    assert (done.returncode, done.stderr) == (0, "")
    for index in range(2):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"shard {index}")]
        assert line.split("  ") == [
            f"shard {index}",
            "journal write",
            "3.0 MiB since its base",
            f"/data/shard-{index}",
            "waiting 2.0 KiB",
            "reserved 4.0 KiB",
            "parked 7",
        ]
    assert "note:" not in done.stdout
    shown = json.loads(status(valkey, "--json").stdout)["shards"][0]
    assert (shown["journal_mode"], shown["journal_state"], shown["journal_problem"]) == ("write", "ok", None)
    assert (shown["journal_bytes"], shown["data_folder"]) == (3 * 2**20, "/data/shard-0")
    assert (shown["queue_bytes"], shown["reserved_bytes"], shown["parked_requests"]) == (2048, 4096, 7)


def test_a_degraded_journal_is_a_note_and_exit_status_0(valkey: Valkey, shards: FakeCluster) -> None:
    shards.shards[1].status.journal_state = shard_pb2.JOURNAL_STATE_SUSPENDED
    shards.shards[1].status.journal_problem = "the disk of /data/shard-1 is full: make room"
    done = status(valkey)
    assert done.returncode == 0
    assert "journal write (DEGRADED)" in done.stdout
    assert "note: shard 1 is DEGRADED: " in done.stdout
    assert "the disk of /data/shard-1 is full: make room\n" in done.stdout
    assert done.stdout.endswith("all shards are ready\n")
    value = json.loads(status(valkey, "--json").stdout)
    assert (value["ready"], value["problems"], len(value["warnings"])) == (True, [], 1)
    assert value["shards"][1]["journal_state"] == "degraded"


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (shard_pb2.SERVING_STATE_LOST, "is LOST: it started without the rows"),
        (shard_pb2.SERVING_STATE_SUSPENDED, "is suspended: it was paused beyond half of its lease"),
        (shard_pb2.SERVING_STATE_DRAINING, "is draining"),
    ],
)
def test_a_shard_that_does_not_serve_is_missing_and_exit_status_1(
    valkey: Valkey, shards: FakeCluster, state: shard_pb2.ServingState.ValueType, words: str
) -> None:
    shards.shards[1].state = state
    done = status(valkey)
    assert (done.returncode, done.stderr) == (1, "")
    assert f"missing: shard 1 {words}" in done.stdout
    assert ("`shardam forget-shard --index 1`" in done.stdout) == (state == shard_pb2.SERVING_STATE_LOST)
    value = json.loads(status(valkey, "--json").stdout)
    assert value["ready"] is False
    assert value["shards"][1]["state"] == shard_pb2.ServingState.Name(state).removeprefix("SERVING_STATE_").lower()


@pytest.mark.parametrize(
    ("state", "word"), [(shard_pb2.JOURNAL_STATE_FULL, "FULL"), (shard_pb2.JOURNAL_STATE_FAILED, "FAILED")]
)
def test_a_journal_that_stops_changes_is_missing_and_exit_status_1(
    valkey: Valkey, shards: FakeCluster, state: shard_pb2.JournalState.ValueType, word: str
) -> None:
    shards.shards[0].status.journal_state = state
    shards.shards[0].status.journal_problem = "what the shard says of it"
    done = status(valkey)
    assert done.returncode == 1
    assert f"journal write ({word})" in done.stdout
    assert "missing: shard 0 takes no changes: " in done.stdout
    assert "what the shard says of it\n" in done.stdout
    assert "note:" not in done.stdout


def workers_part(text: str) -> list[str]:
    """Returns the lines between the shards and the checkpoints."""
    return text.split("\n\n")[-3].splitlines()


def test_workers_are_a_table_with_the_ranks_that_a_group_waits_for(valkey: Valkey, shards: FakeCluster) -> None:
    shards.shards[0].workers = sync_workers()
    done = status(valkey)
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows, note = workers_part(done.stdout)
    assert head.split() == ["worker", "mode", "group", "rank", "restarts", "step", "behind", "heartbeat"]
    assert [re.split(" {2,}", row) for row in rows] == [
        ["000000000000", "sync", "trainers", "0 of 3", "0", "17", "-", "0.2 s ago", "arrived"],
        ["000000000000", "sync", "trainers", "2 of 3", "1", "17", "-", "0.2 s ago", "arrived"],
        ["000000000000", "async", "-", "-", "-", "-", "-", "1.5 s ago"],
    ]
    assert note == "group trainers waits for rank 1 before step 18, for 2.5 s now"
    value = json.loads(status(valkey, "--json").stdout)
    assert [worker["client_id"] for worker in value["workers"]] == [client_id(number).hex() for number in (0, 2, 99)]
    assert [worker["arrived"] for worker in value["workers"]] == [True, True, None]
    assert value["waiting_groups"] == [
        {"group": "trainers", "step": 18, "ranks": [1], "waited_s": 2.5, "summary": note},
    ]
    assert value["workers_problem"] is None


def test_a_bounded_group_shows_its_bound_and_who_is_behind(valkey: Valkey, shards: FakeCluster) -> None:
    shards.shards[0].workers = bounded_workers()
    _, *rows = workers_part(status(valkey).stdout)
    assert [re.split(" {2,}", row)[1:7] for row in rows] == [
        ["bounded:4", "trainers", "0 of 2", "0", "12", "0"],
        ["bounded:4", "trainers", "1 of 2", "0", "9", "3"],
    ]


def test_no_workers_is_said(valkey: Valkey, shards: FakeCluster) -> None:
    assert workers_part(status(valkey).stdout) == ["no workers: no client sends heartbeats"]
    value = json.loads(status(valkey, "--json").stdout)
    assert (value["workers"], value["waiting_groups"], value["workers_problem"]) == ([], [], None)


def test_an_old_home_has_its_shards_shown_all_the_same(valkey: Valkey, shards: FakeCluster) -> None:
    shards.shards[0].workers = None
    done = status(valkey)
    assert done.returncode == 0
    assert workers_part(done.stdout) == ["workers unknown: home, shard 0, is of a version that does not list them"]
    assert done.stdout.endswith("all shards are ready\n")
    value = json.loads(status(valkey, "--json").stdout)
    assert (value["ready"], value["workers"]) == (True, None)
    assert "does not list them" in value["workers_problem"]


def test_without_home_the_workers_are_unknown_and_the_rest_stands(valkey: Valkey, shards: FakeCluster) -> None:
    shards.servers[0].stop(None).wait()
    done = status(valkey)
    assert done.returncode == 1
    assert "workers unknown: home, shard 0, cannot be asked, and only home knows them" in done.stdout
    assert re.search("^1 +serving", done.stdout, re.MULTILINE)


def test_a_home_that_refuses_to_list_workers_is_quoted(valkey: Valkey, shards: FakeCluster) -> None:
    shards.shards[0].state = shard_pb2.SERVING_STATE_LOST
    done = status(valkey)
    assert "workers unknown: shard 0 is LOST" in done.stdout
    assert re.search("^1 +serving", done.stdout, re.MULTILINE)
