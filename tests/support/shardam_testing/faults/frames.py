"""HTTP/2 as far as a proxy needs it: where frames begin in each direction of a connection, and which of them are answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""What a client sends before its first frame (RFC 9113, 3.4)."""

_HEAD_BYTES = 9
_DATA, _HEADERS, _RST_STREAM = 0x0, 0x1, 0x3
_END_STREAM = 0x1


@dataclasses.dataclass(frozen=True)
class Frame:
    """The head of one frame."""

    kind: int
    flags: int
    stream: int
    num_bytes: int


class FrameScanner:
    """Finds the frames of one direction, whatever pieces its bytes come in.

    Args:
        preface: bytes before the first frame.
    """

    def __init__(self, preface: int = 0) -> None:
        self._skip = preface
        self._head = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames whose head ends in these bytes, the next ones of their direction."""
        start = 0
        while start < len(data):
            if self._skip:
                passed = min(self._skip, len(data) - start)
                self._skip -= passed
                start += passed
                continue
            piece = data[start : start + _HEAD_BYTES - len(self._head)]
            self._head += piece
            start += len(piece)
            if len(self._head) < _HEAD_BYTES:
                return
            num_bytes = int.from_bytes(self._head[:3], "big")
            stream = int.from_bytes(self._head[5:9], "big") & 0x7FFFFFFF
            yield Frame(self._head[3], self._head[4], stream, num_bytes)
            self._head.clear()
            self._skip = num_bytes


class AnswerCounter:
    """Counts the messages of replies of one connection.

    Attributes:
        seen: answers so far, of calls of any kind.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._requests = FrameScanner(len(PREFACE))
        self._replies = FrameScanner()
        self._open: set[int] = set()

    def pass_requests(self, data: bytes) -> None:
        """Notes which calls have an open request side."""
        for frame in self._requests.feed(data):
            ends = frame.kind == _RST_STREAM or (frame.kind in (_HEADERS, _DATA) and bool(frame.flags & _END_STREAM))
            if ends:
                self._open.discard(frame.stream)
            elif frame.kind == _HEADERS:
                self._open.add(frame.stream)

    def pass_replies(self, data: bytes) -> tuple[int, int]:
        """Returns how many answers begin in these bytes: of all calls, and of those whose request side is open."""
        answers = [frame.stream for frame in self._replies.feed(data) if frame.kind == _DATA and frame.num_bytes]
        self.seen += len(answers)
        return len(answers), sum(stream in self._open for stream in answers)
