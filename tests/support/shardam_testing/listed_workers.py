"""Workers as home lists them, for tests of what is made of the list."""

from __future__ import annotations

from shardam_proto.v1 import group_pb2, shard_pb2

SYNC = group_pb2.GroupTerms(mode=group_pb2.GROUP_MODE_SYNC, reduce=group_pb2.REDUCE_MEAN, world_size=3)
BOUNDED = group_pb2.GroupTerms(mode=group_pb2.GROUP_MODE_BOUNDED, max_staleness=4, reduce=group_pb2.REDUCE_MEAN, world_size=2)


def client_id(number: int) -> bytes:
    """Returns a client id that a test can tell from others."""
    return number.to_bytes(16, "big")


def member(group: str, terms: group_pb2.GroupTerms, rank: int, **values: object) -> shard_pb2.Worker:
    """Returns a member of a group, heard of a quarter of a second ago."""
    known = {"client_id": client_id(rank), "last_heartbeat_s": 0.25} | values
    return shard_pb2.Worker(group=group, terms=terms, rank=rank, **known)  # type: ignore[arg-type]  # fields of the message


def sync_workers() -> shard_pb2.ListWorkersResponse:
    """Returns a sync group of three ranks that waits for one of them, and an async worker; in no order."""
    return shard_pb2.ListWorkersResponse(
        workers=[
            shard_pb2.Worker(client_id=client_id(99), last_number=5, last_heartbeat_s=1.5),
            member("trainers", SYNC, 2, step=17, last_number=20, arrived=True, restart_count=1),
            member("trainers", SYNC, 0, step=17, last_number=21, arrived=True),
        ],
        waiting=[shard_pb2.WaitingGroup(group="trainers", step=18, ranks=[1], waited_s=2.5)],
    )


def bounded_workers() -> shard_pb2.ListWorkersResponse:
    """Returns a bounded group of two ranks, one of which is three steps behind."""
    return shard_pb2.ListWorkersResponse(
        workers=[
            member("trainers", BOUNDED, 0, step=12, last_number=12),
            member("trainers", BOUNDED, 1, step=9, last_number=9, staleness=3),
        ]
    )
