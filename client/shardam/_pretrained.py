"""Rows given by the program, written by one of the workers that have them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

import numpy as np
import redis
import torch
from redis.exceptions import LockError

from shardam._arrays import Float32s, as_rows, some
from shardam._session import Session
from shardam.table import Table
from shardam_proto.errors import NonFiniteState, RedisUnreachable, WrongShape

logger = logging.getLogger(__name__)

PART_BYTES = 32 * 2**20
"""Of one assign: half of a message, so that it fits also where one shard owns all rows of a part."""

LEASE_MARGIN_S = 5.0
"""A lease outlives one assign, which fails after shard_timeout_s at the latest, by this much."""


def pretrained_weight(embeddings: torch.Tensor, table: str) -> Float32s:
    """Returns given rows as float32 [N, dim], checked before a table is made for them.

    Raises:
        WrongShape: not a matrix with at least one row.
        BadOption: no float dtype that widens to float32.
        NonFiniteState: a value is not finite.
    """
    weight = as_rows(embeddings.detach().cpu() if isinstance(embeddings, torch.Tensor) else embeddings, "embeddings")
    if weight.ndim != 2 or weight.shape[0] == 0:
        raise WrongShape(f"table {table!r}: embeddings must have shape [num_embeddings, dim], got shape {weight.shape}")
    bad = np.flatnonzero(~np.isfinite(weight).all(axis=1))
    if bad.size:
        raise NonFiniteState(
            f"table {table!r}: embeddings must be finite; rows {some(bad)} are not; nothing was written",
            metadata={"table": table, "row_ids": some(bad), "column": "weight"},
        )
    return weight


def fill(table: Table, weight: Float32s, *, overwrite: bool) -> None:
    """Writes rows 0 .. N - 1 of a table, in one client at a time over all workers.

    Args:
        table: a bounded table of N rows.
        weight: float32 [N, dim].
        overwrite: True: rows that exist, too, with zero moments; False: they are left alone.

    Raises:
        RedisUnreachable: the lease could not be had.
        ShardUnreachable, ShardLost: as Table.assign; some rows may be written.
    """
    rows_per_part = max(1, PART_BYTES // (8 + 3 * 4 * table.dim))
    with _only_writer(table) as renew:
        if not overwrite and table.stats().num_rows == len(weight):
            return
        for start in range(0, len(weight), rows_per_part):
            part = weight[start : start + rows_per_part]
            moments = np.zeros_like(part) if overwrite else None
            row_ids = np.arange(start, start + len(part))
            table.assign(row_ids, part, exp_avg=moments, exp_avg_sq=moments, if_absent=not overwrite)
            renew()


@contextlib.contextmanager
def _only_writer(table: Table) -> Iterator[Callable[[], None]]:
    """Holds the lease of the table's given rows; yields what renews it."""
    session: Session = table.cluster._ready_to_read()
    lease_s = session.options.shard_timeout_s + LEASE_MARGIN_S
    lease = session.given_rows_lease(table.info().table_id, lease_s)

    def renew() -> None:
        try:
            lease.reacquire()
        except LockError:  # this process was stopped for so long that another worker may have written meanwhile
            logger.warning("table %r: the lease to write its rows ran out; waiting for it again", table.name)
            lease.acquire()

    try:
        lease.acquire()
        try:
            yield renew
        finally:
            with contextlib.suppress(LockError):
                lease.release()
    except redis.RedisError as error:
        raise RedisUnreachable(
            f"table {table.name!r}: workers agree through Redis on who writes its given rows, and it does not answer: {error}"
        ) from error
