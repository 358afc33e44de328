"""The messages of group steps, and of cuts, within a connection's bytes: which one ends where, of which step and rank.

gRPC sends each message as a byte, its length and its bytes in DATA frames of its call's HTTP/2 stream. Only what the proxy acts
on is told apart; anything else passes unseen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from shardam_proto.v1 import common_pb2, embedding_pb2, shard_pb2
from shardam_testing.faults.cut_messages import parsed, told_reply, told_request
from shardam_testing.faults.frames import PREFACE
from shardam_testing.faults.network_faults import Direction, MessageKind

_HEAD_BYTES = 9
_PREFIX_BYTES = 5
_DATA, _RST_STREAM = 0x0, 0x3


@dataclasses.dataclass(frozen=True)
class GroupMessage:
    """One message of a step, or of a cut.

    Attributes:
        kind: which.
        step: the step; of a cut: 0.
        rank: of the member that sent it or is answered; -1: it is between shards.
    """

    kind: MessageKind
    step: int
    rank: int


class MessageScanner:
    """Finds the whole messages of one direction of a connection, whatever pieces its bytes come in.

    Args:
        preface: bytes before the first frame.
    """

    def __init__(self, preface: int = 0) -> None:
        self._skip = preface
        self._head = bytearray()
        self._data_stream: int | None = None
        self._streams: dict[int, bytearray] = {}

    def feed(self, data: bytes) -> Iterator[tuple[int, int, bytes]]:
        """Yields the messages that end in these bytes: where (bytes of `data` before their end), stream and message."""
        start = 0
        while start < len(data):
            if self._skip:
                passed = min(self._skip, len(data) - start)
                piece = data[start : start + passed]
                self._skip -= passed
                start += passed
                if self._data_stream is not None:
                    for left, message in self._messages(self._data_stream, piece):
                        yield start - left, self._data_stream, message
                continue
            piece = data[start : start + _HEAD_BYTES - len(self._head)]
            self._head += piece
            start += len(piece)
            if len(self._head) == _HEAD_BYTES:
                self._begin_frame()

    def _begin_frame(self) -> None:
        self._skip = int.from_bytes(self._head[:3], "big")
        kind, stream = self._head[3], int.from_bytes(self._head[5:9], "big") & 0x7FFFFFFF
        self._data_stream = stream if kind == _DATA else None
        if kind == _RST_STREAM:
            self._streams.pop(stream, None)
        self._head.clear()

    def _messages(self, stream: int, piece: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields the messages that end in a piece of a stream, and how many bytes of the piece follow each."""
        buffer = self._streams.setdefault(stream, bytearray())
        buffer += piece
        while len(buffer) >= _PREFIX_BYTES:
            end = _PREFIX_BYTES + int.from_bytes(buffer[1:_PREFIX_BYTES], "big")
            if len(buffer) < end:
                return
            message = bytes(buffer[_PREFIX_BYTES:end])
            del buffer[:end]
            yield len(buffer), message
        if not buffer:
            del self._streams[stream]


class GroupTraffic:
    """Tells the messages of group steps and of cuts of one connection."""

    def __init__(self) -> None:
        self._scanners = {
            Direction.REQUESTS: MessageScanner(len(PREFACE)),
            Direction.REPLIES: MessageScanner(),
        }
        self._asked: dict[int, tuple[int, int]] = {}
        self._updates: dict[int, int] = {}

    def feed(self, direction: Direction, data: bytes) -> Iterator[tuple[int, GroupMessage]]:
        """Yields the messages that end in these bytes, and where."""
        tell = self._request if direction is Direction.REQUESTS else self._reply
        for end, stream, message in self._scanners[direction].feed(data):
            told = tell(stream, message)
            if told is not None:
                yield end, told

    def _request(self, stream: int, data: bytes) -> GroupMessage | None:
        update = parsed(shard_pb2.UpdateGroupRequest(), data)
        if update.header.protocol_version and update.group.name and update.decision.step:
            self._updates[stream] = update.decision.step
            return GroupMessage("update", update.decision.step, -1)
        exchange = parsed(embedding_pb2.ExchangeRequest(), data)
        match exchange.WhichOneof("request"):
            case "push" if exchange.push.contribution:
                return self._ask("part", exchange.push.header)
            case "arrive" if exchange.arrive.header.step:
                return self._ask("arrive", exchange.arrive.header)
        kind = told_request(data)
        return None if kind is None else GroupMessage(kind, 0, -1)

    def _ask(self, kind: MessageKind, header: common_pb2.RequestHeader) -> GroupMessage:
        self._asked[header.request_id] = header.step, header.rank
        return GroupMessage(kind, header.step, header.rank)

    def _reply(self, stream: int, data: bytes) -> GroupMessage | None:
        if stream in self._updates:
            return GroupMessage("updated", self._updates.pop(stream), -1)
        answer = parsed(embedding_pb2.ExchangeResponse(), data)
        if answer.request_id not in self._asked:
            kind = told_reply(data)
            return None if kind is None else GroupMessage(kind, 0, -1)
        step, rank = self._asked.pop(answer.request_id)
        if answer.push.staged:
            return GroupMessage("staged", step, rank)
        if answer.push.HasField("result") or answer.arrive.HasField("result"):
            return GroupMessage("result", step, rank)
        return None
