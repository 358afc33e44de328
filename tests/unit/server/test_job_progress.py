"""The wait for a job of home."""

from __future__ import annotations

import typing

import pytest

from shardam_proto.v1 import job_pb2
from shardam_server.admin.shard_calls import ShardCalls
from shardam_server.command_errors import Interrupted
from shardam_server.job_progress import Silence, follow


class _Impatience(Silence):
    """Somebody who types Ctrl-C at the first sight of it."""

    def show(self, job: job_pb2.Job) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_ends_the_wait_and_says_that_the_job_goes_on() -> None:
    job = job_pb2.Job(id="1a2b", kind=job_pb2.JOB_KIND_CREATE, state=job_pb2.JOB_STATE_RUNNING, checkpoint="nightly")
    with pytest.raises(Interrupted, match=r"create of checkpoint 'nightly' goes on in the cluster as job 1a2b") as caught:
        follow(typing.cast(ShardCalls, None), job, _Impatience())
    assert caught.value.exit_code == 130
