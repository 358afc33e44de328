"""Home and the other ranks of a group, by script, for tests of a member's side of steps (PROTOCOL.md, section 5)."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import TYPE_CHECKING

from shardam_proto.errors import SequenceError, ShardamError, ShardNotReady, ShardUnreachable, StaleState
from shardam_proto.v1 import common_pb2, embedding_pb2, group_pb2

if TYPE_CHECKING:
    from shardam_testing.scripted_shards import ScriptedShard
    from shardam_testing.scripted_streams import Fault

NUM_RANKS = 3
"""Contributions that a decision counts, this client's among them."""

PARK_S = 0.02
"""How long an Arrive waits for a step that is held; a stream's messages are taken one after the other, so it cannot be long."""

_ENDINGS = {
    group_pb2.CONTRIBUTION_KIND_GRADIENT: "gradient",
    group_pb2.CONTRIBUTION_KIND_EMPTY: "empty",
    group_pb2.CONTRIBUTION_KIND_ABSTAIN: "abstain",
}


@dataclasses.dataclass(frozen=True)
class StagedPart:
    """A part that waits for its step's decision."""

    number: int
    step: int
    kind: str
    tables: list[int]
    content: bytes


class ScriptedGroup:
    """What the shards of a test share.

    Args:
        shards: the shards, home first.

    Attributes:
        first_step: where the client joins.
        join_faults: errors of the next joins.
        joins: all joins that came.
        held: True: another rank has not arrived, no step is decided.
        refusals: why the next steps are refused, whatever has arrived.
        results: how steps have ended.
        arrivals: all Arrives that came.
        peak_of: the peak that each shard answers.
        told: shard index -> the step of the last decision that has reached it; other shards have all of them.
        parked: pulls that waited for a step and were refused at the end of their budget, by shard index.
    """

    def __init__(self, shards: list[ScriptedShard]) -> None:
        self.first_step = 1
        self.join_faults: collections.deque[ShardamError] = collections.deque()
        self.joins: list[embedding_pb2.JoinGroupRequest] = []
        self.held = False
        self.refusals: collections.deque[ShardamError] = collections.deque()
        self.results: dict[int, group_pb2.StepResult] = {}
        self.arrivals: list[embedding_pb2.ArriveRequest] = []
        self.peak_of: dict[int, float] = {}
        self.told: dict[int, int] = {}
        self.parked: collections.Counter[int] = collections.Counter()
        self._shards = shards
        self._numbers: dict[int, int] = {}
        self._changed = threading.Condition(threading.RLock())

    # -- the test's side

    def hold(self) -> None:
        """Has every step wait for another rank."""
        self.held = True

    def release(self) -> None:
        """Has the other rank arrive."""
        with self._changed:
            self.held = False
            self._changed.notify_all()

    def tell(self, index: int) -> None:
        """Has the decisions reach a shard that has not been told of them."""
        with self._changed:
            del self.told[index]
            self._changed.notify_all()

    def decide_without(self, step: int) -> None:
        """Ends a step for the other ranks; this client's contribution is too late, where it has come and where it comes."""
        with self._changed:
            self.results[step] = late_result(step)
            for shard in self._shards:
                with shard.lock:
                    if shard.staged is not None:
                        self._close(shard, shard.staged, "late")

    def moved_to(self, shards: list[ScriptedShard]) -> ScriptedGroup:
        """Returns what the group is on other shards: as far as it was decided."""
        group = ScriptedGroup(shards)
        group.first_step, group.held, group.peak_of = self.first_step, self.held, self.peak_of
        group.results, group.refusals = dict(self.results), self.refusals
        return group

    # -- the shards' side

    def join(self, shard: ScriptedShard, request: embedding_pb2.JoinGroupRequest) -> embedding_pb2.JoinGroupResponse:
        self.joins.append(request)
        if shard.index:
            raise AssertionError("only home is asked to join")
        if request.header.incarnation != shard.incarnation:
            raise StaleState("another life", reason="NEW_INCARNATION")
        if self.join_faults:
            raise self.join_faults.popleft()
        return embedding_pb2.JoinGroupResponse(header=shard.header(), first_step=self.first_step)

    def stage(self, shard: ScriptedShard, request: embedding_pb2.PushRequest, answer: embedding_pb2.PushResponse) -> Fault:
        """Takes a part, and returns what is to become of its answer."""
        fault = shard.enter("part", request.header, request.row_ids)
        number, step = request.header.number, request.header.step
        tables = [section.table_id for section in request.sections]
        content = repr((tables, request.contribution, request.row_ids, request.rows)).encode()
        part = StagedPart(number, step, _ENDINGS[request.contribution], tables, content)
        with self._changed, shard.lock:
            if number <= shard.last:
                if number > shard.seeded_last:
                    _require_same(shard.outcomes[number], content, number)
                answer.repeated_number = True
                answer.result.CopyFrom(self.results[step])
            elif number > shard.last + 1:
                raise StaleState(f"{number} after {shard.last}", reason="SEQUENCE_GAP", metadata={"last": str(shard.last)})
            elif step in self.results:
                self._close(shard, part, "late")
                answer.result.CopyFrom(self.results[step])
            elif step - 1 not in self.results and step != self.first_step:
                raise ShardNotReady(f"step {step} comes after another one")
            else:
                if shard.staged is not None:
                    _require_same(shard.staged.content, content, number)
                    answer.repeated_number = True
                shard.staged = part
                answer.staged = True
                for table_id in tables:
                    answer.peaks.add(table_id=table_id, peak=self.peak_of.get(shard.index, 1.0))
        answer.header.CopyFrom(shard.header())
        return fault

    def arrive(self, shard: ScriptedShard, request: embedding_pb2.ArriveRequest, answer: embedding_pb2.ArriveResponse) -> Fault:
        """Notes that the client has arrived, and returns what is to become of the answer."""
        fault = shard.enter("arrive", request.header, b"")
        if shard.index:
            raise AssertionError("only home is told of arrivals")
        step = request.header.step
        with self._changed:
            self.arrivals.append(request)
            self._changed.wait_for(lambda: not self.held or step in self.results, PARK_S)
            if step not in self.results and not self.held:
                self._decide(request)
            if step in self.results:
                answer.result.CopyFrom(self.results[step])
        answer.header.CopyFrom(shard.header())
        return fault

    def await_step(self, shard: ScriptedShard, header: common_pb2.RequestHeader) -> None:
        """Has a read wait until the step before its own has reached the shard."""

        def is_due() -> bool:
            return header.step - 1 <= self.told.get(shard.index, header.step)

        with self._changed:
            if not self._changed.wait_for(is_due, PARK_S):
                self.parked[shard.index] += 1
                raise ShardUnreachable("the pull waited for its budget", metadata={"budget_s": str(header.budget_s)})

    def _decide(self, request: embedding_pb2.ArriveRequest) -> None:
        step, number = request.header.step, request.header.number
        result = group_pb2.StepResult(step=step, end=group_pb2.STEP_END_APPLIED, num_contributions=NUM_RANKS)
        refusal = self.refusals.popleft() if self.refusals else None
        if request.HasField("refusal"):
            result.refusal.CopyFrom(request.refusal)
        elif refusal is not None:
            result.refusal.CopyFrom(refusal_message(refusal))
        staged = [shard.staged for shard in self._shards if shard.staged is not None]
        if result.HasField("refusal"):
            result.end = group_pb2.STEP_END_REFUSED
        elif len(staged) < len(self._shards):
            raise AssertionError(f"arrived at step {step} before every shard had the part")
        else:
            for table_id in staged[0].tables:
                result.steps.append(common_pb2.TableStep(table_id=table_id, table_step=step))
        self.results[step] = result
        for shard in self._shards:
            with shard.lock:
                part = shard.staged or StagedPart(number, step, "gradient", [], b"decided")
                self._close(shard, part, "refused" if result.HasField("refusal") else part.kind)

    def _close(self, shard: ScriptedShard, part: StagedPart, how: str) -> None:
        shard.staged, shard.last = None, part.number
        shard.outcomes[part.number] = part.content
        shard.closed.append((part.number, how, part.tables))


def late_result(step: int) -> group_pb2.StepResult:
    """Returns how a step ended for a member whose contribution came too late."""
    refusal = group_pb2.StepRefusal(reason="STEP_TIMEOUT", message=f"step {step} was decided without this rank")
    return group_pb2.StepResult(step=step, end=group_pb2.STEP_END_REFUSED, num_contributions=0, refusal=refusal)


def refusal_message(error: ShardamError) -> group_pb2.StepRefusal:
    """Returns an error as it travels in a decision."""
    return group_pb2.StepRefusal(reason=error.reason, message=error.message, metadata=error.metadata)


def _require_same(former: bytes, content: bytes, number: int) -> None:
    if former != content:
        raise SequenceError(f"{number} had another content", reason="SEQUENCE_REUSED")
