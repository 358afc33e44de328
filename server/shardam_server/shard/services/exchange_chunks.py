"""The chunked part that one stream has open, and what is left of one that was refused.

A client may stop between two chunks: an earlier try of the part was answered. So a part also ends when its client
goes on to another change; it is then refused as what may be sent again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shardam_proto.errors import BadOption, ShardamError, ShardUnreachable
from shardam_proto.v1 import common_pb2, embedding_pb2
from shardam_server.shard.chunks import Chunk, ChunkedPart, OpenParts
from shardam_server.shard.services.pushes import Pushes


def is_chunk(header: common_pb2.RequestHeader) -> bool:
    """Whether a push is one chunk of several."""
    return header.num_chunks > 1 or header.chunk_index > 0


class StreamChunks:
    """Puts one stream's chunked parts together, one at a time. Used on the event loop.

    Args:
        open_parts: the parts of all streams.
        pushes: checks a part's form.
        on_refused: called with a part that is refused between its chunks, and why.
    """

    def __init__(self, open_parts: OpenParts, pushes: Pushes, on_refused: Callable[[ChunkedPart, ShardamError], None]) -> None:
        self._open_parts = open_parts
        self._pushes = pushes
        self._on_refused = on_refused
        self._part: ChunkedPart | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._refused_id = 0

    def is_refused(self, header: common_pb2.RequestHeader) -> bool:
        """Whether a chunk follows others of a part that was refused: it has its answer. Chunk 0 begins anew."""
        return bool(header.chunk_index) and header.request_id == self._refused_id

    def give_way(self, header: common_pb2.RequestHeader) -> None:
        """Refuses the open part before another change of its client: a client's changes come one after the other."""
        if self._part is not None and self._part.head.header.client_id == header.client_id:
            self._replace(header)

    def take(self, chunk: Chunk, arrived: float) -> ChunkedPart | None:
        """Takes the next chunk; returns the part if it is whole, then without its reservation.

        Args:
            chunk: the chunk.
            arrived: when it came, by time.perf_counter().

        Raises:
            ShardamError: it is refused.
        """
        header = chunk.head.header
        part = self._part
        if part is None or header.request_id != part.head.header.request_id:
            part = self._open(chunk.head, arrived)
        if not part.add(chunk):
            self._wait_for_next(header.budget_s)
            return None
        self.drop()
        return part

    def _open(self, first: embedding_pb2.PushRequest, arrived: float) -> ChunkedPart:
        header = first.header
        if header.chunk_index or header.num_chunks <= 1:
            raise BadOption(
                f"chunk {header.chunk_index} of {header.num_chunks} has no chunk 0 before it; send the part again from chunk 0"
            )
        self._replace(header)
        sizes = self._pushes.check_first_chunk(first)
        self._part = self._open_parts.open(first, sizes, self.refuse, arrived)
        if self._refused_id == header.request_id:
            self._refused_id = 0
        return self._part

    def _wait_for_next(self, budget_s: float) -> None:
        """Refuses the open part if its next chunk stays away for its budget; a large part on a slow line may take longer."""
        if self._deadline is not None:
            self._deadline.cancel()
        if budget_s:
            late = ShardUnreachable(
                f"the part's next chunk did not come within its budget of {budget_s:g} s; send it again",
                metadata={"budget_s": str(budget_s)},
            )
            self._deadline = asyncio.get_running_loop().call_later(budget_s, self.refuse, late)

    def _replace(self, header: common_pb2.RequestHeader) -> None:
        """Refuses the open part, if there is one, because a request has come that its client sends after it."""
        self.refuse(
            ShardUnreachable(
                f"request {header.request_id} came before the part's last chunk; send the part again, from chunk 0 to its end"
            )
        )

    def forget(self, header: common_pb2.RequestHeader) -> None:
        """Notes that a chunk was refused: its part is dropped, and chunks that follow it are passed over."""
        if self._part is not None and self._part.head.header.request_id == header.request_id:
            self.drop()
        self._refused_id = header.request_id

    def refuse(self, error: ShardamError) -> None:
        """Refuses the open part, if there is one."""
        part = self._part
        if part is not None:
            self.forget(part.head.header)
            self._on_refused(part, error)

    def drop(self) -> None:
        """Gives the open part up, if there is one."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._part is not None:
            self._open_parts.close(self._part)
            self._part = None
