"""A group's run in one process, without shards: home's decisions carried out in NumPy on one set of tables.

It makes every member's gradients itself, from the rows that it has, so it also says what each member must have pulled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardam_kernels.factors import factors, row_step_factors
from shardam_proto.v1 import common_pb2
from shardam_testing.faults.fault_free import push_message
from shardam_testing.faults.group_work import Work, digest, make_work
from shardam_testing.faults.oracle_groups import Decided, is_refused, merged_by_rank, unscaled
from shardam_testing.faults.oracle_table import Float32s, Int64s, OracleTable, RecordedRows, TableRows, UnscaledGradient

NOT_OF_GRADIENTS = ("STEP_TIMEOUT",)
"""Refusals that do not follow from what the members sent."""


class GroupReference:
    """One process that trains as the group did.

    Args:
        seed: of the run.
        world_size: of the group.
        tables: the tables by name, for their ids and seeds.

    Attributes:
        pulled: (rank, step) -> digest of what that member pulled, for contributions that were counted.
        mismatches: what the decisions say and cannot be.
    """

    def __init__(self, seed: int, world_size: int, tables: Mapping[str, common_pb2.TableInfo]) -> None:
        self.pulled: dict[tuple[int, int], str] = {}
        self.mismatches: list[str] = []
        self._seed = seed
        self._world_size = world_size
        self._tables = {
            name: OracleTable(common_pb2.TableInfo(spec=info.spec, table_id=info.table_id, table_seed=info.table_seed))
            for name, info in tables.items()
        }

    def run(self, decisions: Iterable[Decided]) -> dict[str, TableRows]:
        """Carries decisions out, in order; returns the rows after them."""
        for decision in decisions:
            self._step(decision)
        return {name: table.rows() for name, table in self._tables.items()}

    def steps(self) -> dict[str, int]:
        """Returns the tables' steps."""
        return {name: table.step for name, table in self._tables.items()}

    def _step(self, decision: Decided) -> None:
        works = {one.rank: make_work(self._seed, self._world_size, one.rank, decision.step) for one in decision.counted}
        named: dict[str, list[tuple[Int64s, Float32s]]] = {}
        for one in decision.counted:
            work = works[one.rank]
            if work.kind != one.kind and decision.end != "refused":
                self.mismatches.append(f"step {decision.step}: rank {one.rank} sent {work.kind}, counted as {one.kind}")
            self._train(work, one.rank, decision.step, named)
        if decision.reason in NOT_OF_GRADIENTS or not works:
            return
        shared = next(iter(works.values()))
        scale = factors(shared.options, 1, grad_scale=shared.grad_scale)
        sums = {name: merged_by_rank(parts) for name, parts in named.items()}
        gradients = {name: (row_ids, unscaled(rows, scale)) for name, (row_ids, rows) in sums.items()}
        end = _end(works.values(), [values for _, values in gradients.values()])
        if end != decision.end:
            self.mismatches.append(f"step {decision.step} must end {end}, it was {decision.end} {decision.reason}")
        if end != "applied":
            return
        contributions = len(decision.counted) if decision.reduce_mean else 1
        for name, (row_ids, values) in gradients.items():
            self._apply(self._tables[name], UnscaledGradient(row_ids, values, contributions), shared)

    def _train(self, work: Work, rank: int, step: int, named: dict[str, list[tuple[Int64s, Float32s]]]) -> None:
        pulled = [self._tables[part.spec.name].weights(part.row_ids) for part in work.tables]
        self.pulled[rank, step] = digest(pulled)
        if work.kind != "gradient":
            return
        for part, rows in zip(work.tables, pulled, strict=True):
            table = self._tables[part.spec.name]
            gradients = table.without_padding(part.row_ids, part.gradients(rows, work.grad_scale))
            named.setdefault(part.spec.name, []).append(gradients)

    def _apply(self, table: OracleTable, gradient: UnscaledGradient, work: Work) -> None:
        message = push_message(table, work.options, work.grad_scale, gradient.row_ids.size, gradient.contributions)
        steps = table.next_row_steps(gradient.row_ids)
        table.push_unscaled(message, gradient, RecordedRows(steps, row_step_factors(work.options, steps)), 0)


def _end(works: Iterable[Work], gradients: Iterable[Float32s]) -> str:
    """Returns how a step must end, by what its members sent."""
    if any(is_refused(values) for values in gradients):
        return "refused"
    return "abstained" if all(work.kind == "abstain" for work in works) else "applied"
