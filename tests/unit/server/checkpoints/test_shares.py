"""Shares: every bucket's rows are looked for where they were written, and every file belongs to somebody."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_proto.routing import NUM_BUCKETS, RouteMap
from shardam_server.shard.checkpoints.file_names import segment_name
from shardam_server.shard.checkpoints.manifest import CheckpointFile, Manifest, ShardFiles
from shardam_server.shard.checkpoints.shares import bucket_range, share_of

COUNTS = st.integers(1, 40)


def written_by(num_shards: int) -> Manifest:
    """Two files of rows and one of state by each shard."""
    shards = [
        ShardFiles(
            index,
            "host",
            "folder",
            0,
            tuple(CheckpointFile(segment_name(index, num_shards, place), 0, "", int(place < 2)) for place in range(3)),
        )
        for index in range(num_shards)
    ]
    return Manifest("one", 1, 0.0, 0.0, "", "oak", "id", 0, 1, 1, num_shards, (), tuple(shards))


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5, 7, 64, 4096])
def test_ranges_of_buckets_are_those_of_the_route_map(num_shards: int) -> None:
    owners = [(bucket * num_shards) // NUM_BUCKETS for bucket in range(NUM_BUCKETS)]
    for index in range(num_shards):
        assert list(bucket_range(index, num_shards)) == [bucket for bucket, owner in enumerate(owners) if owner == index]


@given(COUNTS, COUNTS)
def test_shards_together_read_every_file_and_each_reads_no_file_in_vain(written: int, loaded: int) -> None:
    manifest = written_by(written)
    shares = [share_of(manifest, index, loaded) for index in range(loaded)]
    states = [segment.file.name for share in shares for segment in share.states]
    assert sorted(states) == sorted(segment_name(index, written, 2) for index in range(written)), "each counts once"
    rows = {segment.file.name for share in shares for segment in share.rows}
    assert rows == {segment_name(index, written, place) for index in range(written) for place in (0, 1)}
    for index, share in enumerate(shares):
        own = set(bucket_range(index, loaded))
        for segment in share.rows:
            assert own & set(bucket_range(segment.shard.index, written))


@given(COUNTS)
def test_the_same_number_of_shards_reads_its_own_files(num_shards: int) -> None:
    manifest = written_by(num_shards)
    for index in range(num_shards):
        share = share_of(manifest, index, num_shards)
        assert {segment.shard.index for segment in share.segments} == {index}
        assert len(share.segments) == 3


def test_a_row_lies_in_the_files_of_the_shard_that_owned_it() -> None:
    ids = np.random.default_rng(1).integers(-(2**62), 2**62, 500)
    before, after = RouteMap(1, 3).shards_of(ids), RouteMap(2, 5).shards_of(ids)
    manifest = written_by(3)
    for written, loaded in zip(before.tolist(), after.tolist(), strict=True):
        assert written in {segment.shard.index for segment in share_of(manifest, loaded, 5).rows}
