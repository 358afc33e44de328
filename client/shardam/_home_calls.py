"""Calls of the checkpoint service on home, wherever it is, by a client or by nobody in particular.

They need no client: a cluster that has LOST shards, or has been restored, may be asked for its checkpoints, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType
from typing import Self

from shardam._backoff import Backoff, Deadline
from shardam._calls import RequestT, ResponseT
from shardam._link import ShardLink
from shardam._session_options import SessionOptions
from shardam_proto.channels import UnaryCall
from shardam_proto.errors import ClientClosed, ShardamError, ShardNotReady, make_error
from shardam_proto.limits import PROTOCOL_VERSION
from shardam_proto.registry import Keys, connect_redis, read_cluster
from shardam_proto.v1 import common_pb2

logger = logging.getLogger(__name__)

TRIES_PER_TIMEOUT = 4
"""As for other calls: a lost answer leaves time for three more tries."""

FOR_THE_CALLER = frozenset({"CHECKPOINT_RUNNING", "CHECKPOINT_FAILED"})
"""Reasons that pass only if something else happens first: a caller decides about another try."""

ELSEWHERE = frozenset({"WRONG_CLUSTER", "WRONG_ROLE"})
"""What a stranger at home's former address answers: home is looked up again."""


class HomeCalls:
    """Calls to home; a context manager that closes the connection. One thread at a time.

    Args:
        options: how to reach the cluster.
    """

    def __init__(self, options: SessionOptions) -> None:
        self._options = options
        self._keys = Keys(options.cluster)
        self._redis = connect_redis(options.redis_url)
        self._link: ShardLink | None = None
        self._cluster_id = ""

    def answer(
        self,
        method: Callable[[ShardLink], UnaryCall[RequestT, ResponseT]],
        message: RequestT,
        caller: common_pb2.RequestHeader | None = None,
    ) -> ResponseT:
        """Calls home until it answers, for shard_timeout_s; the message has to stand a repeat.

        Args:
            method: picks the stub's method.
            message: the request; its header is filled in.
            caller: what the header says of the client that asks; None: nobody in particular.

        Raises:
            RedisUnreachable: home could not be looked up in that time.
            ShardUnreachable: home did not answer in that time.
            ShardamError: home's reason.
        """
        deadline, backoff = Deadline(self._options.shard_timeout_s), Backoff()
        while True:
            try:
                return self._try(method, message, caller, deadline)
            except ShardamError as error:
                if error.reason in FOR_THE_CALLER or not (error.rule.retryable or error.reason in ELSEWHERE):
                    raise
                logger.debug("asking home again: %s", error)
                problem = error
            self._let_go()
            backoff.wait(deadline)
            if deadline.passed:
                suffix = f" (tried {backoff.num_waits} times in {deadline.after_s:g} s)"
                raise make_error(problem.reason, problem.message + suffix, problem.metadata)

    def _try(
        self,
        method: Callable[[ShardLink], UnaryCall[RequestT, ResponseT]],
        message: RequestT,
        caller: common_pb2.RequestHeader | None,
        deadline: Deadline,
    ) -> ResponseT:
        link = self._link or self._find()
        try_s = max(0.1, min(deadline.remaining_s, self._options.shard_timeout_s / TRIES_PER_TIMEOUT))
        header = common_pb2.RequestHeader(protocol_version=PROTOCOL_VERSION, cluster_id=self._cluster_id, budget_s=try_s)
        if caller is not None:
            header.MergeFrom(caller)
        message.header.CopyFrom(header)
        return link.call(method, message, try_s)

    def _find(self) -> ShardLink:
        view = read_cluster(self._redis, self._keys)
        entry = view.shards.get(0)
        if view.entry is None or entry is None:
            raise ShardNotReady(f"the home shard of cluster {self._options.cluster!r} is not registered; start it")
        self._cluster_id = view.entry.cluster_id
        self._link = ShardLink(entry, self._options.token, 0 if view.route_map is None else view.route_map.epoch)
        return self._link

    def _let_go(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(ClientClosed(f"{link.peer}: the connection is closed"))

    def close(self) -> None:
        """Closes the connections."""
        self._let_go()
        self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
