"""Checkpoints of shard processes, made and restored by home's service, and what the shards then hold."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from shardam_proto.channels import call, open_channel
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc, common_pb2, job_pb2
from shardam_testing.processes import Shards
from shardam_testing.pushing import HANG_S
from shardam_testing.raw_client import RawClient, raw_client
from shardam_testing.waiting import wait_for

ROW_IDS = tuple(range(40))
"""Rows that tests train, on any number of shards."""

ENDED = (job_pb2.JOB_STATE_DONE, job_pb2.JOB_STATE_FAILED)


@contextlib.contextmanager
def home_checkpoints(shards: Shards) -> Iterator[checkpoint_pb2_grpc.CheckpointServiceStub]:
    """Opens home's service for checkpoints."""
    with open_channel(shards.view().shards[0].address) as channel:
        yield checkpoint_pb2_grpc.CheckpointServiceStub(channel)


def header() -> common_pb2.RequestHeader:
    return common_pb2.RequestHeader(protocol_version=PROTOCOL_VERSION, budget_s=10.0)


def find_job(shards: Shards, job_id: str) -> job_pb2.Job:
    with home_checkpoints(shards) as stub:
        request = checkpoint_pb2.GetJobRequest(header=header(), id=job_id)
        return call(stub.GetJob, request, timeout_s=10.0, token=None, peer="home").job


def wait_ended(shards: Shards, job: job_pb2.Job) -> job_pb2.Job:
    """Waits for the end of a job, while home lives."""

    def ended() -> job_pb2.Job | None:
        found = find_job(shards, job.id)
        return found if found.state in ENDED else None

    return wait_for(f"job {job.id} to end", ended, HANG_S)


def make_checkpoint(shards: Shards, name: str = "") -> str:
    """Makes a checkpoint and returns its name."""
    request = checkpoint_pb2.CreateCheckpointRequest(header=header(), request_key=secrets.token_bytes(16), name=name)
    with home_checkpoints(shards) as stub:
        begun = call(stub.CreateCheckpoint, request, timeout_s=20.0, token=None, peer="home").job
    job = wait_ended(shards, begun)
    assert job.state == job_pb2.JOB_STATE_DONE, job
    return job.checkpoint


def begin_restore(
    shards: Shards, name: str, options: checkpoint_pb2.RestoreOptions | None = None, *, only_if_empty: bool = False
) -> job_pb2.Job:
    """Begins a restore, and returns its job."""
    request = checkpoint_pb2.RestoreCheckpointRequest(header=header(), name=name, options=options, only_if_empty=only_if_empty)
    with home_checkpoints(shards) as stub:
        return call(stub.RestoreCheckpoint, request, timeout_s=20.0, token=None, peer="home").job


def restore(
    shards: Shards, name: str, options: checkpoint_pb2.RestoreOptions | None = None, *, only_if_empty: bool = False
) -> job_pb2.Job:
    """Restores a checkpoint and returns the job that has ended."""
    return wait_ended(shards, begin_restore(shards, name, options, only_if_empty=only_if_empty))


def restored(shards: Shards, name: str, options: checkpoint_pb2.RestoreOptions | None = None) -> job_pb2.RestoreReport:
    """Restores a checkpoint, which works, and returns what was done."""
    job = restore(shards, name, options)
    assert job.state == job_pb2.JOB_STATE_DONE, job
    return job.report


def refused(shards: Shards, name: str, options: checkpoint_pb2.RestoreOptions | None = None) -> tuple[str, str]:
    """Returns with which reason and words a restore fails."""
    job = restore(shards, name, options)
    assert job.state == job_pb2.JOB_STATE_FAILED, job
    return job.reason, job.problem


# -- states


def create(shards: Shards, *specs: TableSpec) -> list[common_pb2.TableInfo]:
    with raw_client(shards.view()) as home:
        return home.create(*specs)


@contextlib.contextmanager
def all_shards(shards: Shards) -> Iterator[list[RawClient]]:
    """Opens one client on all shards."""
    view, client_id = shards.view(), secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(raw_client(view, index)) for index in range(shards.count)]
        for client in clients:
            client.client_id = client_id
            client.open()
        yield clients


def push_all(shards: Shards, table: common_pb2.TableInfo, clients: Sequence[RawClient], number: int) -> None:
    """Pushes all rows once, each to its shard."""
    for index, row_ids in enumerate(split(shards)):
        gradients = np.array([[row_id + number] * table.spec.dim for row_id in row_ids], np.float32)
        clients[index].push(number, table, row_ids, gradients.reshape(len(row_ids), table.spec.dim))


def split(shards: Shards) -> list[list[int]]:
    """Returns the rows of each shard."""
    route_map = shards.view().route_map
    assert route_map is not None
    owners = route_map.shards_of(np.array(ROW_IDS, np.int64))
    return [[row_id for row_id, owner in zip(ROW_IDS, owners, strict=True) if owner == index] for index in range(shards.count)]


def train(shards: Shards, table: common_pb2.TableInfo, steps: int = 3) -> None:
    """Trains all rows of a table, by a client of its own."""
    with all_shards(shards) as clients:
        for number in range(1, steps + 1):
            push_all(shards, table, clients, number)


def table_state(shards: Shards, name: str) -> tuple[int, bytes, bytes, bytes, bytes]:
    """Returns a table's step and all of its rows: which there are, weights and moments, in the order of their ids."""
    view = shards.view()
    steps: set[int] = set()
    rows: dict[int, tuple[bytes, bytes, bytes, bytes]] = {}
    for index, row_ids in enumerate(split(shards)):
        with raw_client(view, index) as client:
            info = client.info(name)
            steps.add(info.table_step)
            found = client.read(info, row_ids).rows
            size = info.spec.dim * 4
            for place, row_id in enumerate(row_ids):
                part = slice(place * size, (place + 1) * size)
                rows[row_id] = (
                    found.found[place : place + 1],
                    found.weight[part],
                    found.exp_avg[part],
                    found.exp_avg_sq[part],
                )
    assert len(steps) == 1, steps
    whole = [b"".join(rows[row_id][column] for row_id in sorted(rows)) for column in range(4)]
    return steps.pop(), whole[0], whole[1], whole[2], whole[3]


def wait_until(what: str, holds: Callable[[], bool]) -> None:
    wait_for(what, holds, HANG_S)
