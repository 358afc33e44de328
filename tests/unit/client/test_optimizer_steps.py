"""What an optimizer sends to a group: one push for each step, whatever the step has; and which pulls are for training."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import pytest
import torch
from torch import nn

import shardam
from shardam import Embedding, EmbeddingBag, EmbeddingCollection, SparseAdam, Table, TableInfo, TableSpec
from shardam._arrays import Float32s, Int64s
from shardam._parts import TableStepGradient
from shardam._pusher import Pusher
from shardam._session import Session
from shardam._session_options import SessionOptions
from shardam.cluster import Cluster
from shardam.errors import BadOption, MessageTooLarge, NonFiniteGradient, ShardUnreachable
from shardam_proto.routing import RouteMap

GROUP_MODES = ("sync", "bounded:1")
ONE = torch.tensor([1])


class QuietSession:
    """A client that nothing has ended."""

    ended = False
    route_map = RouteMap(1, 1)


class QuietPusher:
    """A queue that nothing ever fails in."""

    def raise_error(self) -> None: ...


class RecordingCluster(Cluster):
    """A member of a group without shards: notes what is pushed and pulled."""

    def __init__(self, mode: str) -> None:
        super().__init__(SessionOptions("redis://127.0.0.1:1/0", "recording", None, 1.0))
        self.session = QuietSession()
        self._client = cast(Session, self.session), cast(Pusher, QuietPusher())
        self._mode_text = mode
        self._tables: dict[str, TableInfo] = {}
        self.pushes: list[tuple[str, list[str]]] = []
        self.refuses: Exception | None = None
        self.num_waits = 0

    @property
    def mode(self) -> str:
        return self._mode_text

    def create_table(self, spec: TableSpec) -> Table:
        return Table(self, self._tables.setdefault(spec.name, TableInfo(spec, len(self._tables) + 1, 0)))

    def _queue_push(self, sections: Sequence[TableStepGradient], kind: str = "gradient") -> None:
        if self.refuses is not None:
            raise self.refuses
        self.pushes.append((kind, [section.table for section in sections]))

    def _synchronize(self) -> None:
        self.num_waits += 1


@pytest.fixture
def pulls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each pull was for training; all rows are zero."""
    seen: list[bool] = []

    def read(cluster: Cluster, wanted: Sequence[tuple[TableInfo, Int64s]], *, training: bool) -> list[Float32s]:
        seen.append(training)
        return [np.zeros((row_ids.size, info.spec.dim), np.float32) for info, row_ids in wanted]

    monkeypatch.setattr("shardam._lookup.read_own_weights", read)
    return seen


def make(cluster: Cluster, table: str = "items", **options: bool) -> Embedding:
    return Embedding(None, 2, table=table, cluster=cluster, **options)  # type: ignore[arg-type]  # trainable alone


# -- pushes


@pytest.mark.usefixtures("pulls")
@pytest.mark.parametrize("mode", GROUP_MODES)
def test_each_step_of_a_group_is_one_push(mode: str) -> None:
    cluster = RecordingCluster(mode)
    items, users = make(cluster), make(cluster, "users")
    sparse = SparseAdam([items, users])
    sparse.step()
    (items(ONE).sum() + users(ONE).sum()).backward()
    sparse.step()
    sparse.step()  # a gradient is pushed once
    sparse.zero_grad()
    for _ in range(3):  # accumulation
        users(ONE).sum().backward()
    sparse.step()
    assert cluster.pushes == [("empty", []), ("gradient", ["items", "users"]), ("empty", []), ("gradient", ["users"])]


@pytest.mark.usefixtures("pulls")
@pytest.mark.parametrize(("mode", "expected"), [("async", []), *((mode, [("abstain", [])]) for mode in GROUP_MODES)])
def test_a_scaler_that_found_an_inf_makes_a_group_member_abstain_and_the_gradient_is_used(
    mode: str, expected: list[object]
) -> None:
    cluster = RecordingCluster(mode)
    items = make(cluster)
    sparse = SparseAdam([items])
    scaler = shardam.GradScaler("cpu", init_scale=4.0)
    scaler.scale((items(ONE) * math.inf).sum()).backward()
    scaler.step(sparse)
    scaler.update()
    sparse.zero_grad()
    assert cluster.pushes == expected


@pytest.mark.usefixtures("pulls")
@pytest.mark.parametrize("mode", GROUP_MODES)
def test_a_dropped_gradient_is_said_to_the_group_once(mode: str) -> None:
    cluster = RecordingCluster(mode)
    items, users = make(cluster), make(cluster, "users")
    sparse = SparseAdam([items, users])
    sparse.zero_grad()
    (items(ONE).sum() + users(ONE).sum()).backward()
    sparse.zero_grad()
    sparse.zero_grad()
    assert cluster.pushes == [("abstain", [])]
    items(ONE).sum().backward()
    sparse.step()
    sparse.zero_grad()
    assert cluster.pushes == [("abstain", []), ("gradient", ["items"])]


