"""Which of a checkpoint's files hold the rows of one shard, whatever the number of shards that wrote it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shardam_proto.routing import NUM_BUCKETS
from shardam_server.shard.checkpoints.manifest import CheckpointFile, Manifest, ShardFiles


@dataclasses.dataclass(frozen=True)
class Segment:
    """One file of a shard that wrote the checkpoint.

    Attributes:
        shard: what that shard wrote.
        number: position of the file in it.
    """

    shard: ShardFiles
    number: int

    @property
    def file(self) -> CheckpointFile:
        """The file."""
        return self.shard.files[self.number]


@dataclasses.dataclass(frozen=True)
class Share:
    """The files of one shard that loads.

    Attributes:
        rows: files that can hold its rows.
        states: files whose counters count on this shard, each on exactly one.
    """

    rows: tuple[Segment, ...]
    states: tuple[Segment, ...]

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All of them."""
        return self.rows + self.states


def bucket_range(index: int, num_shards: int) -> range:
    """Returns the buckets that a shard owns (routing.RouteMap): floor(bucket * num_shards / 4096) = index."""
    return range(-(-index * NUM_BUCKETS // num_shards), -(-(index + 1) * NUM_BUCKETS // num_shards))


def share_of(manifest: Manifest, index: int, num_shards: int) -> Share:
    """Returns the files that shard `index` of `num_shards` loads."""
    own = bucket_range(index, num_shards)
    rows: list[Segment] = []
    for shard in manifest.shards:
        written = bucket_range(shard.index, manifest.num_shards)
        if written.start < own.stop and own.start < written.stop:
            rows.extend(Segment(shard, number) for number in range(len(shard.files) - 1))
    states = (one for one in states_of(manifest) if one.shard.index * num_shards // manifest.num_shards == index)
    return Share(tuple(rows), tuple(states))


def states_of(manifest: Manifest) -> Iterator[Segment]:
    """Yields the file of each shard that holds its counters, clients and groups: the last one."""
    for shard in manifest.shards:
        yield Segment(shard, len(shard.files) - 1)
