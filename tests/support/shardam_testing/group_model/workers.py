"""A worker as shards see it: one number in flight, sent again until it is answered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal

from shardam_server.shard.groups.roster import JoinRequest
from shardam_server.shard.groups.values import GroupTerms, Refusal, StepResult
from shardam_testing.group_model.contents import NUM_SHARDS, Content
from shardam_testing.group_model.messages import (
    Arrive,
    ArriveAnswer,
    Close,
    Closed,
    Gone,
    Join,
    Joined,
    Leave,
    Left,
    Open,
    Opened,
    Part,
    PartAnswer,
)
from shardam_testing.group_model.oracle import GROUP, Oracle

Phase = Literal["opening", "joining", "idle", "stepping", "leaving", "left", "gone"]
"""gone: dropped, and connects again."""

NO_END = 2**62
"""A step that no run reaches."""


class ModelWorker:
    """One client of one rank.

    Args:
        rank: its rank.
        client_id: its client.
        restart_count: how often its launcher has restarted it.
        terms: what it asks for.
        make_content: makes what it contributes to a step.
        oracle: keeps what it contributes, and checks what it is told.

    Attributes:
        last_step: it begins no step after this one.
        wants_to_leave: it leaves when its step has ended.
        step: its step, present or next.
        number: its last number.
    """

    def __init__(
        self,
        rank: int,
        client_id: bytes,
        restart_count: int,
        terms: GroupTerms,
        make_content: Callable[[int, int], Content],
        oracle: Oracle,
    ) -> None:
        self.rank = rank
        self.client_id = client_id
        self.restart_count = restart_count
        self.terms = terms
        self.phase: Phase = "opening"
        self.last_step = NO_END
        self.wants_to_leave = False
        self.step = 0
        self.number = 0
        self._make_content = make_content
        self._oracle = oracle
        self._opened: set[int] = set()
        self._answers: dict[int, PartAnswer] = {}
        self._closed: set[int] = set()
        self._result: StepResult | None = None

    @property
    def content(self) -> Content:
        return self._oracle.contents[self.client_id, self.number]

    def speak(self) -> Iterator[tuple[int, object]]:
        """Yields what it sends now, again or for the first time: shard and message."""
        if self.phase == "idle":
            self._go_on()
        match self.phase:
            case "opening":
                yield from ((shard, Open(self.client_id)) for shard in range(NUM_SHARDS) if shard not in self._opened)
            case "joining":
                yield 0, Join(JoinRequest(self.client_id, GROUP, self.terms, self.rank, self.restart_count))
            case "stepping":
                yield from self._tell_step()
            case "leaving":
                yield 0, Leave(self.client_id)

    def _go_on(self) -> None:
        if self.wants_to_leave:
            self.phase = "leaving"
        elif self.step <= self.last_step:
            self.number += 1
            self._oracle.contents[self.client_id, self.number] = self._make_content(self.rank, self.step)
            self._answers, self._closed, self._result = {}, set(), None
            self.phase = "stepping"

    def _tell_step(self) -> Iterator[tuple[int, object]]:
        for shard in range(NUM_SHARDS):
            if shard not in self._answers:
                yield shard, Part(self.client_id, self.number)
            elif not self._is_over(shard):
                yield shard, Close(self.client_id, self.number, self.step)
        if self._result is None and len(self._answers) == NUM_SHARDS:
            yield 0, Arrive(self.client_id, self.number, self.step, self._peaks(), self._refusal())

    def _is_over(self, shard: int) -> bool:
        """Whether the number is closed on a shard, or will be by the decision; that closes no refused number of a late one."""
        if shard not in self._answers:
            return False
        late = self._result is not None and not self._result.num_contributions
        return self._answers[shard].refusal is None or not late or shard in self._closed

    def _peaks(self) -> dict[int, float]:
        peaks: dict[int, float] = {}
        for answer in self._answers.values():
            for table_id, peak in answer.peaks.items():
                peaks[table_id] = max(peaks.get(table_id, 0.0), peak)
        return peaks

    def _refusal(self) -> Refusal | None:
        refusals = [self._answers[shard].refusal for shard in sorted(self._answers)]
        return next((refusal for refusal in refusals if refusal is not None), None)

    def receive(self, body: object) -> None:
        """Handles an answer."""
        self._ways[type(body)](self, body)

    def _on_opened(self, body: Opened) -> None:
        self._opened.add(body.shard)
        if self.phase == "opening" and len(self._opened) == NUM_SHARDS:
            self.phase = "joining"

    def _on_joined(self, body: Joined) -> None:
        if self.phase == "joining":
            self.step, self.phase = body.first_step, "idle"

    def _on_part(self, body: PartAnswer) -> None:
        if body.result is not None:
            self._oracle.check_told(self.client_id, body.number, body.result)
        if body.number == self.number and self.phase == "stepping":
            self._answers.setdefault(body.shard, body)
            self._take(body.result)

    def _on_closed(self, body: Closed) -> None:
        if body.number == self.number and self.phase == "stepping":
            self._closed.add(body.shard)
            self._take(None)

    def _on_arrive(self, body: ArriveAnswer) -> None:
        self._oracle.check_told(self.client_id, body.number, body.result)
        if body.number == self.number and self.phase == "stepping":
            self._take(body.result)

    def _take(self, result: StepResult | None) -> None:
        """Notes how the step ended, if it has; goes on once nothing more is to be told to any shard."""
        self._result = self._result or result
        if self._result is not None and all(self._is_over(shard) for shard in range(NUM_SHARDS)):
            assert self._result.step == self.step
            self.phase = "idle"
            self.step += 1

    def _on_gone(self, body: Gone) -> None:
        assert self.client_id in self._oracle.let_go, "a worker is told that it is no member, and home has not let it go"
        if self.phase in ("leaving", "left"):
            self.phase = "left"
        else:
            self.phase = "gone"

    def _on_left(self, body: Left) -> None:
        self.phase = "left" if self.phase in ("leaving", "left") else "gone"

    _ways: ClassVar[Mapping[type, Callable[..., None]]] = {
        Opened: _on_opened,
        Joined: _on_joined,
        PartAnswer: _on_part,
        Closed: _on_closed,
        ArriveAnswer: _on_arrive,
        Gone: _on_gone,
        Left: _on_left,
    }