@pytest.mark.usefixtures("pulls")
def test_without_a_group_a_dropped_gradient_and_an_empty_step_send_nothing() -> None:
    cluster = RecordingCluster("async")
    items = make(cluster)
    sparse = SparseAdam([items])
    items(ONE).sum().backward()
    sparse.zero_grad()
    sparse.step()
    assert cluster.pushes == []


@pytest.mark.usefixtures("pulls")
def test_what_a_worker_drops_after_its_end_is_said_to_nobody() -> None:
    cluster = RecordingCluster("sync")
    items = make(cluster)
    sparse = SparseAdam([items])
    items(ONE).sum().backward()
    cluster.session.ended = True
    sparse.zero_grad()
    assert items._gradient.to_push() is None
    assert cluster.pushes == []


@pytest.mark.usefixtures("pulls")
def test_a_gradient_whose_abstention_cannot_be_queued_is_kept() -> None:
    cluster = RecordingCluster("sync")
    items = make(cluster)
    sparse = SparseAdam([items])
    items(ONE).sum().backward()
    cluster.refuses = ShardUnreachable("an earlier push")
    with pytest.raises(ShardUnreachable, match="an earlier push"):
        sparse.zero_grad()
    cluster.refuses = None
    sparse.zero_grad()
    assert cluster.pushes == [("abstain", [])]


@pytest.mark.usefixtures("pulls")
def test_modules_on_several_clusters_give_each_group_its_one_push() -> None:
    first, second, alone = RecordingCluster("sync"), RecordingCluster("bounded:0"), RecordingCluster("async")
    sparse = SparseAdam([make(first), make(second), make(alone)])
    sparse.step()
    modules = [make(cluster) for cluster in (first, alone)]
    torch.stack([module(ONE).sum() for module in modules]).sum().backward()
    sparse.step()
    assert first.pushes == [("empty", []), ("gradient", ["items"])]
    assert second.pushes == [("empty", []), ("empty", [])]
    assert alone.pushes == [("gradient", ["items"])]
    modules[0](ONE).sum().backward()
    sparse.zero_grad()
    assert first.pushes[2:] == [("abstain", [])]
    assert second.pushes[2:] == []


@pytest.mark.usefixtures("pulls")
def test_what_one_cluster_took_is_not_pushed_again_when_the_next_one_fails() -> None:
    first, second = RecordingCluster("sync"), RecordingCluster("sync")
    modules = [make(first), make(second)]
    sparse = SparseAdam(modules)
    torch.stack([module(ONE).sum() for module in modules]).sum().backward()
    second.refuses = ShardUnreachable("an earlier push")
    with pytest.raises(ShardUnreachable):
        sparse.step()
    second.refuses = None
    sparse.step()
    assert first.pushes == [("gradient", ["items"]), ("empty", [])]
    assert second.pushes == [("gradient", ["items"])]


@pytest.mark.usefixtures("pulls")
@pytest.mark.parametrize(("mode", "kept"), [("async", True), *((mode, False) for mode in GROUP_MODES)])
def test_a_gradient_that_is_too_large_is_the_workers_contribution_in_a_group(mode: str, kept: bool) -> None:
    cluster = RecordingCluster(mode)
    items = make(cluster)
    sparse = SparseAdam([items])
    items(ONE).sum().backward()
    cluster.refuses = MessageTooLarge("this push")
    with pytest.raises(MessageTooLarge):
        sparse.step()
    cluster.refuses = None
    assert (items._gradient.to_push() is not None) == kept
    sparse.zero_grad()
    assert cluster.pushes == []


@pytest.mark.usefixtures("pulls")
def test_each_of_two_optimizers_on_one_cluster_takes_steps_of_its_own() -> None:
    cluster = RecordingCluster("sync")
    items, users = make(cluster), make(cluster, "users")
    optimizers = [SparseAdam([items]), SparseAdam([users])]
    items(ONE).sum().backward()
    for sparse in optimizers:
        sparse.step()
    assert cluster.pushes == [("gradient", ["items"]), ("empty", [])]


def clip_value(parameter: nn.Parameter) -> None:
    nn.utils.clip_grad_value_([parameter], 0.5)


