"""How pushes and pulls are split among shards."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shardam_testing.scripted_shards import INFO, scripted_session

import shardam._reads
from shardam._parts import TableStepGradient, push_change
from shardam._push_checks import merged_gradient
from shardam._reads import read_weights
from shardam._split import positions_by_shard
from shardam.errors import NonFiniteGradient
from shardam_kernels import native
from shardam_kernels.factors import AdamOptions
from shardam_proto.routing import RouteMap
from shardam_proto.v1 import common_pb2, embedding_pb2

INT64S = st.integers(-(2**63), 2**63 - 1)


@given(row_ids=st.lists(INT64S, max_size=50), num_shards=st.integers(1, 9))
def test_every_id_goes_to_its_owner_once_and_in_order(row_ids: list[int], num_shards: int) -> None:
    ids, route_map = np.array(row_ids, np.int64), RouteMap(1, num_shards)
    split = [np.arange(ids.size)[positions] for positions in positions_by_shard(route_map, ids)]
    assert len(split) == num_shards
    assert sorted(np.concatenate(split).tolist()) == list(range(ids.size))
    for shard, positions in enumerate(split):
        assert (np.diff(positions) > 0).all()
        assert (route_map.shards_of(ids[positions]) == shard).all()


def test_a_push_names_every_table_on_every_shard_and_each_set_of_options_once() -> None:
    fast, slow = AdamOptions(lr=0.1), AdamOptions(lr=0.01)
    ids, rows = np.arange(20, dtype=np.int64), np.arange(40, dtype=np.float32).reshape(20, 2)
    steps = [
        TableStepGradient("a", 1, ids, rows, fast),
        TableStepGradient("b", 2, ids[:0], rows[:0], slow),
        TableStepGradient("c", 3, ids, rows, fast),
        TableStepGradient("d", 4, ids, rows, fast, grad_scale=8.0),
    ]
    change = push_change(steps, RouteMap(1, 3))
    for part in change.parts:
        (message,) = part.messages(common_pb2.RequestHeader())
        sections = embedding_pb2.ExchangeRequest.FromString(message).push.sections
        assert [section.table_id for section in sections] == part.table_ids == [1, 2, 3, 4]
        assert [section.options_index for section in sections] == part.options_indexes == [0, 1, 0, 2]
        assert {section.dtype for section in sections} == {common_pb2.DTYPE_FLOAT32}
        assert [(options.lr, options.grad_scale) for options in part.options] == [(0.1, 1.0), (0.01, 1.0), (0.1, 8.0)]
        assert sections[1].num_rows == 0
        sizes = [section.num_rows for section in sections]
        assert part.row_ids.num_bytes == part.rows.num_bytes == 8 * sum(sizes)
        first = np.frombuffer(part.row_ids.read(0, 8 * sizes[0]), "<i8")
        gradients = np.frombuffer(part.rows.read(0, 8 * sizes[0]), "<f4").reshape(-1, 2)
        np.testing.assert_array_equal(gradients, rows[first])


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_push_whose_ids_lie_by_shard_holds_the_gradient_itself(num_shards: int) -> None:
    distinct, _, _ = native.distinct_ids(np.arange(50, dtype=np.int64), num_shards)
    gradients = np.ones((50, 2), np.float32)
    change = push_change([TableStepGradient("a", 1, distinct, gradients, AdamOptions())], RouteMap(1, num_shards))
    rows = [array for part in change.parts for array in part.rows.arrays]
    assert all(np.shares_memory(array, gradients) for array in rows)
    assert sum(array.nbytes for array in rows) == gradients.nbytes


def test_a_gradient_that_names_each_id_once_is_not_copied_and_one_that_does_not_is_summed() -> None:
    gradients = np.arange(6, dtype=np.float32).reshape(3, 2)
    once = merged_gradient(INFO, np.array([5, 3, 9]), gradients, AdamOptions(), 2.0)
    assert once.gradients is gradients
    twice = merged_gradient(INFO, np.array([5, 3, 5]), gradients, AdamOptions(), 2.0)
    assert (twice.row_ids.tolist(), twice.gradients.tolist()) == ([5, 3], [[4.0, 6.0], [2.0, 3.0]])


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**64, -(2.0**64)])
def test_a_gradient_that_shards_would_refuse_is_refused_whether_ids_are_named_once_or_not(value: float) -> None:
    gradients = np.array([[0.0, 1.0], [0.0, value]], np.float32)
    for row_ids in ([5, 3], [3, 3]):
        with pytest.raises(NonFiniteGradient, match=r"ids \[3\]"):
            merged_gradient(INFO, np.array(row_ids), gradients, AdamOptions(), 1.0)
    large = np.full((1, 2), 2.0**63, np.float32)  # accepted, but only once it was looked at closely
    assert merged_gradient(INFO, np.array([4]), large, AdamOptions(), 1.0).gradients.tolist() == large.tolist()
    with pytest.raises(NonFiniteGradient):
        merged_gradient(INFO, np.array([4]), large, AdamOptions(), 0.25)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_pull_beyond_one_message_is_split_and_put_together_in_order(num_shards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_session(num_shards) as (session, shards):
        monkeypatch.setattr(shardam._reads, "MAX_MESSAGE_BYTES", 1024)
        row_ids = np.random.default_rng(0).permutation(500).astype(np.int64)
        first, second = read_weights(session, [(INFO, row_ids), (INFO, row_ids[::-1].copy())])
        np.testing.assert_array_equal(first, np.repeat(row_ids, 2).reshape(-1, 2))
        np.testing.assert_array_equal(second, first[::-1])
        for shard in shards:
            assert len(shard.seen) > 1
            assert max(len(asked) for _, _, asked in shard.seen) * 8 <= 1024


@pytest.mark.case("C050")
def test_processes_with_other_hash_seeds_route_ids_alike() -> None:
    program = "import numpy as np; from shardam_proto.routing import RouteMap; " + (
        "print(RouteMap(1, 3).shards_of(np.array([-5, 2**63 - 1, 0, -(2**63)])).tolist())"
    )
    printed = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
        )
        printed.add(done.stdout)
    assert len(printed) == 1
    assert set(json.loads(printed.pop())) <= {0, 1, 2}


@pytest.mark.case("C045")
def test_a_pull_of_many_tables_is_one_message_per_shard() -> None:
    with scripted_session(2) as (session, shards):
        read_weights(session, [(INFO, np.arange(10, dtype=np.int64))] * 100)
        assert [len(shard.seen) for shard in shards] == [1, 1]
