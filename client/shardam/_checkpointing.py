"""Making checkpoints of a cluster, going back to one, and what trainers add to them: a part of Cluster."""

from __future__ import annotations

import abc
import secrets
from collections.abc import Sequence

import xxhash

from shardam._checkpoint_job import CheckpointJob, begin
from shardam._checkpoint_values import CheckpointInfo, RestoreReport, checkpoint_info
from shardam._extra import decode_extra, encode_extra
from shardam._home_calls import HomeCalls
from shardam._session import Session
from shardam._session_options import SessionOptions
from shardam_proto.errors import BadOption, CheckpointDamaged, CheckpointFailed
from shardam_proto.v1 import checkpoint_pb2, common_pb2, job_pb2

PART_BYTES = 4 * 2**20
"""Bytes of an addition in one message; home takes no more."""

KEY_BYTES = 16

MAX_UPLOADS = 3
"""Times that an addition is brought from the beginning: a home shard that was started anew has dropped what it had of it."""

LATEST = "latest"


class ClusterCheckpoints(abc.ABC):
    """What a cluster's client asks of checkpoints."""

    _options: SessionOptions

    @property
    @abc.abstractmethod
    def _ready_session(self) -> Session:
        """The open client."""

    @abc.abstractmethod
    def _check_open(self) -> None:
        """Raises if this object was closed."""

    @abc.abstractmethod
    def _synchronize(self) -> None:
        """Waits until every queued push has been applied."""

    @abc.abstractmethod
    def _begin_on_new_timeline(self) -> None:
        """Goes on as a new client."""

    def checkpoint(self, extra: object = None, *, name: str | None = None, wait: bool = True) -> CheckpointJob:
        """Makes a checkpoint: one consistent state of all tables on all shards, and what this trainer adds.

        First this client's queued pushes are sent; they are in it. Training may go on as soon as this returns: files are
        written beside it. In a group every member calls it after the same step, with an addition of its own; it waits for all.

        Args:
            extra: what else is needed to go on: model.state_dict(), the dense optimizer's, the position in the data. None,
                bool, int, float, str, bytes, NumPy arrays and torch tensors, in dicts, lists and tuples. It comes back by
                `extra`, and never runs code.
            name: its name; None: made of the time. Those without a name of their own are deleted once there are newer ones
                (`--checkpoint-keep`).
            wait: True: returns once it is complete; False: once the state is cut.

        Returns:
            The job that writes it.

        Raises:
            TypeError: extra has a value of another type; the message has the path to it. Nothing was begun.
            BadOption: a name that cannot be or is taken; a cluster without a folder for checkpoints; or members of the group
                ask after different steps.
            CheckpointFailed: it could not be made; the message says why. What was there before is there still.
            CheckpointRunning: another checkpoint, restore or move ran for 600 s.
            StepTimeout: a member of the group did not ask, too.
            ShardamError: a queued push failed.
        """
        if name is not None:
            _check_name(name)
        data = None if extra is None else encode_extra(extra)
        self._synchronize()
        session = self._ready_session
        with HomeCalls(self._options) as home:
            job = CheckpointJob(self._options, _create(home, session, data, name))
        return job.wait() if wait else job

    def checkpoints(self) -> list[CheckpointInfo]:
        """Returns the cluster's checkpoints, the newest first; one that is not complete says why.

        Raises:
            BadOption: the cluster has no folder for checkpoints.
        """
        with HomeCalls(self._options) as home:
            answer = home.answer(lambda link: link.checkpoints.ListCheckpoints, checkpoint_pb2.ListCheckpointsRequest())
        return [checkpoint_info(message) for message in answer.checkpoints]

    def restore(
        self,
        name: str = LATEST,
        *,
        tables: Sequence[str] | None = None,
        allow_missing_tables: bool = False,
        allow_unexpected_tables: bool = False,
        weights_only: bool = False,
        read_only: bool = False,
        accept_arithmetic_change: bool = False,
    ) -> RestoreReport:
        """Replaces the state of all shards by a checkpoint's; whatever has been pushed since is gone.

        All files are checked first: an error leaves the cluster as it is. A cluster without tables takes all of the
        checkpoint's. Otherwise both have to have the same tables, with the same schemas, unless an argument says more.

        This object then goes on as a new client, in a group as a new member, and its tables and modules with it. What it had
        queued is dropped; a gradient that no step() has pushed yet belongs to rows that are gone: call zero_grad(). All other
        clients raise ClusterRestored and have to connect again. Hyper-parameters come with the next push, as ever: the report
        has the ones of the last push before the checkpoint.

        Args:
            name: its name, a path below the cluster's folder for checkpoints, or "latest": the newest complete one.
            tables: load these alone; the cluster's others stay as they are. None: all.
            allow_missing_tables: tables that the checkpoint lacks stay as they are.
            allow_unexpected_tables: tables that only the checkpoint has are created.
            weights_only: moments and steps begin anew.
            read_only: the tables refuse pushes and row changes from then on.
            accept_arithmetic_change: take a checkpoint of an older arithmetic version: steps may then come out with other bits.

        Raises:
            UnknownCheckpoint: there is none of this name; the message lists others.
            CheckpointMismatch: the tables are not the same; the message lists missing and unexpected ones.
            SchemaMismatch: a table has another schema in the checkpoint; the message shows both.
            CheckpointDamaged: a file is missing, cut off or has other content; the message names it.
            VersionMismatch: another version of shardam wrote it.
            BadOption: a path outside of the folder, or the cluster has no folder for checkpoints.
            CheckpointRunning: another checkpoint, restore or move ran for 600 s.
            ShardamError: why the cluster could not be reached.
        """
        _check_name(name)
        if isinstance(tables, str):
            raise BadOption(f"tables takes a list of names, got {tables!r}; write [{tables!r}]")
        request = checkpoint_pb2.RestoreCheckpointRequest(
            request_key=secrets.token_bytes(KEY_BYTES),
            name=name,
            options=checkpoint_pb2.RestoreOptions(
                tables=tables or (),
                allow_missing_tables=allow_missing_tables,
                allow_unexpected_tables=allow_unexpected_tables,
                weights_only=weights_only,
                read_only=read_only,
                accept_arithmetic_change=accept_arithmetic_change,
            ),
        )
        self._check_open()
        with HomeCalls(self._options) as home:
            job = begin(lambda: home.answer(lambda link: link.checkpoints.RestoreCheckpoint, request).job)
        report = CheckpointJob(self._options, job).wait().report
        self._begin_on_new_timeline()
        if report is None:
            raise CheckpointFailed(f"the restore of {name!r} ended without a report; use matching shardam packages")
        return report

    def extra(self, name: str = LATEST, rank: int | None = None) -> object:
        """Returns what a trainer added to a checkpoint; arrays are private and writable, tensors on the CPU.

        Args:
            name: as for restore.
            rank: whose; None: this worker's, without a group 0.

        Raises:
            UnknownCheckpoint: there is no such checkpoint, or this rank added nothing to it.
            CheckpointDamaged: its file is missing or damaged.
        """
        _check_name(name)
        if rank is None:
            rank = 0 if self._options.group is None else self._options.group.rank
        data, total_bytes, found = bytearray(), 1, name
        with HomeCalls(self._options) as home:
            while len(data) < total_bytes:
                request = checkpoint_pb2.GetExtraRequest(name=found, rank=rank, offset=len(data))
                answer = home.answer(lambda link: link.checkpoints.GetExtra, request)
                total_bytes = answer.total_bytes
                if name == LATEST:  # there may be a newer one by the next part; a path, though, stays what it is
                    found = answer.name
                data += answer.data
                if not answer.data and len(data) < total_bytes:
                    raise CheckpointFailed(
                        f"home sent {len(data)} of {total_bytes} bytes of what rank {rank} added to {found!r}"
                    )
            described = checkpoint_pb2.GetCheckpointRequest(name=found)
            info = home.answer(lambda link: link.checkpoints.GetCheckpoint, described).checkpoint
        what = f"what rank {rank} added to checkpoint {found!r}"
        written = {added.rank: added.file for added in info.extra}.get(rank)
        if written is None or written.xxh3 != xxhash.xxh3_128_hexdigest(data):
            name_of_file = "its file" if written is None else written.name
            raise CheckpointDamaged(
                f"{what} is damaged: {name_of_file} in {info.folder} does not have the content that was written; take another "
                "checkpoint",
                metadata={"checkpoint": found},
            )
        return decode_extra(bytes(data), what)

    def verify(self, name: str = LATEST) -> CheckpointInfo:
        """Reads all files of a checkpoint and compares them with its manifest.

        Raises:
            CheckpointDamaged: a file is missing, cut off or has other content; the message names it.
            UnknownCheckpoint: there is none of this name.
        """
        _check_name(name)
        with HomeCalls(self._options) as home:
            request = checkpoint_pb2.VerifyCheckpointRequest(name=name)
            job = begin(lambda: home.answer(lambda link: link.checkpoints.VerifyCheckpoint, request).job)
            CheckpointJob(self._options, job).wait()
            found = checkpoint_pb2.GetCheckpointRequest(name=(job.checkpoint or name) if name == LATEST else name)
            return checkpoint_info(home.answer(lambda link: link.checkpoints.GetCheckpoint, found).checkpoint)

    def delete_checkpoint(self, name: str) -> None:
        """Deletes a checkpoint.

        Raises:
            UnknownCheckpoint: there is none of this name.
        """
        _check_name(name)
        with HomeCalls(self._options) as home:
            request = checkpoint_pb2.DeleteCheckpointRequest(name=name)
            home.answer(lambda link: link.checkpoints.DeleteCheckpoint, request)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise BadOption(f"a checkpoint is named by a string that is not empty, got {name!r}")


