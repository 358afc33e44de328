"""What must hold of a group once its faults are over: one sequence of decisions on all shards, and the bits that follow.

Beside what holds of any cluster (verification.py): no half step, none twice, none lost that was acknowledged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from shardam_testing.faults.cluster import FaultCluster
from shardam_testing.faults.comparison import RUN_FIELDS, differences
from shardam_testing.faults.group_reference import NOT_OF_GRADIENTS, GroupReference
from shardam_testing.faults.members import GroupPlan, Life, Member
from shardam_testing.faults.oracle import Oracle
from shardam_testing.faults.oracle_groups import Decided
from shardam_testing.faults.oracle_table import TableRows
from shardam_testing.faults.sequence import TABLES
from shardam_testing.faults.verification import all_rows, verify


@dataclasses.dataclass
class GroupVerified:
    """A cluster after a sync group's run.

    Attributes:
        oracles: one for each shard.
        decisions: home's, in order.
        rows: of every table over all shards.
        num_comparisons: tables compared.
        mismatches: what differed.
    """

    oracles: list[Oracle]
    decisions: list[Decided]
    rows: dict[str, TableRows]
    num_comparisons: int = 0
    mismatches: list[str] = dataclasses.field(default_factory=list)

    def check(self) -> None:
        """Checks that nothing differed.

        Raises:
            AssertionError: something did.
        """
        assert self.mismatches == [], "\n".join(self.mismatches)


def verify_group(cluster: FaultCluster, plan: GroupPlan) -> GroupVerified:
    """Ends all faults, waits until every client that is gone is settled, and compares a sync group's run.

    Every member must have ended.
    """
    verified = verify(cluster)
    decisions = [one for one in verified.oracles[0].groups.decisions if one.group == plan.group]
    result = GroupVerified(verified.oracles, decisions, all_rows(cluster), verified.num_comparisons, verified.mismatches)
    result.mismatches += compare_decisions(verified.oracles, plan.group)
    result.mismatches += [line for oracle in verified.oracles for line in _left_parts(oracle)]
    if not decisions or decisions[0].step != 1:
        return result  # a base holds the first steps
    with cluster.clients() as clients:
        tables = {spec.name: clients[0].info(spec.name) for spec in TABLES}
    reference = GroupReference(plan.seed, plan.world_size, tables)
    expected = reference.run(decisions)
    result.mismatches += reference.mismatches
    for name, rows in expected.items():
        result.num_comparisons += 1
        found = differences(rows, result.rows[name], RUN_FIELDS)
        if reference.steps()[name] != tables[name].table_step:
            found.append(f"table_step: {reference.steps()[name]} expected, {tables[name].table_step} found")
        result.mismatches += [f"against one process: table {name}, {line}" for line in found]
    for member in cluster.members.started:
        result.mismatches += check_member(member, decisions, reference)
    return result


def compare_decisions(oracles: Sequence[Oracle], group: str) -> list[str]:
    """Compares what each shard's journal says of a group's steps with home's; one line for each that differs."""
    home, found = _by_step(oracles[0], group), []
    for step, decision in home.items():
        members = {one.rank: one.client_id for one in decision.counted}
        if decision.members != members and decision.reason not in NOT_OF_GRADIENTS:
            found.append(f"step {step} counts ranks {sorted(members)} of members {sorted(decision.members)}")
    for index, oracle in enumerate(oracles[1:], start=1):
        for step, decision in _by_step(oracle, group).items():
            if step in home and home[step].told != decision.told:
                found.append(f"step {step} is {decision.told} on shard {index} and {home[step].told} on home")
    last = {oracle.groups.groups[group].step if group in oracle.groups.groups else 0 for oracle in oracles}
    if len(last) > 1:
        found.append(f"group {group} is at steps {sorted(last)} on different shards")
    return found


def _by_step(oracle: Oracle, group: str) -> dict[int, Decided]:
    return {decision.step: decision for decision in oracle.groups.decisions if decision.group == group}


def _left_parts(oracle: Oracle) -> list[str]:
    return [f"a part of rank {part.rank} for step {part.step} was left behind" for part in oracle.groups.parts.values()]


def check_member(member: Member, decisions: Sequence[Decided], reference: GroupReference) -> list[str]:
    """Checks that a member was told what was decided, saw what it had to see, and that nothing of it was lost or doubled."""
    return [
        f"{member.name}: {line}" for life in member.noted.lives for line in _check_life(life, member.rank, decisions, reference)
    ]


def _check_life(life: Life, rank: int, decisions: Sequence[Decided], reference: GroupReference) -> list[str]:
    found = []
    by_step = {decision.step: decision for decision in decisions}
    counted = [decision.step for decision in decisions if life.client_id in {one.client_id for one in decision.counted}]
    acknowledged = [ended.step for ended in life.ended]
    if counted != list(range(life.first_step, life.first_step + len(counted))):
        found.append(f"it began with step {life.first_step}, its counted steps are {counted}")
    if acknowledged != counted[: len(acknowledged)] or len(counted) > len(acknowledged) + 1:
        found.append(f"acknowledged steps {acknowledged}, counted {counted}")
    for ended in life.ended:
        decision = by_step.get(ended.step)
        if decision is None or ended.end != decision.end or ended.counted not in (0, len(decision.counted)):
            found.append(f"was told {ended}, decided was {decision}")
        if life.pulled.get(ended.step) != reference.pulled.get((rank, ended.step)):
            found.append(f"pulled other rows for step {ended.step} than one process has after step {ended.step - 1}")
    return found
