"""A connection to a cluster: tables by name, and the one queue through which this client changes them."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from shardam._checkpointing import ClusterCheckpoints
from shardam._cluster_timings import ClusterTimings
from shardam._discovery import open_session
from shardam._endings import copy_of
from shardam._forks import FORKS
from shardam._listing import listed_by_home, table_info, table_stats, unknown_table
from shardam._open_clusters import OpenClusters
from shardam._parts import TableStepGradient
from shardam._pusher import Pusher
from shardam._session import Session
from shardam._session_options import SessionOptions
from shardam._steps import StepKind, refused_step, step_change, table_step_after
from shardam._table_files import ClusterTableFiles
from shardam._timings import Timings
from shardam._values import PushResult, TableInfo, TableStats
from shardam.table import Table
from shardam_proto.errors import (
    BadOption,
    ClientClosed,
    ClusterRestored,
    MessageTooLarge,
    NonFiniteGradient,
    NotAMember,
    ShardamError,
    UnknownTable,
)
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import table_pb2

logger = logging.getLogger(__name__)

TOKEN_VARIABLE = "SHARDAM_TOKEN"


class Cluster(ClusterCheckpoints, ClusterTableFiles, ClusterTimings):
    """A client of a cluster; made by connect, or a LocalCluster. Thread-safe, and a context manager that closes.

    After a fork, in DataLoader workers too, the child connects when it first uses the cluster, as a client of its own, with the
    same options; what the parent had queued is sent by the parent alone. A worker that loads data is there to pull. It may
    push, too: each of its pushes is a step of its own. A pickle carries the cluster's address: the Redis URL as it was given,
    its password included, but no token and nothing that is queued. What comes out of it connects likewise, with $SHARDAM_TOKEN
    if set. Copies are the same cluster.

    A member of a group is the client that connect returned. What a child or a pickle opens joins no group and is async: it may
    pull; while a sync group trains, the shards refuse its changes (NotAMember).

    Args:
        session: an open client, or how to open one when it is first needed.
    """

    def __init__(self, session: Session | SessionOptions) -> None:
        self._options = session if isinstance(session, SessionOptions) else session.options
        self._client: tuple[Session, Pusher] | None = None
        self._open_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False
        self._restores = 0
        FORKS.add_heir(self)
        if isinstance(session, Session):
            self._start(session)

    def _start(self, session: Session) -> tuple[Session, Pusher]:
        self._client = session, Pusher(session)
        _OPEN.add(self)
        return self._client

    def _opened(self) -> tuple[Session, Pusher]:
        """Returns the client, opened at its first use."""
        client = self._client
        if client is not None:
            return client
        with self._open_lock:
            self._check_open()
            return self._client or self._start(open_session(self._options))

    @property
    def _session(self) -> Session:
        return self._opened()[0]

    @property
    def _pusher(self) -> Pusher:
        return self._opened()[1]

    def _begin_anew(self) -> object:
        """Drops, in a forked child, the parent's client; the child opens one of its own when it needs one.

        Returns:
            What was dropped; it must not be finalized.
        """
        parents, self._client = self._client, None
        self._options = dataclasses.replace(self._options, group=None, timings=Timings())
        self._open_lock, self._close_lock = threading.Lock(), threading.Lock()
        return parents

    def _check_open(self) -> None:
        if self._closed:
            raise ClientClosed("this cluster object is closed; connect again")

    @property
    def _is_closed(self) -> bool:
        """True: close was called."""
        return self._closed

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self._options.cluster

    @property
    def num_shards(self) -> int:
        """Number of shards."""
        return self._session.route_map.num_shards

    @property
    def _num_shards_known(self) -> int:
        """Number of shards as far as is known without asking; by it rows are put in order, and a wrong one costs a copy."""
        client = self._client
        return 1 if client is None else client[0].route_map.num_shards

    # -- the group

    @property
    def mode(self) -> str:
        """The mode as connect took it: "async", "sync" or "bounded:N"."""
        return "async" if self._options.group is None else self._options.group.mode

    @property
    def group(self) -> str | None:
        """Name of the group that this client has joined; None in async."""
        return None if self._options.group is None else self._options.group.name

    @property
    def rank(self) -> int | None:
        """This worker's rank in its group; None in async."""
        return None if self._options.group is None else self._options.group.rank

    @property
    def world_size(self) -> int | None:
        """Number of ranks of the group; None in async."""
        return None if self._options.group is None else self._options.group.world_size

    @property
    def group_step(self) -> int | None:
        """The step of its group that this worker works on; None in async.

        In sync it is one after the last step whose end this worker knows; in bounded mode one after its last queued push.
        """
        client = self._client
        membership = None if client is None else client[0].membership
        return None if membership is None else membership.step

    def rejoin(self) -> None:
        """Joins its group again after this worker was dropped from it, with the same rank, at the group's next step.

        What is left of the dropped client is closed: contributions that it had queued, or that were not decided, are gone, and
        their errors with them; the group went on without them. Tables and modules of this object go on with the new client.
        For a worker that is still a member, as far as it knows, this does nothing.

        Raises:
            BadOption: this client is in no group.
            ClientClosed: this object was closed; connect again.
            GroupMismatch: another worker has the rank now.
            ShardamError: this client has ended for another reason than a drop, ShardLost among others, which no rejoining
                mends; or the cluster cannot be reached.
        """
        if self._options.group is None:
            raise BadOption("this client is in no group, so there is none to rejoin; connect with mode='sync' or 'bounded:N'")
        session, pusher = self._opened()
        with self._open_lock:
            self._check_open()
            if self._client is not None and self._client[0] is not session:
                return  # another thread has rejoined meanwhile
            if session.failure is None:
                return
            if not isinstance(session.failure, NotAMember):
                raise copy_of(session.failure)
            pusher.close()
            session.close()
            self._start(open_session(self._options))

    def _begin_on_new_timeline(self) -> None:
        """Goes on as a new client after a restore; what the former one had queued belongs to a state that is gone."""
        with self._open_lock:
            self._check_open()
            client, self._client = self._client, None
            self._restores += 1
            if client is not None:
                session, pusher = client
                session.fail(ClusterRestored("the cluster was restored from a checkpoint by this process"))
                pusher.close()
                session.close()
            self._start(open_session(self._options))

    # -- tables

    def tables(self) -> list[TableInfo]:
        """Returns all tables, by name."""
        return [table_info(table) for table in listed_by_home(self._ready_session)]

    def table(self, name: str) -> Table:
        """Returns a table.

        Raises:
            UnknownTable: there is none of this name; the message lists near names.
        """
        if not isinstance(name, str):
            raise BadOption(f"a table is named by a string, got {name!r}")
        try:
            (info,) = listed_by_home(self._ready_session, [name])
        except UnknownTable:
            raise unknown_table(self._session, self.name, name) from None
        return Table(self, table_info(info))

    def create_table(self, spec: TableSpec) -> Table:
        """Creates a table on all shards; one that exists with the same schema is returned as it is.

        Raises:
            SchemaMismatch: a table of this name has another schema; the message shows both.
        """
        return self.create_tables([spec])[0]

    def create_tables(self, specs: Sequence[TableSpec]) -> list[Table]:
        """Creates tables, all or none, in one call.

        Raises:
            SchemaMismatch: as create_table.
        """
        return self._create_tables(specs, {})

    def _create_tables(self, specs: Sequence[TableSpec], seeds: Mapping[str, int]) -> list[Table]:
        """As create_tables; a table that is made now has the seed given by its name."""
        for spec in specs:
            if not isinstance(spec, TableSpec):
                raise BadOption(f"create_tables takes shardam.TableSpec values, got {spec!r}")
        if not specs:
            return []
        request = table_pb2.CreateTablesRequest(specs=[spec.to_proto() for spec in specs], table_seeds=seeds)
        answer = self._ready_session.ask_home(lambda link: link.tables.CreateTables, request)
        return [Table(self, table_info(table)) for table in answer.tables]

    @property
    def _ready_session(self) -> Session:
        session = self._session
        session.check()
        return session

    def _table_stats(self, info: TableInfo) -> TableStats:
        return table_stats(self._ready_to_read(), info)

    # -- changes

    def _ready_to_read(self, *, training: bool = False) -> Session:
        """Waits for this client's queued pushes; a read then sees them.

        Args:
            training: True: in a sync group also for other members, until the step that was pushed is decided. False: only until
                every shard has this client's part of it: the read may see the tables before that step, and waits for nobody.
                What is known to be decided by then, the read itself waits for on shards that have yet to be told.
        """
        with self._timings.measured("flush"):
            self._pusher.flush(for_members=training)
        return self._session

    def _synchronize(self) -> None:
        """Waits until every queued push has been applied; in a sync group, until its step is decided."""
        self._pusher.flush()

    def _ready_to_write(self) -> tuple[Session, Pusher]:
        self._session.check()
        return self._session, self._pusher

    def _queue_push(self, sections: Sequence[TableStepGradient], kind: StepKind = "gradient") -> None:
        """Queues one optimizer step and returns; its error is raised by the next step, read or flush.

        Args:
            sections: the tables that step; none unless the kind is gradient.
            kind: what it contributes to a step of the group; in async a step without a gradient sends nothing.

        Raises:
            MessageTooLarge: a shard's part is too large; in a sync group the step is refused for all members.
            ShardamError: an earlier queued push failed; this one is not queued.
        """
        session, pusher = self._ready_to_write()
        with self._refusing_step():
            change = step_change(session, sections, kind)
        if change is not None:
            pusher.submit(change)

    def _push_now(self, step: TableStepGradient) -> PushResult:
        """Makes one step of one table and waits until it is applied; raises as Table.push."""
        session, pusher = self._ready_to_write()
        with self._refusing_step():
            change = step_change(session, [step], "gradient")
        if change is None:
            raise AssertionError("a step with a gradient is always sent")
        pusher.run(change)
        return PushResult(step=table_step_after(change, step.table_id), number=change.number)

    @contextlib.contextmanager
    def _refusing_step(self) -> Iterator[None]:
        """Has a step that this client refuses, by what is raised inside, count as its part of the group's step.

        In sync the step is then refused for all members, in bounded mode this worker's clock goes on; else the others would
        wait for a part that never comes.

        Raises:
            NonFiniteGradient, MessageTooLarge: what was raised.
        """
        try:
            yield
        except (NonFiniteGradient, MessageTooLarge) as error:
            session, pusher = self._ready_to_write()
            change = refused_step(session, error)
            if change is not None:
                pusher.submit(change)
            raise

    # -- end

    def close(self) -> None:
        """Sends what is queued, says goodbye to the shards and closes the connections. May be called again.

        A member of a sync group first waits until the step that it has contributed to is decided, then leaves the group.
        A `with` that an exception ends, Ctrl-C among them, does not wait for other members: a contribution that every shard
        has counts if they arrive within client_lease_s, and what is queued behind it is dropped.

        Raises:
            ShardamError: a queued push failed; everything is closed all the same.
        """
        self._close(for_members=True)

    def _close(self, *, for_members: bool) -> None:
        """Closes; for_members: False: without waiting for other members of a sync group."""
        with self._close_lock:
            if self._closed:
                return
            with self._open_lock:
                self._closed = True
            if self._client is None:
                return
            session, pusher = self._client
            try:
                pusher.finish(for_members=for_members)
            finally:
                pusher.close()
                session.close()
                _OPEN.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            # After an error, Ctrl-C among them, other ranks may never come: what happened is to be seen now.
            self._close(for_members=error is None)
        except ShardamError as problem:
            if error is None:
                raise
            logger.error("while closing after another error: %s", problem)

    def __repr__(self) -> str:
        shards = "not connected yet" if self._client is None else f"{self.num_shards} shards"
        return f"{type(self).__name__}({self.name!r}, {shards})"

    def __reduce__(self) -> tuple[object, tuple[str, str, float]]:
        return _from_pickle, (self._options.redis_url, self._options.cluster, self._options.shard_timeout_s)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self


_OPEN: OpenClusters[Cluster] = OpenClusters()
"""This process's."""


def _from_pickle(redis_url: str, cluster: str, shard_timeout_s: float) -> Cluster:
    """Returns this process's client for what was pickled; many pickles of one cluster share it."""

    def make() -> Cluster:
        return Cluster(SessionOptions(redis_url, cluster, os.environ.get(TOKEN_VARIABLE) or None, shard_timeout_s))

    return _OPEN.shared((redis_url, cluster, shard_timeout_s), make)