def zero(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


@pytest.mark.usefixtures("pulls")
@pytest.mark.parametrize("write", [clip_value, zero])
@pytest.mark.parametrize("forgets", [True, False])
def test_a_gradient_that_is_written_to_after_its_step_is_complained_of_once(
    write: Callable[[nn.Parameter], None], forgets: bool
) -> None:
    cluster = RecordingCluster("async")
    items = make(cluster)
    sparse = SparseAdam([items])
    (proxy,) = sparse.parameters()
    items(ONE).sum().backward()
    write(proxy)  # before the step it is the program's
    sparse.step()
    write(proxy)
    if forgets:
        sparse.zero_grad()
    items(ONE).sum().backward()
    with pytest.raises(BadOption, match=r"table 'items': the gradient .* was written to after step\(\)"):
        sparse.step()
    sparse.step()
    assert cluster.pushes == [("gradient", ["items"])] * 2


@pytest.mark.usefixtures("pulls")
def test_a_gradient_may_be_read_after_its_step_replaced_and_once_it_is_applied_written_to() -> None:
    items = make(RecordingCluster("async"))
    sparse = SparseAdam([items])
    (proxy,) = sparse.parameters()
    for sync in (True, False):
        items(ONE).sum().backward()
        sparse.step(sync=sync)
        assert proxy.grad is not None
        assert float(proxy.grad.norm()) > 0
        if sync:
            zero(proxy)
        else:
            proxy.grad = torch.ones_like(proxy.grad).mul_(2.0)
    sparse.step()
    sparse.synchronize()


@pytest.mark.usefixtures("pulls")
def test_a_closure_and_a_schedule_leave_one_push_a_step() -> None:
    cluster = RecordingCluster("sync")
    items = make(cluster)
    sparse = SparseAdam([items], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(sparse, lambda step: 1.0 / (step + 1))

    def closure() -> float:
        sparse.zero_grad()
        loss = items(ONE).sum()
        loss.backward()
        return float(loss.detach())

    for _ in range(3):
        assert sparse.step(closure) == 0.0
        schedule.step()
    assert cluster.pushes == [("gradient", ["items"])] * 3


@pytest.mark.usefixtures("pulls")
def test_sync_true_waits_for_the_step_also_through_a_scaler_and_a_schedule() -> None:
    cluster = RecordingCluster("sync")
    items = make(cluster)
    sparse = SparseAdam([items])
    torch.optim.lr_scheduler.LambdaLR(sparse, lambda _: 1.0)
    scaler = shardam.GradScaler("cpu", init_scale=4.0)
    steps: list[Callable[[], object]] = [
        lambda: sparse.step(sync=True),
        lambda: sparse.step(lambda: 0.0, sync=True),
        lambda: scaler.step(sparse, sync=True),
    ]
    for number, step in enumerate(steps, 1):
        scaler.scale(items(ONE).sum()).backward()
        step()
        sparse.zero_grad()
        assert cluster.num_waits == number
    assert cluster.pushes == [("gradient", ["items"])] * 3


@pytest.mark.usefixtures("pulls")
def test_a_gradient_that_is_not_finite_goes_to_the_shards_in_sync_mode_and_is_refused_here_in_others() -> None:
    for mode in ("sync", "bounded:1", "async"):
        cluster = RecordingCluster(mode)
        items = make(cluster)
        sparse = SparseAdam([items])
        (items(ONE) * math.nan).sum().backward()
        if mode == "sync":
            sparse.step()
            assert cluster.pushes == [("gradient", ["items"])]
            continue
        with pytest.raises(NonFiniteGradient):
            sparse.step()
        sparse.zero_grad()
        assert cluster.pushes == ([] if mode == "async" else [("abstain", [])])


@pytest.mark.usefixtures("pulls")
def test_a_step_that_failed_under_a_scaler_leaves_no_scale_for_the_next_one() -> None:
    cluster = RecordingCluster("sync")
    items = make(cluster)
    sparse = SparseAdam([items])
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(items(ONE).sum()).backward()
    cluster.refuses = BadOption("an earlier push")
    with pytest.raises(BadOption):
        scaler.step(sparse)
    assert not hasattr(sparse, "grad_scale")
    assert not hasattr(sparse, "found_inf")


# -- pulls


def test_only_a_forward_that_records_a_gradient_pulls_for_training(pulls: list[bool]) -> None:
    cluster = RecordingCluster("sync")
    items, frozen = make(cluster), make(cluster, "frozen", trainable=False)
    bags = EmbeddingBag(None, 2, table="bags", cluster=cluster)
    collection = EmbeddingCollection({"items": items, "frozen": frozen})
    sparse = SparseAdam([items, bags])
    trained: list[Callable[[], object]] = [
        lambda: items(ONE),
        lambda: items.eval()(ONE),  # as in torch, eval() records gradients
        lambda: bags(ONE, ONE - 1),
        lambda: collection({"items": ONE, "frozen": ONE}),
    ]
    looked_at: list[Callable[[], object]] = [
        lambda: frozen(ONE),
        torch.no_grad()(lambda: items(ONE)),
        torch.no_grad()(lambda: bags(ONE, ONE - 1)),
        torch.no_grad()(lambda: collection({"items": ONE, "frozen": ONE})),
        torch.inference_mode()(lambda: items(ONE)),
        lambda: items.freeze()(ONE),
    ]
    for forward in (*trained, *looked_at):
        forward()
    assert pulls == [True] * len(trained) + [False] * len(looked_at)
    assert len(list(sparse.parameters())) == 2  # it lives as long as its modules are trained


def test_a_forward_inside_a_backward_pulls_nothing(pulls: list[bool]) -> None:
    from torch.utils.checkpoint import checkpoint

    items, head = make(RecordingCluster("sync")), nn.Linear(2, 1)
    sparse = SparseAdam([items])
    checkpoint(lambda ids: head(items(ids)).square(), ONE, use_reentrant=False).sum().backward()
    assert pulls == [True]
    sparse.zero_grad()
