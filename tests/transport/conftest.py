"""One shard within this process, a client of it, a stream, and a sync group; a file of tests may have others in their place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from shardam_testing.held_group import SYNC, HeldGroup
from shardam_testing.held_shard import HeldShard, held_shard
from shardam_testing.raw_client import RawClient
from shardam_testing.raw_stream import RawStream, raw_stream


@pytest.fixture
def shard() -> Iterator[HeldShard]:
    with held_shard() as shard:
        yield shard


@pytest.fixture
def client(shard: HeldShard) -> Iterator[RawClient]:
    with shard.client() as client:
        yield client


@pytest.fixture
def stream(client: RawClient) -> Iterator[RawStream]:
    with raw_stream(client.channel) as stream:
        yield stream


@pytest.fixture
def first(client: RawClient) -> RawClient:
    """The group's rank 0, whose stream it is."""
    return client


@pytest.fixture
def second(shard: HeldShard) -> Iterator[RawClient]:
    with shard.client() as client:
        yield client


@pytest.fixture
def group(shard: HeldShard, first: RawClient, second: RawClient) -> HeldGroup:
    return HeldGroup(shard, SYNC, [first, second])
