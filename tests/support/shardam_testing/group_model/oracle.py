"""What every shard and every worker has to agree on: home's decisions as it journaled them, and the rows that follow from them.

Rows come from NumPy, out of the gradients that workers recorded; nothing of a shard's merging, journal or replay is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from shardam_proto.v1 import group_pb2
from shardam_server.shard.groups.values import End, Group, StepResult
from shardam_server.shard.state import ShardState
from shardam_testing.group_model.contents import NUM_SHARDS, OWNERS, ROW_IDS, SPECS, Content, is_refused, sum_rank
from shardam_testing.reference_table import COMPONENTS, Float32s, ReferenceTable
from shardam_testing.shard_states import SEED

GROUP = "workers"

Key = tuple[bytes, int]
"""A client and its number."""

_ENDS: Mapping[int, End] = {
    group_pb2.STEP_END_APPLIED: "applied",
    group_pb2.STEP_END_ABSTAINED: "abstained",
    group_pb2.STEP_END_REFUSED: "refused",
}
_KINDS = {
    group_pb2.CONTRIBUTION_KIND_GRADIENT: "gradient",
    group_pb2.CONTRIBUTION_KIND_EMPTY: "empty",
    group_pb2.CONTRIBUTION_KIND_ABSTAIN: "abstain",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Snapshot:
    """All rows after a step.

    Attributes:
        tables: table id -> the table.
        rows: shard -> table id -> (ids, their bits), of the rows that are there.
    """

    tables: Mapping[int, ReferenceTable]
    rows: Sequence[Mapping[int, tuple[list[int], bytes]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Decided:
    """A step.

    Attributes:
        message: as home journaled it.
        result: how it ended for those that are counted.
        after: rows after it.
    """

    message: group_pb2.Decision
    result: StepResult
    after: Snapshot


class Oracle:
    """Watches journals and answers.

    Attributes:
        contents: what each client sent as which number.
        group: as home had it before the change that is being journaled; set by whoever drives home.
        row_limit: rows that a shard may hold; 0: no limit.
        let_go: clients that home has taken out of the group, or ended.
        giving_up: whether home gives a step up because a rank does not arrive.
    """

    def __init__(self) -> None:
        self.contents: dict[Key, Content] = {}
        self.row_limit = 0
        self.giving_up = False
        self.let_go: set[bytes] = set()
        self._start = _snapshot({table_id: ReferenceTable(spec, SEED) for table_id, spec in enumerate(SPECS, 1)})
        self._decided: list[Decided] = []
        self._steps_on = [0] * NUM_SHARDS
        self._versions_on = [0] * NUM_SHARDS
        self._told: dict[Key, StepResult] = {}

    @property
    def num_decided(self) -> int:
        return len(self._decided)

    # -- what shards journal

    def journaled(self, shard: int, message: group_pb2.Decision, group: Group) -> None:
        """Takes note of a decision that a shard carries out; home's is the decision."""
        assert message.step == self._steps_on[shard] + 1, f"shard {shard} carries step {message.step} out at another time"
        if shard == 0:
            self._decide(message, group)
        assert message == self._decided[message.step - 1].message, f"step {message.step} is another one on shard {shard}"
        self._steps_on[shard] += 1

    def lost(self, shard: int, num_steps: int) -> None:
        """Takes note that a shard's last steps were not on its disk."""
        self._steps_on[shard] -= num_steps
        self._versions_on[shard] = 0
        if shard == 0:
            del self._decided[self._steps_on[0] :]
            assert max(self._steps_on) <= self.num_decided, "a shard knows of a decision that home has not made"
            told = [result.step for result in self._told.values()]
            assert max(told, default=0) <= self.num_decided, "a worker was told of a decision that home has not made"

    def _decide(self, message: group_pb2.Decision, group: Group) -> None:
        assert message.step == self.num_decided + 1
        ranks = [one.rank for one in message.contributions]
        assert ranks, "nobody contributes to a step"
        assert ranks == sorted(set(ranks))
        for one in message.contributions:
            member, content = group.member(one.client_id), self.contents[one.client_id, one.number]
            assert member is not None, f"rank {one.rank} is counted and no member"
            assert (member.rank, content.rank, content.step) == (one.rank, one.rank, message.step)
            assert _KINDS[one.kind] == content.kind
        if not self.giving_up:
            assert len(ranks) == len(group.members), "a step is decided before all members have arrived"
            if all(member.restart_count > group.complete_restart_count for member in group.members):
                assert len(ranks) == group.terms.world_size, "a group begins before all ranks are there"
        contents = [self.contents[one.client_id, one.number] for one in message.contributions]
        mean = group.terms.reduce == "mean"
        before = self._decided[-1].after if self._decided else self._start
        end, reason, after, steps = _carry_out(before, contents, mean=mean)
        told_reason = message.refusal.reason
        if self.giving_up:
            end, reason, after, steps = "refused", "STEP_TIMEOUT", before, {}
        elif self.row_limit and told_reason == "ROW_LIMIT":  # which part it is depends on the order of their arrival
            end, reason, after, steps = "refused", "ROW_LIMIT", before, {}
        assert (_ENDS[message.end], told_reason) == (end, reason)
        result = StepResult(message.step, end, len(ranks), steps)
        self._decided.append(Decided(message, result, after))

    # -- what shards are

    def check_shard(self, shard: int, state: ShardState) -> None:
        """Holds a shard against the step that it is at: no more of it, and no less.

        Raises:
            AssertionError: it is not as the decisions up to there leave it.
        """
        entry = state.groups.find(GROUP)
        step = 0 if entry is None else entry.step
        assert step == self._steps_on[shard]
        if entry is not None:
            ranks = [member.rank for member in entry.group.members]
            assert ranks == sorted(set(ranks)), "a rank is there twice"
            assert entry.group.version >= self._versions_on[shard], "a shard goes back to former members"
            self._versions_on[shard] = entry.group.version
        after = self._decided[step - 1].after if step else self._start
        for table_id, (row_ids, bits) in after.rows[shard].items():
            table = state.table(table_id)
            assert table.step == after.tables[table_id].t
            assert table.num_rows == len(row_ids), f"shard {shard}, step {step}: table {table_id} has {table.num_rows} rows"
            batch = table.read(np.array(row_ids, np.int64), include_optimizer=True)
            columns = [getattr(batch, name) for name in COMPONENTS]
            got = b"".join(column.tobytes() for column in [*columns, batch.step])
            assert got == bits, f"shard {shard}, step {step}: other bits in table {table_id}"
        self._check_numbers(shard, step, state)
        assert not self.row_limit or state.num_rows <= self.row_limit
        for part in state.groups.parts():
            client = state.clients.find(part.origin.client_id)
            assert client is not None, "a part of an unknown client"
            assert not client.closed, "a part of a client that is gone"
            assert part.origin.number == client.last_number + 1
            assert part.step == step + 1, f"shard {shard} at step {step} keeps a part of step {part.step}"

    def _check_numbers(self, shard: int, step: int, state: ShardState) -> None:
        """Checks that a step has closed the numbers that it counts, and no other."""
        if not step:
            return
        decided = self._decided[step - 1]
        for place, one in enumerate(decided.message.contributions):
            client = state.clients.find(one.client_id)
            assert client is not None
            _, outcome = client.outcomes[one.number]
            assert outcome.result is not None
            self._check_result(decided, outcome.result)
            # Only the first number carries the tables: where numbers have to be settled, the tables step once.
            assert outcome.steps == ({} if place else decided.result.steps)

    # -- what workers are told

    def check_told(self, client_id: bytes, number: int, result: StepResult) -> None:
        """Holds a result that a worker was told against the decision, and against what it was told before."""
        content = self.contents[client_id, number]
        assert content.step == result.step
        assert result.step <= self.num_decided, "a worker is told of a step that is not decided"
        decided = self._decided[result.step - 1]
        if any((one.client_id, one.number) == (client_id, number) for one in decided.message.contributions):
            self._check_result(decided, result)
        else:
            assert (result.end, result.num_contributions, result.steps) == ("refused", 0, {})
            assert result.refusal is not None
        former = self._told.setdefault((client_id, number), result)
        assert former.num_contributions == result.num_contributions

    def _check_result(self, decided: Decided, result: StepResult) -> None:
        expected = decided.result
        assert dataclasses.replace(result, refusal=None) == expected
        reason = "" if result.refusal is None else result.refusal.reason
        assert reason == decided.message.refusal.reason


