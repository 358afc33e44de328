"""One shard as a client sees it: its channel, its stubs, and who answered there."""

from __future__ import annotations

import logging
import threading

import grpc

from shardam_proto.channels import open_channel
from shardam_proto.errors import ShardLost
from shardam_proto.v1 import embedding_pb2, embedding_pb2_grpc, row_pb2_grpc, table_pb2_grpc

logger = logging.getLogger(__name__)


class ShardLink:
    """The way to one shard.

    Args:
        index: shard index.
        address: registered host:port.

    Attributes:
        incarnation: process life that answered Open.
        lineage: lineage of its state then.
        timeline: timeline of its state then.
        acknowledged: last number of this client that the shard has answered or closed.
        lock: held while the link is opened again.
    """

    def __init__(self, index: int, address: str) -> None:
        self.index = index
        self.incarnation = 0
        self.lineage = 0
        self.timeline = 0
        self.acknowledged = 0
        self.lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        self.move(address)

    @property
    def peer(self) -> str:
        """The shard's name in messages."""
        return f"shard {self.index} at {self.address}"

    def move(self, address: str) -> None:
        """Goes to another address from the next call on; calls that run on the old channel end by themselves."""
        channel = open_channel(address)
        self._channels.append(channel)
        self.address = address
        self.embedding = embedding_pb2_grpc.EmbeddingServiceStub(channel)
        self.rows = row_pb2_grpc.RowServiceStub(channel)
        self.tables = table_pb2_grpc.TableServiceStub(channel)

    def adopt(self, answer: embedding_pb2.OpenResponse) -> None:
        """Remembers who answered Open."""
        self.incarnation = answer.header.incarnation
        self.lineage = answer.header.lineage
        self.timeline = answer.header.timeline

    def continues(self, answer: embedding_pb2.OpenResponse) -> bool:
        """True: the state that answered is the one this client knows, with all that it was told is applied."""
        header = answer.header
        known = (self.lineage, self.timeline)
        return (header.lineage, header.timeline) == known and header.last_number >= self.acknowledged

    def lost(self, answer: embedding_pb2.OpenResponse) -> ShardLost:
        """Returns the error that says what is missing from the state that answered."""
        has = answer.header.last_number
        where = "" if answer.header.lineage == self.lineage else ", on another lineage of state"
        return ShardLost(
            f"{self.peer} lost its rows: it had acknowledged number {self.acknowledged} of this client and now has "
            f"{has}{where}. This version keeps rows in memory only, so that shard's share of every table is gone: restart the "
            "cluster and train again",
            acknowledged=self.acknowledged,
            has=has,
            metadata={"shard": str(self.index), "address": self.address},
        )

    def close(self) -> None:
        """Closes all channels."""
        for channel in self._channels:
            channel.close()
