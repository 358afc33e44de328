"""The workers in `shardam status`: asked of home, and shown as a table or as JSON."""

from __future__ import annotations

import dataclasses

from shardam_proto.channels import call, open_channel
from shardam_proto.errors import ShardamError, VersionMismatch
from shardam_proto.v1 import common_pb2, shard_pb2, shard_pb2_grpc
from shardam_server.settings import StatusSettings
from shardam_server.worker_words import mode_words, waiting_to_json, waiting_words, worker_order, worker_to_json

CLIENT_DIGITS = 12
"""Hexadecimal digits of a client id that the table shows: enough to tell workers apart; JSON has all 32."""

HEADINGS = ("worker", "mode", "group", "rank", "restarts", "step", "behind", "heartbeat", "")

Lines = list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class WorkersReport:
    """The workers as `status` sees them.

    Attributes:
        problem: why they are not known; None: they are.
        workers: all of them, groups' members first.
        waiting: groups that wait for ranks.
    """

    problem: str | None = None
    workers: list[shard_pb2.Worker] = dataclasses.field(default_factory=list)
    waiting: list[shard_pb2.WaitingGroup] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        """Returns what the JSON form of status has of it; null: not known."""
        known = self.problem is None
        return {
            "workers": [worker_to_json(worker) for worker in self.workers] if known else None,
            "waiting_groups": [waiting_to_json(waiting) for waiting in self.waiting] if known else None,
            "workers_problem": self.problem,
        }

    def table(self) -> Lines:
        """Returns the rows of the table, the headings first; empty if there is no worker."""
        return [HEADINGS, *(_row(worker) for worker in self.workers)] if self.workers else []

    def notes(self) -> list[str]:
        """Returns what stands below the table."""
        if self.problem is not None:
            return [f"workers unknown: {self.problem}"]
        if not self.workers and not self.waiting:
            return ["no workers: no client sends heartbeats"]
        return [waiting_words(waiting) for waiting in self.waiting]


NO_HOME = WorkersReport("home, shard 0, cannot be asked, and only home knows them")


def ask_workers(address: str, header: common_pb2.RequestHeader, settings: StatusSettings) -> WorkersReport:
    """Asks home for the workers; whatever is wrong is part of the report, so that the rest of status stands.

    Args:
        address: home's.
        header: of a request to it.
        settings: time-out and token.
    """
    try:
        with open_channel(address) as channel:
            answer = call(
                shard_pb2_grpc.ShardServiceStub(channel).ListWorkers,
                shard_pb2.ListWorkersRequest(header=header),
                timeout_s=settings.shard_timeout_s,
                token=settings.plain_token,
                peer=f"shard 0 at {address}",
            )
    except VersionMismatch:
        return WorkersReport("home, shard 0, is of a version that does not list them")
    except ShardamError as error:
        return WorkersReport(error.message)
    return WorkersReport(None, sorted(answer.workers, key=worker_order), list(answer.waiting))


def _row(worker: shard_pb2.Worker) -> tuple[str, ...]:
    said = worker_to_json(worker)
    rank = f"{said['rank']} of {said['world_size']}" if worker.group else "-"
    return (
        worker.client_id.hex()[:CLIENT_DIGITS],
        mode_words(worker),
        worker.group or "-",
        rank,
        _shown(said["restart_count"]),
        _shown(said["step"]),
        _shown(said["staleness"]),
        f"{worker.last_heartbeat_s:.1f} s ago",
        "arrived" if worker.arrived else "",
    )


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