def _carry_out(before: Snapshot, contents: Sequence[Content], *, mean: bool) -> tuple[End, str, Snapshot, dict[int, int]]:
    """Returns how a step ends, why, the rows after it, and the steps of the tables that stepped."""
    if any(content.refused for content in contents):
        return "refused", "NON_FINITE_GRADIENT", before, {}
    named: dict[int, list[Content]] = {}
    for content in contents:
        for table_id in content.tables:
            named.setdefault(table_id, []).append(content)
    for ones in named.values():
        if any((one.options, one.grad_scale) != (ones[0].options, ones[0].grad_scale) for one in ones):
            return "refused", "GROUP_MISMATCH", before, {}
    if all(content.kind == "abstain" for content in contents):
        return "abstained", "", before, {}
    gradients = {table_id: _merge(table_id, ones) for table_id, ones in named.items()}
    if any(is_refused(rows.values(), named[table_id][0].grad_scale) for table_id, rows in gradients.items()):
        return "refused", "NON_FINITE_GRADIENT", before, {}
    tables = dict(before.tables)
    for table_id, rows in gradients.items():
        table = tables[table_id] = before.tables[table_id].copy()
        one = named[table_id][0]
        values = np.array(list(rows.values()), np.float32).reshape(len(rows), table.spec.dim)
        table.push(
            np.array(list(rows), np.int64),
            values,
            one.options,
            grad_scale=one.grad_scale,
            contributions=len(contents) if mean else 1,
        )
    return "applied", "", _snapshot(tables), {table_id: tables[table_id].t for table_id in gradients}


def _merge(table_id: int, contents: Sequence[Content]) -> dict[int, Float32s]:
    """Adds the ranks' sums of each row, in rank order, from the first one."""
    merged: dict[int, Float32s] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for content in contents:
            for row_id, row in sum_rank(SPECS[table_id - 1], *content.tables[table_id]).items():
                merged[row_id] = merged[row_id] + row if row_id in merged else row
    return merged


def _snapshot(tables: Mapping[int, ReferenceTable]) -> Snapshot:
    rows: list[dict[int, tuple[list[int], bytes]]] = [{} for _ in range(NUM_SHARDS)]
    for table_id, table in tables.items():
        for shard in range(NUM_SHARDS):
            row_ids = [row_id for row_id in ROW_IDS[shard == OWNERS].tolist() if table.has(row_id)]
            rows[shard][table_id] = row_ids, table.bits(row_ids)
    return Snapshot(tables, rows)
