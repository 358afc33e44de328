"""Snapshots against full copies: whatever changes come between two records of a copier, the rows of its cut come out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shardam_testing.full_device import FullDevice
from shardam_testing.snapshot_model import Interleaving

from shardam_server.shard import snapshots

PAGE_BYTES = 200
"""A few rows a page, so that changes come between pages of the smallest table."""

KINDS = Interleaving(FullDevice()).kinds

EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**32 - 1)), min_size=10, max_size=80)


@pytest.fixture(autouse=True, scope="module")
def small_pages() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "PAGE_BYTES", PAGE_BYTES)
        yield


@settings(max_examples=250)
@given(EVENTS)
def test_every_interleaving_of_copiers_and_changes_gives_the_rows_of_each_cut(events: list[tuple[str, int]]) -> None:
    world = Interleaving(FullDevice())
    for kind, seed in events:
        world.run(kind, seed)
    world.finish()


def test_long_histories_keep_rows_half_way_and_refuse_changes_and_give_the_rows_of_each_cut() -> None:
    num_kept = num_refused = 0
    for history in range(14):
        world, rng = Interleaving(FullDevice()), np.random.default_rng(history)
        for number in range(250):
            world.run(str(rng.choice(KINDS)), number)
        world.finish()
        num_kept += world.num_kept_half_way
        num_refused += world.num_refused
    assert num_kept > 80
    assert num_refused > 20
