"""Waiting until gRPC has ended its threads."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from shardam import _grpc_threads
from shardam._backoff import Deadline
from shardam._grpc_threads import GrpcThreads

HANG_S = 20.0


@pytest.fixture
def server() -> Iterator[grpc.Server]:
    """Something else in this process that uses gRPC."""
    started = grpc.server(futures.ThreadPoolExecutor(1))
    started.add_insecure_port("127.0.0.1:0")
    started.start()
    yield started
    started.stop(None).wait()


def test_threads_that_do_not_end_are_waited_for_until_the_deadline(server: grpc.Server) -> None:
    assert not GrpcThreads().wait_until_gone(Deadline(0.05))


def test_threads_that_something_else_keeps_are_not_waited_for_again(
    server: grpc.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_grpc_threads, "UNCHANGED_S", 0.2)
    threads = GrpcThreads()
    assert threads.wait_until_gone(Deadline(HANG_S))
    monkeypatch.setattr("time.sleep", pytest.fail)
    assert threads.wait_until_gone(Deadline(HANG_S))
