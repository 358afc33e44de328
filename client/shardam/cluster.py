"""A connection to a cluster: tables by name, and the one queue through which this client changes them."""

from __future__ import annotations

import difflib
import logging
import math
import os
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from shardam._calls import ShardCall
from shardam._discovery import open_session
from shardam._forks import FORKS
from shardam._link import ShardLink
from shardam._open_clusters import OpenClusters
from shardam._parts import TableStepGradient, options_value, push_change
from shardam._pusher import Pusher
from shardam._session import Session, SessionOptions
from shardam._values import TableInfo, TableStats
from shardam.table import Table
from shardam_proto.errors import BadOption, ClientClosed, ShardamError, UnknownTable
from shardam_proto.schema import TableSpec, check_name
from shardam_proto.v1 import common_pb2, table_pb2

logger = logging.getLogger(__name__)

URL_VARIABLE = "SHARDAM_REDIS_URL"
TOKEN_VARIABLE = "SHARDAM_TOKEN"

PAGE_SIZE = 1000
"""Tables of one page of a listing; a schema has about 100 bytes."""


class Cluster:
    """A client of a cluster; made by connect, or a LocalCluster. Thread-safe, and a context manager that closes.

    After a fork, in DataLoader workers too, the child connects when it first uses the cluster, as a client of its own, with the
    same options; what the parent had queued is sent by the parent alone. A worker that loads data is there to pull. It may
    push, too: each of its pushes is a step of its own. A pickle carries the cluster's address: the Redis URL as it was given,
    its password included, but no token and nothing that is queued. What comes out of it connects likewise, with $SHARDAM_TOKEN
    if set. Copies are the same cluster.

    Args:
        session: an open client, or how to open one when it is first needed.
    """

    def __init__(self, session: Session | SessionOptions) -> None:
        self._options = session if isinstance(session, SessionOptions) else session.options
        self._client: tuple[Session, Pusher] | None = None
        self._open_lock = threading.Lock()
        self._close_lock = threading.Lock()
        self._closed = False
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
            if self._closed:
                raise ClientClosed("this cluster object is closed; connect again")
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
        self._open_lock, self._close_lock = threading.Lock(), threading.Lock()
        return parents

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
    def mode(self) -> str:
        """What a step means: "async", "sync" or "bounded:N"."""
        return "async"

    # -- tables

    def tables(self) -> list[TableInfo]:
        """Returns all tables, by name."""
        return [_info(table) for table in self._listed(self._home)]

    def table(self, name: str) -> Table:
        """Returns a table.

        Raises:
            UnknownTable: there is none of this name; the message lists near names.
        """
        if not isinstance(name, str):
            raise BadOption(f"a table is named by a string, got {name!r}")
        try:
            info = next(self._listed(self._home, [name]))
        except UnknownTable:
            raise self._unknown(name) from None
        return Table(self, _info(info))

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
        for spec in specs:
            if not isinstance(spec, TableSpec):
                raise BadOption(f"create_tables takes shardam.TableSpec values, got {spec!r}")
        if not specs:
            return []
        request = table_pb2.CreateTablesRequest(specs=[spec.to_proto() for spec in specs])
        answer = self._session.answer(ShardCall(self._home, lambda link: link.tables.CreateTables, request))
        return [Table(self, _info(table)) for table in answer.tables]

    @property
    def _home(self) -> ShardLink:
        self._session.check()
        return self._session.links[0]

    def _listed(self, link: ShardLink, names: Sequence[str] = ()) -> Iterator[common_pb2.TableInfo]:
        after_name = ""
        while True:
            request = table_pb2.ListTablesRequest(names=names, page_size=PAGE_SIZE, after_name=after_name)
            answer = self._session.answer(ShardCall(link, lambda target: target.tables.ListTables, request))
            yield from answer.tables
            after_name = answer.next_after_name
            if not after_name:
                return

    def _unknown(self, name: str) -> UnknownTable:
        names = [table.spec.name for table in self._listed(self._home)]
        near = difflib.get_close_matches(name, names, n=5)
        if near:
            hint = f"near names: {', '.join(map(repr, near))}"
        else:
            hint = f"the cluster has {len(names)} tables: {', '.join(map(repr, names[:8])) or 'none yet'}"
        return UnknownTable(
            f"cluster {self.name!r} has no table {name!r}; {hint}. Create one with create_table(shardam.TableSpec(name, dim))",
            metadata={"table": name},
        )

    def _table_stats(self, info: TableInfo) -> TableStats:
        self._ready_to_read()
        shards: list[common_pb2.TableInfo] = []
        for link in self._session.links:
            shards.extend(self._listed(link, [info.name]))
        home = shards[0]
        return TableStats(
            table_step=home.table_step,
            num_rows=sum(shard.num_rows for shard in shards),
            rows_per_shard=tuple(shard.num_rows for shard in shards),
            record_bytes=sum(shard.record_bytes for shard in shards),
            index_bytes=sum(shard.index_bytes for shard in shards),
            saturated_values=sum(shard.saturated_values for shard in shards),
            nonfinite_pushes=sum(shard.nonfinite_pushes for shard in shards),
            last_options=options_value(home.last_options) if home.HasField("last_options") else None,
        )

    # -- changes

    def _ready_to_read(self, *, training: bool = False) -> Session:
        """Waits for this client's queued pushes; a read then sees them.

        Args:
            training: the rows are to be trained.
        """
        self._pusher.flush()
        return self._session

    def _synchronize(self) -> None:
        """Waits until every queued push has been applied."""
        self._pusher.flush()

    def _ready_to_write(self) -> tuple[Session, Pusher]:
        self._session.check()
        return self._session, self._pusher

    def _queue_push(self, sections: Sequence[TableStepGradient], kind: str = "gradient") -> None:
        """Queues one optimizer step and returns; its error is raised by the next step, read or flush."""
        session, pusher = self._ready_to_write()
        pusher.submit(push_change(sections, session.route_map))

    # -- end

    def close(self) -> None:
        """Sends what is queued, says goodbye to the shards and closes the connections. May be called again.

        Raises:
            ShardamError: a queued push failed; everything is closed all the same.
        """
        with self._close_lock:
            if self._closed:
                return
            with self._open_lock:
                self._closed = True
            if self._client is None:
                return
            session, pusher = self._client
            try:
                pusher.finish()
            finally:
                pusher.close()
                session.close()
                _OPEN.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
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


