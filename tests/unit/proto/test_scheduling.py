"""gRPC's threads are scheduled as a batch, those of the program as they were."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from shardam_proto.scheduling import starting_batch_threads

PROGRAM = """
import os
import time
from pathlib import Path
from shardam_proto.channels import open_channel

def named(task):
    try:
        return (task / "comm").read_text()
    except OSError:  # it has just ended
        return ""

channel = open_channel("127.0.0.1:1")
grpc_threads, deadline = [], time.monotonic() + 30
while not grpc_threads and time.monotonic() < deadline:  # a thread gives itself its name, once it runs
    tasks = list(Path("/proc/self/task").iterdir())
    grpc_threads = [int(task.name) for task in tasks if named(task).startswith("event_engine")]
print(len(grpc_threads) > 0, {os.sched_getscheduler(task) for task in grpc_threads} == {os.SCHED_BATCH})
print(os.sched_getscheduler(0) == os.SCHED_OTHER)
os._exit(0)
"""


def in_thread(action: Callable[[], object]) -> None:
    """Runs it in a thread of its own, whose policy is nobody else's; raises what it raises."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as problem:  # noqa: BLE001 - raised below
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]


def policy_of_new_thread() -> int:
    found: list[int] = []
    in_thread(lambda: found.append(os.sched_getscheduler(0)))
    return found[0]


def test_threads_started_in_the_block_are_a_batch_and_others_are_not() -> None:
    def check() -> None:
        with starting_batch_threads():
            assert policy_of_new_thread() == os.SCHED_BATCH
        assert os.sched_getscheduler(0) == policy_of_new_thread() == os.SCHED_OTHER

    in_thread(check)


def test_the_block_may_fail() -> None:
    def check() -> None:
        with pytest.raises(ValueError, match="once"), starting_batch_threads():
            raise ValueError("once")
        assert os.sched_getscheduler(0) == os.SCHED_OTHER

    in_thread(check)


def test_a_policy_that_somebody_chose_stays() -> None:
    def check() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with starting_batch_threads():
            assert os.sched_getscheduler(0) == policy_of_new_thread() == os.SCHED_IDLE
        assert os.sched_getscheduler(0) == os.SCHED_IDLE

    in_thread(check)


def test_a_system_that_refuses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, policy: int, param: os.sched_param) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    with starting_batch_threads():
        assert policy_of_new_thread() == os.SCHED_OTHER


def test_the_threads_of_a_channel_are_a_batch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True", "True", "True"], done
