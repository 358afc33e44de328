"""What a worker may say of its group, and what connect takes from torchrun's environment."""

from __future__ import annotations

import re

import numpy as np
import pytest

import shardam
from shardam._group import GroupOptions, GroupRequest, group_options
from shardam.errors import BadOption
from shardam_proto.v1 import group_pb2

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "TORCHELASTIC_RESTART_COUNT": "3"}


def test_async_is_no_group_also_under_torchrun() -> None:
    assert group_options(GroupRequest(), TORCHRUN) is None


def test_rank_world_size_and_restarts_come_from_torchrun() -> None:
    options = group_options(GroupRequest("sync"), TORCHRUN)
    assert options == GroupOptions("workers", None, rank=2, world_size=4, reduce="mean", restart_count=3)
    assert group_options(GroupRequest("bounded:0"), {"RANK": "0", "WORLD_SIZE": "1"}) == GroupOptions("workers", 0, 0, 1)


def test_arguments_come_before_the_environment() -> None:
    options = group_options(GroupRequest("sync", group="eu", rank=0, world_size=2, reduce="sum"), TORCHRUN)
    assert options == GroupOptions("eu", None, rank=0, world_size=2, reduce="sum", restart_count=3)


def test_terms_are_what_all_members_agree_on() -> None:
    sync = GroupOptions("workers", None, rank=1, world_size=2, reduce="sum")
    bounded = GroupOptions("workers", 7, rank=1, world_size=2)
    assert (sync.mode, bounded.mode) == ("sync", "bounded:7")
    assert sync.terms() == group_pb2.GroupTerms(mode=group_pb2.GROUP_MODE_SYNC, reduce=group_pb2.REDUCE_SUM, world_size=2)
    assert bounded.terms() == group_pb2.GroupTerms(
        mode=group_pb2.GROUP_MODE_BOUNDED, max_staleness=7, reduce=group_pb2.REDUCE_MEAN, world_size=2
    )


PLACE = {"rank": 0, "world_size": 2}


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        ({"mode": "sync"}, {}, "needs rank= and world_size=, or torchrun, which sets RANK and WORLD_SIZE; there is no world"),
        ({"mode": "bounded:1", "world_size": 2}, {}, "or torchrun, which sets RANK and WORLD_SIZE; there is no rank"),
        ({"mode": "sync"}, {"RANK": "x", "WORLD_SIZE": "2"}, "the environment's RANK must be an integer of at least 0, got"),
        (
            {"mode": "sync"},
            {"RANK": "0", "WORLD_SIZE": "-1"},
            "the environment's WORLD_SIZE must be an integer of at least 0, got",
        ),
        ({"mode": "sync", **PLACE}, {"TORCHELASTIC_RESTART_COUNT": ""}, "TORCHELASTIC_RESTART_COUNT must be an integer"),
        ({"mode": "sync", "rank": 2, "world_size": 2}, {}, "rank must be 0 to world_size - 1 = 1, got 2"),
        ({"mode": "sync", "rank": -1, "world_size": 2}, {}, "rank must be an integer of at least 0, got -1"),
        ({"mode": "sync", "rank": True, "world_size": 2}, {}, "rank must be an integer of at least 0, got True"),
        (
            {"mode": "sync", "rank": "0", "world_size": 2},
            {},
            "rank must be an integer of at least 0, got '0'; under torchrun leave it out, else pass int('0')",
        ),
        ({"mode": "sync", "rank": 0, "world_size": 0}, {}, "world_size must be at least 1, the number of workers, got 0"),
        ({"mode": "sync", "reduce": "max", **PLACE}, {}, "reduce must be 'mean' or 'sum', got 'max'"),
        ({"mode": "bounded:1", "reduce": "sum", **PLACE}, {}, "reduce='sum' is for mode='sync'"),
        ({"mode": "sync", "group": "a b", **PLACE}, {}, "group name"),
        ({"mode": "sync", "group": "", **PLACE}, {}, "group name"),
        ({"mode": "bounded", **PLACE}, {}, "mode must be 'async', 'sync' or 'bounded:N'"),
        ({"mode": "bounded:-1", **PLACE}, {}, "mode must be 'async', 'sync' or 'bounded:N'"),
        ({"mode": "bounded:1.5", **PLACE}, {}, "got 'bounded:1.5'"),
        ({"mode": "bounded:9999999999", **PLACE}, {}, "got 'bounded:9999999999'"),
        ({"mode": "Sync", **PLACE}, {}, "got 'Sync'"),
        ({"mode": None, **PLACE}, {}, "got None"),
        ({"rank": 0}, {}, "only a group of workers has rank, and mode='async' has no group; pass"),
        ({"group": "a", "world_size": 2, "reduce": "sum"}, {}, "only a group of workers has group, world_size, reduce, and"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_the_remedy_before_any_connection(
    arguments: dict[str, object], environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(url: str) -> None:
        raise AssertionError(f"connected to {url}")

    monkeypatch.setattr("shardam._discovery.connect_redis", refuse)
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BadOption, match=re.escape(said)):
        shardam.connect("redis://127.0.0.1:1/0", **arguments)  # type: ignore[arg-type]  # wrong on purpose


def test_a_rank_may_be_any_kind_of_integer() -> None:
    request = GroupRequest("sync", rank=np.int64(1), world_size=np.int32(2))  # type: ignore[arg-type]  # what users compute
    place = group_options(request, {})
    assert place is not None
    assert (type(place.rank), place.rank, type(place.world_size), place.world_size) == (int, 1, int, 2)
