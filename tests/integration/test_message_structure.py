"""What a training step sends: to each shard one pull and one push, with each distinct row once, and next to nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from shardam_testing.processes import running_shards

import shardam
from shardam import _stream
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import embedding_pb2

DIMS = {"users": 4, "items": 8, "words": 16}

FEATURES = {"user": "users", "friend": "users", "clicked": "items", "shown": "items", "text": "words"}

NUM_IDS = 300
"""Of a feature, of 400 that there are: many are named twice or more. All rows fit one message of 64 KiB."""

OVERHEAD = 0.02
"""Of the bytes of ids and rows."""


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bytes]]:
    """Shard and bytes of every message that leaves on a stream."""
    messages: list[tuple[str, bytes]] = []
    outgoing = _stream.ExchangeStream._outgoing

    def noted(stream: _stream.ExchangeStream) -> Iterator[bytes]:
        for message in outgoing(stream):
            messages.append((stream.peer, message))
            yield message

    monkeypatch.setattr(_stream.ExchangeStream, "_outgoing", noted)
    return messages


def of_kind(sent: list[tuple[str, bytes]], kind: str) -> list[tuple[str, bytes, embedding_pb2.PushRequest]]:
    """Returns shard, bytes and message of the requests of a kind."""
    parsed = [(peer, data, embedding_pb2.ExchangeRequest.FromString(data)) for peer, data in sent]
    return [(peer, data, getattr(message, kind)) for peer, data, message in parsed if message.WhichOneof("request") == kind]


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_a_step_is_one_pull_and_one_push_a_shard_with_the_distinct_rows_of_all_tables(
    tmp_path: Path, num_shards: int, sent: list[tuple[str, bytes]]
) -> None:
    generator = torch.Generator().manual_seed(num_shards)
    with running_shards(tmp_path, num_shards) as shards, shardam.connect(shards.valkey.url, cluster="test") as cluster:
        tables = {name: shardam.Embedding(None, dim, table=name, cluster=cluster) for name, dim in DIMS.items()}
        collection = shardam.EmbeddingCollection({feature: tables[name] for feature, name in FEATURES.items()})
        sparse = shardam.SparseAdam(collection, lr=0.1)
        for _ in range(2):
            batch = {feature: torch.randint(0, 400, (NUM_IDS,), generator=generator) for feature in FEATURES}
            sent.clear()
            outputs = collection(batch)
            torch.stack([rows.square().sum() for rows in outputs.values()]).sum().backward()
            sparse.step()
            sparse.zero_grad()
            sparse.synchronize()

            distinct = {
                name: np.unique(np.concatenate([batch[feature] for feature, of in FEATURES.items() if of == name]))
                for name in DIMS
            }
            owners = {name: RouteMap(1, num_shards).shards_of(row_ids) for name, row_ids in distinct.items()}
            pulls, pushes = of_kind(sent, "pull"), of_kind(sent, "push")
            once = Counter({peer: 1 for peer, _ in sent})
            assert len(once) == num_shards
            assert Counter(peer for peer, _, _ in pulls) == Counter(peer for peer, _, _ in pushes) == once
            for messages, row_bytes in ((pulls, dict.fromkeys(DIMS, 8)), (pushes, {n: 8 + 4 * d for n, d in DIMS.items()})):
                payloads = [len(message.row_ids) + len(getattr(message, "rows", b"")) for _, _, message in messages]
                expected = [sum(row_bytes[n] * int((owners[n] == shard).sum()) for n in DIMS) for shard in range(num_shards)]
                assert sorted(payloads) == sorted(expected)
            for _, data, message in pushes:
                assert len(data) < (1 + OVERHEAD) * (len(message.row_ids) + len(message.rows))
