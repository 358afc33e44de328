"""prefetch: which rows a forward takes of those pulled ahead, and what becomes of loops that end early or fail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import cast

import pytest
import torch
from shardam_testing.foreseen_rows import StandInCluster, stand_in
from shardam_testing.forking import in_child

import shardam
from shardam import Embedding, EmbeddingBag, EmbeddingCollection, SparseAdam
from shardam._foreseen import _ACTIVE
from shardam.cluster import Cluster
from shardam.errors import BadOption, WrongIdDtype

Batch = torch.Tensor


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> StandInCluster:
    return stand_in(monkeypatch)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> StandInCluster:
    return stand_in(monkeypatch, "sync")


def owned(cluster: Cluster, name: str = "items") -> Embedding:
    module = Embedding(None, 2, table=name, cluster=cluster)
    module.optimizer = SparseAdam([module])  # type: ignore[assignment]  # kept alive with its module
    return module


def ids(*row_ids: int) -> Batch:
    return torch.tensor(row_ids)


def firsts(output: torch.Tensor) -> list[float]:
    """Returns the first element of each row."""
    return cast("list[float]", output[..., 0].detach().reshape(-1).tolist())


def look_up_all(loader: Iterable[Batch], items: Embedding, seen: list[float]) -> None:
    """Notes what the rows of each batch are."""
    for batch in loader:
        seen += firsts(items(batch))


def itself(batch: Batch) -> Batch:
    return batch


# -- what a forward takes


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_come_in_order_with_rows_pulled_ahead_once(cluster: StandInCluster, depth: int) -> None:
    items = owned(cluster)
    batches = [ids(step, step + 1, step) for step in range(5)]
    seen = []
    for batch in shardam.prefetch(batches, {items: itself}, depth=depth):
        seen.append(batch)
        assert firsts(items(batch)) == batch.tolist()
    assert all(found is batch for found, batch in zip(seen, batches, strict=True))
    assert cluster.ahead == [[step, step + 1] for step in range(5)]
    assert cluster.pulled == []


def test_without_exact_a_forward_takes_rows_as_they_were_up_to_depth_steps_before(cluster: StandInCluster) -> None:
    items = owned(cluster)
    found = []
    for step, batch in enumerate(shardam.prefetch([ids(0)] * 6, {items: itself}, depth=2)):
        cluster.wait_for_pulls_ahead(min(6, step + 3))
        found += firsts(items(batch))
        cluster.clock += 1  # a step
    assert found == [0.0, 0.0, 0.0, 1.0, 2.0, 3.0]
    assert cluster.refreshed == []


def test_with_exact_a_forward_brings_them_up_to_date(cluster: StandInCluster) -> None:
    items = owned(cluster)
    found = []
    for batch in shardam.prefetch([ids(0, 5)] * 4, {items: itself}, exact=True):
        found.append(firsts(items(batch)))
        cluster.clock += 1
    assert found == [[step, step + 5.0] for step in range(4)]
    assert cluster.refreshed == [[0, 5]] * 4
    assert cluster.training == [True] * 4, "the forward waits at the group's gate, where there is one"


def test_in_a_group_a_prefetch_is_exact_and_only_the_forward_waits_for_the_step(group: StandInCluster) -> None:
    items = owned(group)
    for batch in shardam.prefetch([ids(0)] * 3, {items: itself}):
        assert firsts(items(batch)) == [group.clock]
        group.clock += 1
    assert len(group.refreshed) == 3
    assert group.training == [True] * 3


def test_a_batch_that_is_trained_on_again_and_again_sees_no_rows_older_than_depth_steps(cluster: StandInCluster) -> None:
    items = owned(cluster)
    found = []
    for batch in shardam.prefetch([ids(0)], {items: itself}, depth=2):
        cluster.wait_for_pulls_ahead(1)
        for _ in range(5):
            found += firsts(items(batch))
            cluster.clock += 1
            items._gradient.mark_pushed()  # as a step does
    assert found == [0.0, 0.0, 0.0, 3.0, 4.0]


def test_a_loop_that_was_left_and_is_still_alive_serves_no_later_training(cluster: StandInCluster) -> None:
    items = owned(cluster)
    left = iter(shardam.prefetch([ids(0), ids(0)], {items: itself}))
    next(left)
    cluster.wait_for_pulls_ahead(2)
    found = []
    for _ in range(4):
        found += firsts(items(ids(0)))
        cluster.clock += 1
        items._gradient.mark_pushed()
    assert found == [0.0, 0.0, 2.0, 3.0]
    assert next(left) is not None


def test_of_two_loops_the_one_that_went_on_last_serves_a_forward(cluster: StandInCluster) -> None:
    items = owned(cluster)
    for _ in shardam.prefetch([ids(1)], {items: itself}, exact=True):
        for inner in shardam.prefetch([ids(2, 3), ids(4)], {items: itself}, exact=True):
            assert firsts(items(inner)) == inner.tolist()
    assert cluster.pulled == []


@pytest.mark.parametrize("exact", [False, True])
def test_ids_that_were_not_foreseen_are_pulled_in_the_forward(cluster: StandInCluster, exact: bool) -> None:
    items, others = owned(cluster), owned(cluster, "others")
    collection = EmbeddingCollection({"items": items, "others": others})
    for batch in shardam.prefetch([ids(1, 2, 3)], {items: lambda batch: batch[:2]}, exact=exact):
        found = collection({"items": batch, "others": batch})
        assert firsts(cast(torch.Tensor, found["items"])) == firsts(cast(torch.Tensor, found["others"])) == [1, 2, 3]
    assert cluster.ahead == [[1, 2]]
    assert cluster.pulled == [[1, 2, 3, 3]], "one read: what others needs, and what items lacks"


@pytest.mark.parametrize("exact", [False, True])
def test_several_forwards_of_a_batch_share_its_rows_and_do_not_disturb_each_other(cluster: StandInCluster, exact: bool) -> None:
    items, twin = owned(cluster), Embedding(None, 2, table="items", cluster=cluster)
    for batch in shardam.prefetch([ids(1, 2)], {items: itself, twin: lambda batch: batch + 1}, exact=exact):
        first = items(ids(1, 2, 2, 3))  # as foreseen for both together
        kept = items._gradient._kept[0]()
        assert kept is not None
        cluster.clock = 10.0
        second, third = items(batch), twin(batch + 1)
        late = 10.0 if exact else 0.0
        assert firsts(first) == [1, 2, 2, 3]
        assert firsts(second) == [1 + late, 2 + late]
        assert firsts(third) == [2 + late, 3 + late]
        assert sorted(kept.rows[:, 0].tolist()) == [1, 2, 3], "what a graph keeps stays"
    assert cluster.ahead == [[1, 2, 3]]
    assert cluster.pulled == []


def test_a_batch_that_is_changed_after_it_was_foreseen_is_looked_up_as_it_is(cluster: StandInCluster) -> None:
    items = owned(cluster)
    for batch in shardam.prefetch([ids(1, 2), ids(3, 4)], {items: itself}):
        batch += 1
        assert firsts(items(batch)) == batch.tolist()


def test_an_evaluation_within_a_training_loop_reads_what_is_on_the_shards(cluster: StandInCluster) -> None:
    items = owned(cluster)
    for batch in shardam.prefetch([ids(1)], {items: itself}):
        cluster.wait_for_pulls_ahead(1)
        cluster.clock = 5.0
        with torch.no_grad():
            assert firsts(items(batch)) == [6.0]
        assert firsts(items(batch)) == [1.0]


@torch.no_grad()
def test_a_loop_under_no_grad_is_served_too_and_keeps_nothing(cluster: StandInCluster) -> None:
    items = Embedding(None, 2, table="items", cluster=cluster)  # which needs no optimizer
    for batch in shardam.prefetch([ids(1), ids(2)], {items: itself}):
        assert firsts(items(batch)) == batch.tolist()
    assert cluster.pulled == []
    assert items._gradient._kept == []


def test_rows_of_a_client_that_is_gone_are_not_taken(cluster: StandInCluster) -> None:
    items = owned(cluster)
    for batch in shardam.prefetch([ids(1)], {items: itself}):
        cluster.become_another_client()
        cluster.clock = 5.0
        assert firsts(items(batch)) == [6.0]


def test_two_clusters_are_pulled_from_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    first = stand_in(monkeypatch)
    second = StandInCluster()
    items, users = owned(first), owned(second, "users")
    for batch in shardam.prefetch([ids(1), ids(2)], {items: itself, users: lambda batch: batch + 10}):
        assert firsts(items(batch)) == batch.tolist()
        assert firsts(users(batch + 10)) == (batch + 10).tolist()
    assert first.pulled == []


def test_bags_and_collections_say_what_their_forwards_get(cluster: StandInCluster) -> None:
    bag = EmbeddingBag(None, 2, mode="sum", padding_idx=7, table="bags", cluster=cluster)
    items = Embedding(None, 2, table="items", cluster=cluster)
    collection = EmbeddingCollection({"items": items, "bags": bag})
    sparse = SparseAdam([collection])
    offsets = torch.tensor([0, 2])

    def features(batch: Batch) -> Mapping[str, shardam._features.Feature]:
        return {"items": batch, "bags": (batch, offsets)}

    for batch in shardam.prefetch([ids(1, 2, 3)], {collection: features}):
        found = collection(features(batch))
        assert firsts(cast(torch.Tensor, found["bags"])) == [3, 3]
    for batch in shardam.prefetch([ids(1, 2, 3)], {bag: lambda batch: (batch, offsets)}):
        assert firsts(bag(batch, offsets)) == [3, 3]
    for batch in shardam.prefetch([ids(1, 2, 3)], {bag: lambda batch: batch.reshape(1, 3)}):
        assert firsts(bag(batch.reshape(1, 3))) == [6]
    assert cluster.ahead == [[1, 1, 2, 2, 3, 3, 7], [1, 2, 3, 7], [1, 2, 3, 7]]
    assert cluster.pulled == []
    assert len(list(sparse.parameters())) == 2


# -- loops that end


def test_a_loop_that_is_left_lets_go_of_what_was_foreseen(cluster: StandInCluster) -> None:
    items = owned(cluster)
    for batch in shardam.prefetch([ids(1), ids(2)], {items: itself}):
        assert firsts(items(batch)) == [1.0]
        break
    assert not _ACTIVE.of(cluster)
    cluster.clock = 5.0
    assert firsts(items(ids(1))) == [6.0]


def test_a_loop_that_is_left_does_not_wait_for_a_shard(cluster: StandInCluster) -> None:
    items = owned(cluster)
    cluster.gate.clear()
    for _ in shardam.prefetch([ids(1), ids(2)], {items: itself}):
        break
    assert not _ACTIVE.of(cluster)
    cluster.gate.set()


def test_a_forward_of_another_thread_does_not_wait_for_a_loop_that_was_left(cluster: StandInCluster) -> None:
    items = owned(cluster)
    cluster.gate.clear()
    loop = iter(shardam.prefetch([ids(1), ids(2)], {items: itself}))
    assert [next(loop).tolist(), next(loop).tolist()] == [[1], [2]]
    (rows,) = _ACTIVE.of(cluster)  # which are behind those of the first batch
    del loop
    cluster.gate.set()
    assert rows.versions() is None


def test_a_forked_child_goes_on_with_its_copy_of_a_loop(cluster: StandInCluster) -> None:
    items = owned(cluster)
    loop = iter(shardam.prefetch([ids(step) for step in range(4)], {items: itself}))
    assert firsts(items(next(loop))) == [0.0]

    def go_on() -> list[list[float]]:
        cluster.become_another_client()
        return [firsts(items(batch)) for batch in loop]

    assert in_child(go_on) == [[1.0], [2.0], [3.0]]
    assert [firsts(items(batch)) for batch in loop] == [[1.0], [2.0], [3.0]]


def test_what_the_loader_raises_comes_after_the_batches_before(cluster: StandInCluster) -> None:
    items = owned(cluster)

    def loader() -> Iterator[Batch]:
        yield from (ids(1), ids(2))
        raise OSError("the disk is gone")

    seen: list[float] = []
    with pytest.raises(OSError, match="the disk is gone"):
        look_up_all(shardam.prefetch(loader(), {items: itself}, depth=5), items, seen)
    assert seen == [1.0, 2.0]
    assert not _ACTIVE.of(cluster)


def test_a_pull_ahead_that_fails_is_left_to_the_forward(cluster: StandInCluster) -> None:
    items = owned(cluster)
    cluster.fails_ahead = True
    for batch in shardam.prefetch([ids(1)], {items: itself}):
        assert firsts(items(batch)) == [1.0]
    assert cluster.pulled == [[1]]


def test_a_loader_is_iterated_as_often_as_it_can_be_and_has_its_length(cluster: StandInCluster) -> None:
    ahead = shardam.prefetch([ids(1), ids(2)], {owned(cluster): itself})
    assert len(ahead) == 2
    assert [len(list(ahead)), len(list(ahead))] == [2, 2]
    assert list(shardam.prefetch([], {owned(cluster): itself})) == []
    with pytest.raises(TypeError, match="has no len"):
        len(shardam.prefetch(iter([ids(1)]), {owned(cluster): itself}))


def test_no_more_than_depth_batches_are_taken_ahead(cluster: StandInCluster) -> None:
    taken = []

    def loader() -> Iterator[Batch]:
        for step in range(6):
            taken.append(step)
            yield ids(step)

    for step, _ in enumerate(shardam.prefetch(loader(), {owned(cluster): itself}, depth=2)):
        assert len(taken) <= step + 3


# -- bad input


@pytest.mark.parametrize("depth", [0, -1, True, 1.0, "1", None])
def test_a_depth_that_is_no_number_of_batches_is_refused(cluster: StandInCluster, depth: object) -> None:
    with pytest.raises(BadOption, match=r"depth is how many batches ahead, an integer of at least 1, got"):
        shardam.prefetch([], {owned(cluster): itself}, depth=depth)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loader", "lookups", "exact", "match"),
    [
        (3, None, False, "loader must be an iterable of batches, got int"),
        ([], {}, False, "at least one, got {}"),
        ([], [1], False, "lookups is a dict"),
        ([], {torch.nn.Embedding(3, 2): itself}, False, "got Embedding: function"),
        ([], {"items": itself}, False, "got str: function"),
        ([], None, 1, "exact must be True or False, got 1"),
    ],
)
def test_what_prefetch_cannot_use_is_refused(
    cluster: StandInCluster, loader: Iterable[Batch], lookups: object, exact: bool, match: str
) -> None:
    given = {owned(cluster): itself} if lookups is None else lookups
    with pytest.raises(BadOption, match=match):
        shardam.prefetch(loader, given, exact=exact)  # type: ignore[arg-type]
    with pytest.raises(BadOption, match="got Embedding: int"):
        shardam.prefetch([], {owned(cluster): 3})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids_of", "error", "match"),
    [
        (lambda batch: batch.float(), WrongIdDtype, "prefetch: row_ids must be integers"),
        (lambda batch: None, WrongIdDtype, "prefetch: "),
        (lambda batch: (batch, batch), WrongIdDtype, "prefetch: an Embedding is given ids"),
        (lambda batch: batch["ids"], IndexError, "too many indices"),
    ],
)
def test_malformed_foreseen_ids_are_refused_when_their_batch_is_due(
    cluster: StandInCluster, ids_of: Callable[[Batch], Batch], error: type[Exception], match: str
) -> None:
    items = owned(cluster)
    seen: list[float] = []

    def of(batch: Batch) -> Batch:
        return batch if batch[0] == 1 else ids_of(batch)

    with pytest.raises(error, match=match):
        look_up_all(shardam.prefetch([ids(1), ids(2)], {items: of}), items, seen)
    assert seen == [1.0]
