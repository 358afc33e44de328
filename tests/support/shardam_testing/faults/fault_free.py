"""A worker's run without faults and without a cluster: its sequence through the NumPy kernels, for any shard count the same."""

from __future__ import annotations

from collections.abc import Mapping

from shardam_kernels.factors import AdamOptions, factors, row_step_factors
from shardam_proto.v1 import common_pb2, journal_pb2
from shardam_testing.faults.oracle_table import OracleTable, RecordedRows, TableRows
from shardam_testing.faults.sequence import Assign, Delete, TablePush, make_change


def expected_rows(
    seed: int, count: int, tables: Mapping[str, common_pb2.TableInfo], *, new_rows: int = 0
) -> dict[str, TableRows]:
    """Returns the rows after the first changes of a sequence.

    Args:
        seed: of the worker.
        count: how many changes.
        tables: the tables by name, for their ids and seeds.
        new_rows: as make_change.
    """
    oracles = {}
    for name, info in tables.items():
        empty = common_pb2.TableInfo(spec=info.spec, table_id=info.table_id, table_seed=info.table_seed)
        oracles[name] = OracleTable(empty)
    for number in range(1, count + 1):
        match make_change(seed, number, new_rows=new_rows):
            case Delete(spec, row_ids):
                oracles[spec.name].delete(row_ids)
            case Assign(spec, row_ids, weight, exp_avg, if_absent):
                columns = {"weight": weight} | ({} if exp_avg is None else {"exp_avg": exp_avg})
                oracles[spec.name].assign(row_ids, columns, number, if_absent=if_absent)
            case push:
                for part in push.tables:
                    _push(oracles[part.spec.name], part, number)
    return {name: oracle.rows() for name, oracle in oracles.items()}


def push_message(
    table: OracleTable, options: AdamOptions, grad_scale: float, num_rows: int, contributions: int = 1
) -> journal_pb2.TablePush:
    """Returns a table's next step as a shard would record it.

    Args:
        table: the table.
        options: hyper-parameters.
        grad_scale: loss scale.
        num_rows: ids that are pushed.
        contributions: what a mean is divided by.
    """
    step = table.step + 1
    values = factors(options, step, grad_scale=grad_scale, contributions=contributions)
    return journal_pb2.TablePush(
        table_id=table.table_id,
        table_step=step,
        num_rows=num_rows,
        factors=journal_pb2.StepFactors(**vars(values)),
        options=common_pb2.AdamOptions(
            lr=options.lr,
            beta1=options.betas[0],
            beta2=options.betas[1],
            eps=options.eps,
            weight_decay=options.weight_decay,
            decoupled_weight_decay=options.decoupled_weight_decay,
            maximize=options.maximize,
            grad_scale=grad_scale,
        ),
    )


def _push(table: OracleTable, part: TablePush, number: int) -> None:
    message = push_message(table, part.options, part.grad_scale, part.row_ids.size)
    steps = table.next_row_steps(part.row_ids)
    table.push(message, part.row_ids, part.gradients, RecordedRows(steps, row_step_factors(part.options, steps)), number)