def connect(
    url: str | None = None,
    *,
    cluster: str = "default",
    token: str | None = None,
    mode: str = "async",
    shard_timeout_s: float = 60.0,
) -> Cluster:
    """Connects to a cluster; waits until its map is made and all its shards are ready.

    Args:
        url: the cluster's Redis, redis://[:password@]host:port/db; None: $SHARDAM_REDIS_URL.
        cluster: the cluster's name.
        token: the cluster's token; None: $SHARDAM_TOKEN, if set.
        mode: "async", every push is applied on arrival; this version has no other.
        shard_timeout_s: how long to wait for the cluster, and later for a shard's answer to one call.

    Raises:
        BadOption: no URL, another mode, or a time-out that is not a number > 0.
        RedisUnreachable: no Redis at the URL within shard_timeout_s.
        ShardNotReady: the cluster was not ready in that time; the message says what was missing.
        ShardUnreachable: a registered shard did not answer.
        BadToken: the token is missing or wrong.
    """
    redis_url = url or os.environ.get(URL_VARIABLE)
    if not redis_url:
        raise BadOption(
            f"no Redis URL: pass url= to shardam.connect or set {URL_VARIABLE} (shardam up prints it); "
            "shardam.LocalCluster() starts a cluster of its own"
        )
    if mode != "async":
        raise BadOption(f"mode must be 'async', the only one of this version, got {mode!r}")
    if isinstance(shard_timeout_s, bool) or not isinstance(shard_timeout_s, (int, float)) or not 0 < shard_timeout_s < math.inf:
        raise BadOption(f"shard_timeout_s must be a finite number of seconds > 0, got {shard_timeout_s!r}")
    check_name(cluster, "cluster name")
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    return Cluster(open_session(SessionOptions(redis_url, cluster, token, float(shard_timeout_s))))


def _info(table: common_pb2.TableInfo) -> TableInfo:
    return TableInfo(TableSpec.from_proto(table.spec), table.table_id, table.table_seed)
