"""Which shard owns a row: id -> bucket -> shard, the same in every process (DESIGN.md, sections 1 and 3).

Pure functions of their arguments; knows nothing of processes or addresses.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from shardam_kernels.hashing import mix64

NUM_BUCKETS = 4096
"""Fixed for the life of a cluster; a bucket is the unit that moves between shards."""

ROUTING_VERSION = 1
"""Version of the functions below; stored with every route map."""

_BUCKET_SHIFT = 64 - 12  # the top 12 bits of 64 name one of 4,096 buckets


def buckets_of(row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns each id's bucket, 0 to 4,095."""
    return (mix64(row_ids.view(np.uint64)) >> np.uint64(_BUCKET_SHIFT)).astype(np.int64)


def scan_keys(row_ids: npt.NDArray[np.int64], *, bounded: bool) -> npt.NDArray[np.uint64]:
    """Returns each id's place in the order in which a shard scans a table: by its mixed value, or by itself where bounded."""
    values = row_ids.view(np.uint64)
    return values if bounded else mix64(values)


@dataclasses.dataclass(frozen=True)
class RouteMap:
    """Bucket to shard: shard i owns the buckets b with floor(b * num_shards / 4096) = i.

    Attributes:
        epoch: grows with each map of a cluster, from 1.
        num_shards: 1 to 4,096.
        version: version of the routing functions that made the map.
    """

    epoch: int
    num_shards: int
    version: int = ROUTING_VERSION

    def __post_init__(self) -> None:
        if self.version != ROUTING_VERSION:
            raise ValueError(f"route map has routing version {self.version}; this program knows version {ROUTING_VERSION}")
        if not 1 <= self.num_shards <= NUM_BUCKETS:
            raise ValueError(f"num_shards must be 1 to {NUM_BUCKETS}, got {self.num_shards}")

    def shards_of(self, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the shard that owns each id.

        Args:
            row_ids: int64 [N], C-contiguous.
        """
        return (buckets_of(row_ids) * self.num_shards) // NUM_BUCKETS
