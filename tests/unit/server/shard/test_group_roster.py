"""Who may join a group, whose place a worker takes, and for whom a group waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_proto.errors import BadOption, GroupMismatch
from shardam_server.shard.groups.roster import Joined, JoinRequest, join, leave, stepped
from shardam_server.shard.groups.values import Contribution, Decision, End, Group, GroupTerms, Member

SYNC = GroupTerms("sync", 2)
BOUNDED = GroupTerms("bounded", 2, max_staleness=4)


def client(rank: int, restart_count: int = 0) -> bytes:
    return b"rank %d restart %d" % (rank, restart_count)


def request(rank: int, restart_count: int = 0, *, terms: GroupTerms = SYNC, group: str = "workers") -> JoinRequest:
    return JoinRequest(client(rank, restart_count), group, terms, rank, restart_count)


def joined(group: Group | None, *requests: JoinRequest, step: int = 1) -> Group:
    for one in requests:
        group = join(group, [], one, step, {}).group
    assert group is not None
    return group


def refused(
    group: Group | None,
    one: JoinRequest,
    match: str,
    *,
    others: Iterable[Group] = (),
    silences: Mapping[bytes, float] | None = None,
) -> str:
    """Returns how long the one in the way has been silent, as the error says."""
    with pytest.raises(GroupMismatch, match=match) as error:
        join(group, others, one, 1, silences or {})
    return error.value.metadata["silence_s"]


def counting(group: Group, step: int, *members: tuple[int, int], end: End = "applied") -> Group:
    """The group after a step of these ranks and restarts."""
    contributions = tuple(Contribution(rank, client(rank, restarts), 1, "empty") for rank, restarts in members)
    return stepped(group, Decision(group.name, step, contributions, end))


# -- joining


def test_members_stand_by_rank_and_each_join_is_a_version() -> None:
    group = joined(None, request(1, terms=GroupTerms("sync", 3)))
    assert (group.version, group.terms.world_size, group.missing_ranks()) == (1, 3, [0, 2])
    group = joined(group, request(0, terms=group.terms), step=7)
    assert [(one.rank, one.client_id, one.first_step) for one in group.members] == [(0, client(0), 7), (1, client(1), 1)]
    assert (group.version, group.missing_ranks()) == (2, [2])
    group = joined(group, request(2, terms=group.terms))
    assert (group.version, group.missing_ranks(), group.complete_restart_count) == (3, [], 0)


@pytest.mark.parametrize("rank", [-1, 2, 99])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    one = dataclasses.replace(request(0), rank=rank)
    with pytest.raises(BadOption, match=rf"rank must be 0 to world_size - 1 = 1, got {rank}"):
        join(None, [], one, 1, {})


def test_a_world_of_more_ranks_than_a_shard_keeps_clients_is_refused() -> None:
    huge = dataclasses.replace(SYNC, world_size=2**32 - 1)
    with pytest.raises(BadOption, match="world_size must be at most 65536, got 4294967295"):
        join(None, [], request(0, terms=huge), 1, {})


def test_a_group_without_a_name_is_refused() -> None:
    with pytest.raises(BadOption, match="needs a name"):
        join(None, [], request(0, group=""), 1, {})


def test_a_repeated_join_gets_the_same_answer() -> None:
    group = joined(None, request(0), request(1))
    again = join(group, [], request(1), 99, {})
    assert again.group is group
    assert again.superseded == ()


def test_a_member_that_asks_for_another_rank_or_other_terms_is_refused() -> None:
    group = joined(None, request(0))
    refused(group, dataclasses.replace(request(0), rank=1), "is in group 'workers' .* already, with another rank")
    refused(group, dataclasses.replace(request(0), terms=BOUNDED), "or other terms; connect again")


@pytest.mark.parametrize(
    "terms",
    [GroupTerms("sync", 3), GroupTerms("sync", 2, reduce="sum"), BOUNDED],
    ids=["world size", "reduce", "mode"],
)
def test_a_worker_that_asks_for_other_terms_is_refused_with_both(terms: GroupTerms) -> None:
    group = joined(None, request(0))
    silence_s = refused(
        group,
        request(1, terms=terms),
        r"trains in sync \(reduce=mean\) of 2 ranks, this worker asks for ",
        silences={client(0): 12.5},
    )
    assert silence_s == "12.500"


def test_a_staleness_that_differs_is_another_mode() -> None:
    group = joined(None, request(0, terms=BOUNDED))
    other = dataclasses.replace(BOUNDED, max_staleness=5)
    refused(group, request(1, terms=other), "trains in bounded:4 of 2 ranks, this worker asks for bounded:5 of 2 ranks")


# -- a rank that is taken


def test_a_second_worker_of_a_rank_is_refused_and_told_how_long_the_first_has_been_silent() -> None:
    group = joined(None, request(0), request(1))
    second = dataclasses.replace(request(1), client_id=b"second")
    silence_s = refused(
        group, second, rf"rank 1 .* is taken by client {client(1).hex()}", silences={client(0): 0.25, client(1): 20.0}
    )
    assert silence_s == "20.000"


def test_a_restarted_worker_takes_its_rank_over_and_an_older_one_never_does() -> None:
    group = joined(None, request(0), request(1))
    taken = join(group, [], request(1, 1), 5, {})
    assert taken.superseded == (client(1),)
    assert [one.client_id for one in taken.group.members] == [client(0), client(1, 1)]
    assert taken.group.member(client(1, 1)) == Member(1, client(1, 1), 1, 5)
    refused(taken.group, request(1), "rank 1 .* is taken")


def test_a_rank_whose_worker_left_is_free() -> None:
    group = leave(joined(None, request(0), request(1)), client(1))
    assert (group.version, [one.rank for one in group.members]) == (3, [0])
    again = join(group, [], dataclasses.replace(request(1), client_id=b"another"), 9, {})
    assert again.superseded == ()
    assert [one.client_id for one in again.group.members] == [client(0), b"another"]


def test_leaving_what_one_is_not_in_changes_nothing() -> None:
    group = joined(None, request(0))
    assert leave(group, b"stranger") is group


# -- other groups


def test_beside_a_sync_group_with_members_there_is_no_other() -> None:
    sync = joined(None, request(0))
    for terms in (SYNC, BOUNDED):
        one = request(1, terms=terms, group="others")
        assert refused(None, one, "'workers' .* has members", others=[sync], silences={client(0): 3.0}) == "3.000"
    assert join(None, [leave(sync, client(0))], request(1, group="others"), 1, {}).group.members


def test_bounded_groups_stand_beside_each_other_and_keep_a_sync_group_out() -> None:
    bounded = joined(None, request(0, terms=BOUNDED))
    other = request(1, terms=BOUNDED, group="others")
    assert join(None, [bounded], other, 1, {}).group.name == "others"
    refused(None, request(1, group="others"), "'workers' .* has members", others=[bounded])


def test_a_client_is_in_one_group() -> None:
    bounded = joined(None, request(0, terms=BOUNDED))
    refused(None, request(0, terms=BOUNDED, group="others"), "is in group 'workers' already", others=[bounded])


# -- restarts of the whole group


def test_a_restart_with_another_world_size_takes_the_place_of_all() -> None:
    terms = GroupTerms("sync", 3)
    group = joined(None, *(request(rank, terms=terms) for rank in range(3)))
    restarted = join(group, [], request(1, 1, terms=SYNC), 8, {})
    assert restarted.superseded == (client(0), client(1), client(2))
    assert (restarted.group.terms, restarted.group.version) == (SYNC, 4)
    assert restarted.group.missing_ranks() == [0]
    refused(restarted.group, request(0, 0, terms=terms), "asks for")  # a worker of the world before
    assert joined(restarted.group, request(0, 1, terms=SYNC)).missing_ranks() == []


def test_a_worker_that_is_newer_than_some_members_alone_does_not_change_the_terms() -> None:
    group = joined(None, request(0), request(1, 1))
    refused(group, request(1, 1, terms=GroupTerms("sync", 3)), "already, with another rank or other terms")
    refused(group, dataclasses.replace(request(0, 1), terms=GroupTerms("sync", 3)), "asks for")


def test_a_group_whose_members_have_all_left_starts_anew_with_any_terms() -> None:
    group = joined(None, request(0), request(1))
    for rank in range(2):
        group = leave(group, client(rank))
    started = joined(group, request(0, terms=BOUNDED))
    assert (started.terms, started.version, started.missing_ranks()) == (BOUNDED, 5, [1])


def test_a_group_that_starts_again_as_a_whole_waits_for_all_its_ranks() -> None:
    group = joined(None, request(0), request(1))
    group = joined(group, request(0, 1))
    assert group.missing_ranks() == []  # the old member of rank 1 is still expected to arrive
    group = leave(group, client(1))
    assert group.missing_ranks() == [1]
    assert joined(group, request(1, 1)).missing_ranks() == []


def test_an_old_member_that_had_arrived_does_not_make_a_restart_of_the_whole_group_a_single_one() -> None:
    group = joined(joined(None, request(0), request(1)), request(0, 1), step=5)
    group = counting(group, 5, (0, 1), (1, 0))  # rank 1 had arrived for step 5 and ended then
    assert leave(group, client(1)).missing_ranks() == [1]


def test_a_worker_that_was_restarted_on_its_own_waits_for_nobody_once_it_has_stepped_beside_the_others() -> None:
    group = joined(joined(None, request(0), request(1)), request(0, 1), step=5)
    for step in (5, 6):
        group = counting(group, step, (0, 1), (1, 0))
    assert group.complete_restart_count == 1
    assert leave(group, client(1)).missing_ranks() == []


def test_a_refused_step_makes_no_group_complete() -> None:
    group = joined(None, request(0))
    for step in range(1, 4):
        group = counting(group, step, (0, 0), end="refused")
    assert group.missing_ranks() == [1]


def test_a_rank_that_is_gone_from_a_complete_group_stops_nobody() -> None:
    for terms in (SYNC, BOUNDED):
        group = joined(None, request(0, terms=terms), request(1, terms=terms))
        assert leave(group, client(0)).missing_ranks() == []


def test_a_bounded_group_waits_only_until_it_has_been_complete_once() -> None:
    group = joined(None, request(0, terms=BOUNDED), request(1, terms=BOUNDED), request(0, 1, terms=BOUNDED))
    assert leave(group, client(1)).missing_ranks() == []


# -- any history


operations = st.lists(
    st.one_of(
        st.tuples(st.just("join"), st.integers(0, 2), st.integers(0, 3), st.integers(2, 3)),
        st.tuples(st.just("leave"), st.integers(0, 2), st.integers(0, 3), st.just(0)),
    ),
    max_size=20,
)


@given(operations)
def test_whatever_happens_ranks_and_clients_are_there_once_and_versions_grow(
    history: list[tuple[str, int, int, int]],
) -> None:
    group: Group | None = None
    for what, rank, restart_count, world_size in history:
        before = group
        if what == "leave":
            group = None if group is None else leave(group, client(rank, restart_count))
        else:
            try:
                answer: Joined = join(group, [], request(rank, restart_count, terms=GroupTerms("sync", world_size)), 1, {})
            except (GroupMismatch, BadOption):
                continue
            group = answer.group
            gone = {one.client_id for one in (before.members if before else ())} - {one.client_id for one in group.members}
            assert gone == set(answer.superseded)
            assert group.member(client(rank, restart_count)) is not None
        if group is None:
            continue
        ranks = [one.rank for one in group.members]
        assert ranks == sorted(set(ranks))
        assert all(one < group.terms.world_size for one in ranks)
        assert before is None or group is before or group.version == before.version + 1
        assert not (len(ranks) == group.terms.world_size and group.missing_ranks())