def _create(home: HomeCalls, session: Session, data: bytes | None, name: str | None) -> job_pb2.Job:
    """Has home make a checkpoint; returns its job once the state is cut."""
    membership = session.membership
    caller = common_pb2.RequestHeader(client_id=session.client_id, timeline=session.links[0].timeline)
    if membership is not None:
        caller.step, caller.rank = membership.step, membership.options.rank
    request = checkpoint_pb2.CreateCheckpointRequest(request_key=secrets.token_bytes(KEY_BYTES), name=name or "")
    for uploads_left in reversed(range(MAX_UPLOADS)):
        try:
            if data is not None:
                request.extra_id = _bring(home, data, caller)
            while True:
                session.check()
                job = begin(lambda: home.answer(lambda link: link.checkpoints.CreateCheckpoint, request, caller).job)
                if job.state != job_pb2.JOB_STATE_WAITING:
                    return job
        except BadOption:
            if data is None or not uploads_left:
                raise
    raise AssertionError("the last try returns or raises")


def _bring(home: HomeCalls, data: bytes, caller: common_pb2.RequestHeader) -> bytes:
    """Brings an addition to home; returns its id there."""
    extra_id, there = secrets.token_bytes(KEY_BYTES), 0
    while there < len(data):
        request = checkpoint_pb2.PutExtraRequest(
            extra_id=extra_id, offset=there, total_bytes=len(data), data=data[there : there + PART_BYTES]
        )
        there = home.answer(lambda link: link.checkpoints.PutExtra, request, caller).received_bytes
    return extra_id
