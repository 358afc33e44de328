"""Groups, decisions and results as messages: all of them come back, and what is none is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardam_proto.errors import BadOption
from shardam_proto.v1 import group_pb2
from shardam_server.shard.groups import messages
from shardam_server.shard.groups.values import Contribution, Decision, Group, GroupTerms, Member, Refusal, StepResult

counts = st.integers(0, 2**32 - 1)
steps = st.integers(0, 2**64 - 1)
ids = st.binary(max_size=16)
texts = st.text(max_size=12)
terms = st.one_of(
    st.builds(GroupTerms, st.just("sync"), st.integers(1, 2**32 - 1), st.just(0), st.sampled_from(["mean", "sum"])),
    st.builds(GroupTerms, st.just("bounded"), st.integers(1, 2**32 - 1), counts),
)
members = st.lists(st.builds(Member, counts, ids, counts, steps), max_size=3).map(tuple)
groups = st.builds(Group, texts, terms, steps, members, st.integers(-1, 2**63 - 1))
refusals = st.builds(Refusal, texts, texts, st.dictionaries(texts, texts, max_size=3))
kinds = st.sampled_from(["gradient", "empty", "abstain"])
ends = st.sampled_from(["applied", "abstained", "refused"])
contributions = st.lists(st.builds(Contribution, counts, ids, steps, kinds), max_size=3).map(tuple)
decisions = st.builds(Decision, texts, steps, contributions, ends, st.none() | refusals)
results = st.builds(StepResult, steps, ends, counts, st.dictionaries(steps, steps, max_size=3), st.none() | refusals)


@given(groups)
def test_a_group_comes_back(group: Group) -> None:
    stored = messages.encode_group(group).SerializeToString()
    assert messages.decode_group(group_pb2.Group.FromString(stored)) == group


@given(decisions)
def test_a_decision_comes_back(decision: Decision) -> None:
    stored = messages.encode_decision(decision).SerializeToString()
    assert messages.decode_decision(group_pb2.Decision.FromString(stored)) == decision


@given(results)
def test_a_result_comes_back(result: StepResult) -> None:
    message = messages.encode_result(result)
    assert message is not None
    assert messages.decode_result(group_pb2.StepResult.FromString(message.SerializeToString())) == result
    assert messages.encode_result(None) is None


SYNC, MEAN = group_pb2.GROUP_MODE_SYNC, group_pb2.REDUCE_MEAN


@pytest.mark.parametrize(
    ("message", "match"),
    [
        (group_pb2.GroupTerms(reduce=MEAN, world_size=1), "sync or bounded"),
        (group_pb2.GroupTerms(mode=SYNC, world_size=1), "mean or sum"),
        (group_pb2.GroupTerms(mode=SYNC, reduce=MEAN), "world_size must be at least 1, got 0"),
        (group_pb2.GroupTerms(mode=SYNC, reduce=MEAN, world_size=1, max_staleness=2), "max_staleness is of bounded groups"),
        (
            group_pb2.GroupTerms(mode=group_pb2.GROUP_MODE_BOUNDED, reduce=group_pb2.REDUCE_SUM, world_size=1),
            "reduce is of sync groups",
        ),
    ],
)
def test_terms_that_are_none_are_refused(message: group_pb2.GroupTerms, match: str) -> None:
    with pytest.raises(BadOption, match=match):
        messages.decode_terms(message)


def test_a_kind_or_an_end_of_another_version_is_refused() -> None:
    with pytest.raises(BadOption, match="gradient, empty or abstain; got 0"):
        messages.decode_kind(group_pb2.CONTRIBUTION_KIND_UNSPECIFIED)
    with pytest.raises(BadOption, match="applied, abstained from or refused; got 0"):
        messages.decode_result(group_pb2.StepResult(step=1))
