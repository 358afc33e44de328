"""When a shard that starts is LOST, and what it remembers for a Redis that forgets."""

from __future__ import annotations

import pytest

from shardam_server.shard.known_lineages import HighMark, KnownLineages, is_lost


@pytest.mark.parametrize(
    ("own", "known", "formed", "lost"),
    [
        (None, None, False, False),  # the first start
        (None, None, True, True),  # Redis was emptied; the map is back, brought by a shard with a folder
        (None, 7, False, True),
        (None, 7, True, True),
        (7, None, False, False),
        (7, None, True, False),
        (7, 7, True, False),
        (7, 8, True, True),  # it was told to forget this state while it was away
    ],
)
def test_a_shard_is_lost_if_it_lacks_the_state_that_the_cluster_knows(
    own: int | None, known: int | None, formed: bool, lost: bool
) -> None:
    assert is_lost(own, known, cluster_formed=formed) is lost


def test_what_redis_has_lost_is_known_and_what_it_has_is_left_alone() -> None:
    seen = KnownLineages(1)
    seen.note({0: 10, 1: 11, 2: 12}, {0: HighMark(10, 5), 1: HighMark(11, 6)})
    seen.note({2: 22}, {0: HighMark(10, 7), 2: HighMark(22, 8)})
    assert seen.missing_from({}, without_own=True) == {0: 10, 2: 22}
    assert seen.missing_from({}, without_own=False) == {0: 10, 1: 11, 2: 22}
    assert seen.missing_from({0: 99}, without_own=True) == {2: 22}
    assert seen.marks_missing_from({2: HighMark(22, 1)}) == {0: HighMark(10, 7)}


def test_a_state_below_the_mark_of_its_own_lineage_lacks_something() -> None:
    mark = HighMark.from_text("9223372036854775807:12")
    assert HighMark.from_text(mark.to_text()) == mark
    assert mark.is_above(2**63 - 1, 11)
    assert not mark.is_above(2**63 - 1, 12)
    assert not mark.is_above(5, 11)
    with pytest.raises(ValueError, match="invalid literal"):
        HighMark.from_text("5:x")
