"""`shardam reshard`: has home move the rows to another number of shards, and says how far it is until those serve.

Home and the other shards end when the rows have moved, so what becomes of it is read in Redis.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator

import redis

from shardam_proto.channels import call, open_channel
from shardam_proto.errors import InvalidArgument, RedisUnreachable, ShardamError
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.registry import ClusterView, Keys, ShardEntry, connect_redis, read_cluster
from shardam_proto.v1 import checkpoint_pb2, checkpoint_pb2_grpc, common_pb2, job_pb2
from shardam_server.command_errors import CommandError, Interrupted
from shardam_server.redis_errors import redis_unreachable
from shardam_server.reshard_settings import ReshardSettings

POLL_S = 0.2
"""How often home or Redis is asked; small against the start of a shard."""

REMIND_S = 10.0
"""A wait in which nothing changes is said again so often."""

_HOME_MAY_BE_GONE = frozenset({"SHARD_UNREACHABLE", "NEW_INCARNATION", "NOT_READY", "WRONG_CLUSTER", "UNKNOWN_CHECKPOINT"})
"""Answers to a question about the job after which only Redis can tell what became of it: home may have ended."""


def run_reshard(settings: ReshardSettings) -> int:
    """Moves the rows; returns 0 once it has begun (`--no-wait`), or once all new shards serve.

    Raises:
        RedisUnreachable: Redis does not answer at the start.
        CommandError: there is no such cluster, it could not be moved, or the time is over.
        ShardamError: home refused.
    """
    with contextlib.closing(connect_redis(settings.redis, settings.redis_timeout_s)) as connection:
        return _Move(settings, connection).run()


@dataclasses.dataclass(frozen=True)
class _Former:
    """The cluster before it moves."""

    home: ShardEntry
    cluster_id: str
    num_shards: int
    incarnations: frozenset[int]


class _Move:
    """One run of the command."""

    def __init__(self, settings: ReshardSettings, connection: redis.Redis) -> None:
        self._settings = settings
        self._connection = connection
        self._deadline = time.monotonic() + settings.wait_s if settings.wait_s else float("inf")
        self._said = ""
        self._said_at = 0.0

    def run(self) -> int:
        settings = self._settings
        view = self._read()
        if view.entry is None:
            raise CommandError(f"cluster {settings.cluster!r} does not exist in this Redis: name another with --cluster")
        former = self._find(view, view.entry.cluster_id, view.entry.num_shards)
        if former is None:
            self._say(f"cluster {settings.cluster!r} has {settings.shards} shards already: there is nothing to move")
            return 0
        job_id = self._begin(former)
        self._say(
            f"job {job_id}: cluster {settings.cluster!r} moves from {former.num_shards} to {settings.shards} shards; "
            "workers wait and go on"
        )
        if not settings.wait:
            return 0
        try:
            self._follow_job(former, job_id)
            self._wait_for_shards(former)
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"interrupted, but the move to {settings.shards} shards goes on in the cluster: `shardam status` and "
                "`shardam checkpoint jobs` show it"
            ) from error
        self._say(f"cluster {settings.cluster!r} serves on {settings.shards} shards")
        return 0

    def _find(self, view: ClusterView, cluster_id: str, num_shards: int) -> _Former | None:
        """Returns the cluster as it is; None: it has moved already, or is about to."""
        if num_shards == self._settings.shards:
            return None
        if view.route_map is None:
            raise CommandError(f"cluster {self._settings.cluster!r} has not formed yet: look at `shardam status`")
        home = view.shards.get(0)
        if home is None:
            raise CommandError(
                f"shard 0 of cluster {self._settings.cluster!r}, which moves the rows, is not registered: start it first"
            )
        return _Former(home, cluster_id, num_shards, frozenset(shard.incarnation for shard in view.shards.values()))

    # -- home

    @contextlib.contextmanager
    def _home(self, former: _Former) -> Iterator[checkpoint_pb2_grpc.CheckpointServiceStub]:
        with open_channel(former.home.address) as channel:
            yield checkpoint_pb2_grpc.CheckpointServiceStub(channel)

    def _header(self, former: _Former) -> common_pb2.RequestHeader:
        return common_pb2.RequestHeader(
            protocol_version=PROTOCOL_VERSION,
            cluster_id=former.cluster_id,
            incarnation=former.home.incarnation,
            budget_s=self._settings.shard_timeout_s,
        )

    def _begin(self, former: _Former) -> str:
        request = checkpoint_pb2.ReshardRequest(header=self._header(former), num_shards=self._settings.shards)
        with self._home(former) as stub:
            try:
                answer = call(
                    stub.Reshard,
                    request,
                    timeout_s=self._settings.shard_timeout_s,
                    token=self._settings.plain_token,
                    peer=f"shard 0 at {former.home.address}",
                )
            except InvalidArgument as error:  # refused because of the cluster's state, not because of a flag
                raise CommandError(error.message) from error
        return answer.job.id

    def _follow_job(self, former: _Former, job_id: str) -> None:
        """Waits until the rows have moved.

        Raises:
            CommandError: they have not, and will not.
        """
        request = checkpoint_pb2.GetJobRequest(header=self._header(former), id=job_id)
        with self._home(former) as stub:
            while not self._has_moved():
                try:
                    job = call(
                        stub.GetJob,
                        request,
                        timeout_s=self._settings.shard_timeout_s,
                        token=self._settings.plain_token,
                        peer=f"shard 0 at {former.home.address}",
                    ).job
                except ShardamError as error:
                    if error.reason not in _HOME_MAY_BE_GONE:
                        raise
                    self._check_home(former, error)
                else:
                    if job.state == job_pb2.JOB_STATE_FAILED and not self._has_moved():  # home may end with the move
                        raise CommandError(f"nothing has moved: {job.problem}")
                    self._say_progress(job)
                self._pause(f"job {job_id} of home goes on")

    def _say_progress(self, job: job_pb2.Job) -> None:
        if job.state in (job_pb2.JOB_STATE_WAITING, job_pb2.JOB_STATE_RUNNING) and job.phase:
            share = f" ({100 * job.done_bytes // job.total_bytes} %)" if job.total_bytes else ""
            problem = f": {job.problem}" if job.problem else ""
            self._say(f"{job.phase}{share}{problem}")

    def _check_home(self, former: _Former, error: ShardamError) -> None:
        """Goes on while home may have ended because the rows have moved.

        Raises:
            CommandError: it is another process now, and they have not.
        """
        with contextlib.suppress(RedisUnreachable):
            view = self._read()
            home = view.shards.get(0)
            same = view.entry is not None and view.entry.num_shards == former.num_shards
            if same and home is not None and home.incarnation != former.home.incarnation:
                raise CommandError(
                    "shard 0 ended before it was decided and was started anew: nothing has moved; run the command again"
                ) from error
        self._say(f"home does not answer ({error.reason}): waits for what Redis says")

    # -- Redis

    def _read(self) -> ClusterView:
        settings = self._settings
        try:
            return read_cluster(self._connection, Keys(settings.cluster))
        except redis.RedisError as error:
            raise redis_unreachable(settings.redis, error) from error
        except ValueError as error:
            raise CommandError(f"cluster {settings.cluster!r} in Redis cannot be read: {error}") from error

    def _has_moved(self) -> bool:
        """Whether it is decided; Redis that does not answer is asked again."""
        with contextlib.suppress(RedisUnreachable):
            entry = self._read().entry
            return entry is not None and entry.num_shards == self._settings.shards
        return False

    def _wait_for_shards(self, former: _Former) -> None:
        """Waits until all new shards serve."""
        while True:
            try:
                missing = self._missing(self._read(), former)
            except RedisUnreachable as error:
                missing = [error.message]
            if not missing:
                return
            self._say(f"the rows have moved; waits for {', '.join(missing)}")
            self._pause("the rows have moved, and the new shards are not all there")

    def _missing(self, view: ClusterView, former: _Former) -> list[str]:
        """Returns what the new shards still need, by shard."""
        count = self._settings.shards
        shards = {index: shard for index, shard in view.shards.items() if shard.incarnation not in former.incarnations}
        absent = [index for index in range(count) if index not in shards]
        loading = [index for index in range(count) if index in shards and not shards[index].ready]
        missing = []
        if absent:
            missing.append(
                f"{_named(absent)} to start (`shardam up` does it; else `shardam shard --shards {count} --index ...`)"
            )
        if loading:
            missing.append(f"{_named(loading)} to load")
        return missing

    # -- words

    def _say(self, text: str) -> None:
        """Prints a line, unless it was the last one."""
        now = time.monotonic()
        if text != self._said or now - self._said_at > REMIND_S:
            self._said, self._said_at = text, now
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _pause(self, state: str) -> None:
        """Waits a moment.

        Raises:
            CommandError: the time is over.
        """
        if time.monotonic() > self._deadline:
            raise CommandError(f"waited for {self._settings.wait_s:g} s (--wait-s): {state}; look at `shardam status`")
        time.sleep(POLL_S)


def _named(indexes: list[int]) -> str:
    """Names shards, and of many the first ones."""
    shown = ", ".join(map(str, indexes[:8]))
    return f"shard{'s' if len(indexes) > 1 else ''} {shown}{', ...' if len(indexes) > 8 else ''}"
