"""How home's list of workers is said to an operator, by `shardam status`, REST and the console alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardam_proto.v1 import group_pb2, shard_pb2

ASYNC = "async"

MODES: Mapping[group_pb2.GroupMode.ValueType, str] = {
    group_pb2.GROUP_MODE_SYNC: "sync",
    group_pb2.GROUP_MODE_BOUNDED: "bounded",
}

REDUCES: Mapping[group_pb2.Reduce.ValueType, str] = {
    group_pb2.REDUCE_MEAN: "mean",
    group_pb2.REDUCE_SUM: "sum",
}

Value = str | int | float | bool | None | list[int]
"""What JSON shows of a worker or of a waiting group."""


def worker_order(worker: shard_pb2.Worker) -> tuple[bool, str, int, bytes]:
    """Returns where a worker stands in a list: members by group and rank, then async workers."""
    return not worker.group, worker.group, worker.rank, worker.client_id


def worker_to_json(worker: shard_pb2.Worker) -> dict[str, Value]:
    """Returns a worker as `status --json` and /v1/workers show it; what its mode does not know is null."""
    mode = MODES.get(worker.terms.mode, "unknown") if worker.group else ASYNC
    return {
        "client_id": worker.client_id.hex(),
        "mode": mode,
        "max_staleness": worker.terms.max_staleness if mode == "bounded" else None,
        "reduce": REDUCES.get(worker.terms.reduce) if mode == "sync" else None,
        "group": worker.group or None,
        "rank": worker.rank if worker.group else None,
        "world_size": worker.terms.world_size if worker.group else None,
        "restart_count": worker.restart_count if worker.group else None,
        "step": worker.step if worker.group else None,
        "staleness": worker.staleness if mode == "bounded" else None,
        "arrived": worker.arrived if mode == "sync" else None,
        "last_number": worker.last_number,
        "last_heartbeat_s": round(worker.last_heartbeat_s, 3),
    }


def waiting_to_json(waiting: shard_pb2.WaitingGroup) -> dict[str, Value]:
    """Returns a group that waits for ranks, likewise."""
    return {
        "group": waiting.group,
        "step": waiting.step,
        "ranks": list(waiting.ranks),
        "waited_s": round(waiting.waited_s, 3),
        "summary": waiting_words(waiting),
    }


def mode_words(worker: shard_pb2.Worker) -> str:
    """Returns a worker's mode as one writes it in `connect`: async, sync, bounded:4."""
    mode = MODES.get(worker.terms.mode, "unknown") if worker.group else ASYNC
    return f"{mode}:{worker.terms.max_staleness}" if mode == "bounded" else mode


def waiting_words(waiting: shard_pb2.WaitingGroup) -> str:
    """Says for whom a group waits, and since when."""
    ranks = f"{'ranks' if len(waiting.ranks) > 1 else 'rank'} {_list(waiting.ranks)}"
    since = f", for {waiting.waited_s:.1f} s now" if waiting.waited_s else ""
    return f"group {waiting.group} waits for {ranks} before step {waiting.step}{since}"


_LISTED_RANKS = 16
"""More ranks say no more in a sentence; JSON has all."""


def _list(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    rest = len(numbers) - _LISTED_RANKS
    return ", ".join(numbers[:_LISTED_RANKS]) + (f" and {rest} more" if rest > 0 else "")
