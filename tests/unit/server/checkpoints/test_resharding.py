"""Home moves the state to other shards, or nothing has moved and no shard is held: scripted shards and a scripted Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path

import pytest

from shardam_proto.errors import (
    BadOption,
    CheckpointFailed,
    RedisUnreachable,
    ShardamError,
    ShardLost,
    ShardNotReady,
    ShardUnreachable,
    StaleState,
)
from shardam_proto.registry import ClusterEntry, ClusterView, Keys, Plan, ShardEntry
from shardam_proto.routing import RouteMap
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2, common_pb2, cut_pb2
from shardam_server.shard.checkpoints import resharding
from shardam_server.shard.checkpoints.catalogue import Catalogue
from shardam_server.shard.checkpoints.cutting import CutResult
from shardam_server.shard.checkpoints.jobs import ReportProgress
from shardam_server.shard.checkpoints.resharding import Resharding
from shardam_server.shard.identity import ShardIdentity
from shardam_server.shard.shared_entries import PlanAnswer, PlanEntry
from shardam_server.shard.tenure import Tenure

CLUSTER, MAP = ClusterEntry("c1", 2, 5), RouteMap(epoch=3, num_shards=2)


class Shards:
    """Both shards, home among them, the files that they write, and Redis; notes in order what each is asked.

    Attributes:
        log: what happened.
        cut_errors, renew_errors, decide_errors: raised by the next such calls, in order; None: none is.
        answer: what Redis answers.
        decided: the plan that Redis has.
        told: plans by shard.
    """

    def __init__(self, root: Path) -> None:
        self.identity = ShardIdentity(0, incarnation=100, timeline=2, cluster=CLUSTER, route_map=MAP)
        self.catalogue = Catalogue(root, "prod")
        self.entries = {index: ShardEntry(index, "a:1", "a:2", 100 + index, 7, "cpu", 1, ready=True) for index in range(2)}
        self.log: list[str] = []
        self.cut_errors: list[ShardamError] = []
        self.renew_errors: list[ShardamError | None] = []
        self.decide_errors: list[ShardamError] = []
        self.write_error: ShardamError | None = None
        self.written_gate = asyncio.Event()
        self.written_gate.set()
        self.answer = PlanAnswer.DONE
        self.allowed: dict[int, tuple[int, ...]] = {}
        self.decided: PlanEntry | None = None
        self.told: dict[int, Plan] = {}
        self.deaf: set[int] = set()
        self.tenure = Tenure(60.0)

    keys = Keys("prod")

    @property
    def shards(self) -> range:
        return range(2)

    # -- PeerCuts

    async def refresh(self) -> None:
        """Nothing moves here."""

    async def adopt_plan(self, index: int, request: cut_pb2.AdoptPlanRequest) -> cut_pb2.AdoptPlanResponse:
        self.log.append(f"tell {index}")
        if index in self.deaf:
            raise ShardUnreachable("gone")
        self.told[index] = Plan.from_json(request.plan)
        return cut_pb2.AdoptPlanResponse()

    # -- Cutting

    async def cut(self, folder: str, task_id: int, *, final: bool = False, without: Iterable[bytes] = ()) -> CutResult:
        assert final
        assert (self.catalogue.root / folder).is_dir()
        self.log.append("cut")
        if self.cut_errors:
            raise self.cut_errors.pop(0)
        table = common_pb2.TableInfo(spec=TableSpec("t", 2).to_proto(), table_id=9, table_step=4, num_rows=6)
        return CutResult(77, task_id, 1.0, (10, 11), (table,), {b"a" * 16: 3}, 100)

    async def renew(self, hold_id: int, hold_s: float) -> None:
        self.log.append(f"renew {hold_id} for {hold_s:g} s")
        error = self.renew_errors.pop(0) if self.renew_errors else None
        if error is not None:
            raise error

    async def give_up(self, hold_id: int, task_id: int) -> None:
        self.log.append(f"give up {hold_id}")

    # -- Creation

    async def written(self, report_progress: ReportProgress, cut: CutResult) -> list[checkpoint_pb2.CheckpointShard]:
        report_progress(50, 100, "writes files")
        await self.written_gate.wait()
        if self.write_error is not None:
            raise self.write_error
        return []

    def complete(self, name: str, cut: CutResult, shards: object, additions: object) -> Path:
        self.log.append("complete")
        return self.catalogue.resolve(name)

    # -- Redis

    def view(self) -> ClusterView:
        return ClusterView(CLUSTER, MAP, self.entries)

    def allow_move(self, hold_id: int, incarnations: Sequence[int]) -> None:
        self.log.append("allow")
        self.allowed[hold_id] = tuple(incarnations)

    def end_move(self, hold_id: int) -> Plan | None:
        self.log.append("end")
        del self.allowed[hold_id]
        return None if self.decided is None else self.decided.plan

    def decide_move(self, entry: PlanEntry, former: Plan | None, incarnation: int, hold_id: int, num_shards: int) -> PlanAnswer:
        self.log.append("decide")
        assert self.allowed == {hold_id: (100, 101)}
        assert (former, incarnation, num_shards) == (None, 100, 2)
        if self.decide_errors:
            raise self.decide_errors.pop(0)
        if self.answer is PlanAnswer.DONE:
            self.decided = entry
        return self.answer

    def resharding(self) -> Resharding:
        # Each part of this class stands for one of the parameters.
        return Resharding(self, self, self, self, self, self.catalogue)  # type: ignore[arg-type]

    async def move(self, num_shards: int) -> list[tuple[int, int, str]]:
        progress: list[tuple[int, int, str]] = []
        await self.resharding().run(num_shards, lambda *step: progress.append(step))
        return progress

    def left(self) -> list[str]:
        return list(self.catalogue.names())


def on_loop(root: Path, test: Callable[[Shards], Coroutine[None, None, None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(test(Shards(root)), 60)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resharding, "WRITE_HOLD_S", 0.06)
    monkeypatch.setattr(resharding, "DECIDE_AGAIN_S", 0.001)


def test_the_plan_is_decided_once_the_files_are_complete_and_home_is_told_last(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        progress = await shards.move(4)
        steps = [step for step in shards.log if step != "renew 77 for 0.06 s"]
        assert steps == ["cut", "complete", "allow", "renew 77 for 30 s", "decide", "tell 1", "tell 0"]
        assert shards.allowed == {77: (100, 101)}
        assert shards.decided is not None
        assert shards.decided.cluster == ClusterEntry("c1", 4, 5)
        assert [table.table_id for table in shards.decided.tables] == [9]
        plan = shards.told[0]
        assert shards.told == {0: plan, 1: plan}
        (name,) = shards.left()
        assert (plan.timeline, plan.epoch, plan.num_shards, plan.seed) == (2, 4, 4, 5)
        assert (plan.folder, plan.load, plan.keep, plan.created) == (f"prod/{name}", ("t",), (), ())
        assert plan.keep_clients
        assert not plan.weights_only
        assert not plan.read_only
        assert name.startswith("reshard-")
        assert [phase for _, _, phase in progress] == ["brings all shards to the same changes", "writes files", "decides"]

    on_loop(tmp_path, test)


@pytest.mark.parametrize(
    ("count", "problem"), [(0, "1 to 4096 shards, got 0"), (4097, "1 to 4096 shards, got 4097"), (2, "2 shards already")]
)
def test_a_number_that_cannot_be_or_is_there_already_is_refused(tmp_path: Path, count: int, problem: str) -> None:
    async def test(shards: Shards) -> None:
        with pytest.raises(BadOption, match=problem):
            await shards.move(count)
        assert (shards.log, shards.left()) == ([], [])

    on_loop(tmp_path, test)


def test_a_shard_that_is_absent_or_lost_is_named_before_anything_happens(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        entry = shards.entries.pop(1)
        with pytest.raises(ShardNotReady, match=r"shards \[1\] are not registered"):
            await shards.move(4)
        shards.entries[1] = ShardEntry(1, "a:1", "a:2", entry.incarnation, 0, "cpu", 1, ready=False, lost=True)
        with pytest.raises(ShardLost, match="shard 1 is LOST"):
            await shards.move(4)
        assert (shards.log, shards.left()) == ([], [])

    on_loop(tmp_path, test)


def test_a_cut_that_fails_is_tried_again_and_one_that_cannot_work_leaves_nothing(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        shards.cut_errors = [StaleState("the hold ran out", reason="HOLD_EXPIRED"), BadOption("no folder")]
        with pytest.raises(BadOption, match="no folder"):
            await shards.move(4)
        assert shards.log == ["cut", "cut"]  # a cut that fails leaves nothing held
        assert shards.left() == []

    on_loop(tmp_path, test)


def test_files_that_cannot_be_written_let_all_shards_go_on(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        shards.write_error = CheckpointFailed("shard 1 could not write its files: no space")
        with pytest.raises(CheckpointFailed, match="no space"):
            await shards.move(4)
        assert shards.log[-1] == "give up 77"
        assert "allow" not in shards.log
        assert shards.left() == []

    on_loop(tmp_path, test)


def test_a_shard_that_did_not_stay_held_while_files_were_written_ends_the_move(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        shards.written_gate.clear()
        shards.renew_errors = [None, ShardUnreachable("for a moment"), None, StaleState("has ended", reason="HOLD_EXPIRED")]
        with pytest.raises(CheckpointFailed, match="did not stay held while files were written: has ended"):
            await shards.move(4)
        assert shards.log[-1] == "give up 77"
        assert shards.left() == []
        await asyncio.sleep(0)  # the caller's task was not cancelled by what broke the wait off

    on_loop(tmp_path, test)


def test_a_last_renewal_that_fails_leaves_nothing_to_decide(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        original = shards.renew

        async def renew(hold_id: int, hold_s: float) -> None:
            await original(hold_id, hold_s)
            if hold_s == resharding.DECIDE_HOLD_S:
                raise StaleState("has ended", reason="HOLD_EXPIRED")

        shards.renew = renew  # type: ignore[method-assign]
        with pytest.raises(StaleState):
            await shards.move(4)
        assert "decide" not in shards.log
        assert shards.log[-1] == "give up 77"
        assert shards.left() == []

    on_loop(tmp_path, test)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [(PlanAnswer.NOT_ALLOWED, "a shard went on, or was started anew"), (PlanAnswer.OTHER_PLAN, "other plan")],
)
def test_what_redis_refuses_has_not_moved_and_will_not(tmp_path: Path, answer: PlanAnswer, problem: str) -> None:
    async def test(shards: Shards) -> None:
        shards.answer = answer
        with pytest.raises(ShardamError, match=problem):
            await shards.move(4)
        assert shards.log[-3:] == ["decide", "end", "give up 77"]
        assert shards.told == {}
        assert shards.left() == []

    on_loop(tmp_path, test)


def test_a_refusal_after_a_question_whose_answer_was_lost_does_not_undo_what_was_decided(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        original = shards.decide_move

        def decide_and_lose_the_answer(*args: object, **kwargs: object) -> PlanAnswer:
            shards.decide_move = original  # type: ignore[method-assign]
            original(*args, **kwargs)  # type: ignore[arg-type]
            shards.answer = PlanAnswer.NAME_NOT_HELD
            raise RedisUnreachable("away")

        shards.decide_move = decide_and_lose_the_answer  # type: ignore[method-assign]
        await shards.move(4)
        assert shards.log[-4:] == ["decide", "end", "tell 1", "tell 0"]
        assert sorted(shards.told) == [0, 1]

    on_loop(tmp_path, test)


def test_a_decision_whose_answer_was_lost_is_asked_for_until_it_is_known_while_all_shards_stay_held(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        shards.decide_errors = [RedisUnreachable("away"), RedisUnreachable("away")]
        await shards.move(4)
        asked = [step for step in shards.log if step == "decide" or step.endswith("for 30 s")]
        assert asked == ["renew 77 for 30 s", *["decide", "renew 77 for 30 s"] * 2, "decide"]
        assert sorted(shards.told) == [0, 1]

    on_loop(tmp_path, test)


def test_a_home_that_ends_before_the_decision_is_known_releases_nobody(tmp_path: Path) -> None:
    """Each shard asks Redis when its hold runs out: the state may have moved."""

    async def test(shards: Shards) -> None:
        shards.decide_errors = [RedisUnreachable("away") for _ in range(10_000)]
        moving = asyncio.create_task(shards.move(4))
        while shards.log.count("decide") < 2:
            await asyncio.sleep(0.001)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert not any(step.startswith("give up") for step in shards.log)
        assert len(shards.left()) == 1

    on_loop(tmp_path, test)


def test_a_home_that_ends_while_files_are_written_lets_all_go_on(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        shards.written_gate.clear()
        moving = asyncio.create_task(shards.move(4))
        while not any(step.startswith("renew") for step in shards.log):
            await asyncio.sleep(0.001)
        moving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await moving
        assert shards.log[-1] == "give up 77"
        assert shards.left() == []

    on_loop(tmp_path, test)


def test_a_shard_that_does_not_hear_of_the_plan_does_not_keep_home_from_ending(tmp_path: Path) -> None:
    async def test(shards: Shards) -> None:
        shards.deaf = {1}
        await shards.move(1)
        assert shards.log[-2:] == ["tell 1", "tell 0"]

    on_loop(tmp_path, test)
