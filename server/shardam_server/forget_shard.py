"""`shardam forget-shard`: tells a LOST shard to start empty, and says what is given up."""

from __future__ import annotations

import sys

import redis

from shardam_proto.channels import call, open_channel
from shardam_proto.errors import InvalidArgument, StaleState
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.registry import ClusterView, Keys, ShardEntry, connect_redis, read_cluster
from shardam_proto.v1 import common_pb2, shard_pb2, shard_pb2_grpc
from shardam_server.command_errors import CommandError
from shardam_server.redis_errors import redis_unreachable
from shardam_server.settings import ForgetShardSettings


def run_forget_shard(settings: ForgetShardSettings) -> int:
    """Has a LOST shard start empty; returns 0. May be repeated.

    Raises:
        RedisUnreachable: Redis does not answer.
        CommandError: there is no such shard, or it is another process than a moment ago.
        ShardamError: the shard is not LOST, or could not do it.
    """
    view, lineages = _read(settings)
    entry = _find(settings, view)
    cluster_id = "" if view.entry is None else view.entry.cluster_id
    header = common_pb2.RequestHeader(
        protocol_version=PROTOCOL_VERSION,
        cluster_id=cluster_id,
        incarnation=entry.incarnation,
        budget_s=settings.shard_timeout_s,
    )
    peer = f"shard {entry.index} at {entry.address}"
    with open_channel(entry.address) as channel:
        stub = shard_pb2_grpc.ShardServiceStub(channel)
        try:
            answer = call(
                stub.ForgetState,
                shard_pb2.ForgetStateRequest(header=header, without_lost=settings.without_lost),
                timeout_s=settings.shard_timeout_s,
                token=settings.plain_token,
                peer=peer,
            )
            status = call(
                stub.GetStatus,
                shard_pb2.GetStatusRequest(header=header),
                timeout_s=settings.shard_timeout_s,
                token=settings.plain_token,
                peer=peer,
            )
        except StaleState as error:
            raise CommandError(f"{error.message}: the shard has just been started again; look at `shardam status`") from error
        except InvalidArgument as error:  # refused because of the shard's state, not because of a flag
            raise CommandError(error.message) from error
    sys.stdout.write(_report(entry, lineages.get(entry.index), answer.header.lineage, status))
    return 0


def _read(settings: ForgetShardSettings) -> tuple[ClusterView, dict[int, int]]:
    connection = connect_redis(settings.redis, settings.redis_timeout_s)
    keys = Keys(settings.cluster)
    try:
        view = read_cluster(connection, keys)
        lineages = {int(index): int(lineage) for index, lineage in connection.hgetall(keys.lineages).items()}
    except redis.RedisError as error:
        raise redis_unreachable(settings.redis, error) from error
    except ValueError as error:
        raise CommandError(f"cluster {settings.cluster!r} in Redis cannot be read: {error}") from error
    finally:
        connection.close()
    return view, lineages


def _find(settings: ForgetShardSettings, view: ClusterView) -> ShardEntry:
    if view.entry is None:
        raise CommandError(f"cluster {settings.cluster!r} does not exist in this Redis: name another with --cluster")
    if settings.index >= view.entry.num_shards:
        raise CommandError(
            f"cluster {settings.cluster!r} has shards 0 to {view.entry.num_shards - 1}, there is no shard {settings.index}"
        )
    entry = view.shards.get(settings.index)
    if entry is None:
        raise CommandError(
            f"shard {settings.index} of cluster {settings.cluster!r} is not registered: start it first; only a running shard "
            "can be told to start empty"
        )
    return entry


def _report(entry: ShardEntry, former: int | None, lineage: int, status: shard_pb2.GetStatusResponse) -> str:
    if former == lineage:
        return (
            f"shard {entry.index} at {entry.address} had been told so before: it serves lineage {lineage}, {status.num_rows} "
            f"rows in {status.num_tables} tables; nothing was given up now\n"
        )
    return (
        f"shard {entry.index} at {entry.address} starts empty on lineage {lineage} and serves {status.num_tables} tables\n"
        f"given up: all rows and moments that shard {entry.index} held{_of(former)}; they start from their initial values "
        "again\n"
        "programs that were connected before raise ShardLost or ClientClosed: start them again; Idempotency-Keys of before are "
        "refused: use new ones\n"
    )


def _of(former: int | None) -> str:
    return f" (lineage {former})" if former is not None else ""
