"""State of torch.nn.Embedding and torch.optim.SparseAdam, into a table and out of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from shardam._arrays import Float32s, Int64s, Values, as_flat_row_ids, as_rows, check_bounds, check_rows_shape, some
from shardam._parts import RowWrite
from shardam._table_files import ImportReport
from shardam._table_state import check_replaceable, delete_others, moment_of, write_rows
from shardam.table import Table
from shardam_kernels.factors import AdamOptions, OptionError
from shardam_proto.errors import BadOption, NonFiniteState, StaleState, WrongShape
from shardam_proto.table_files import rows_per_block

ModuleState = dict[str, torch.Tensor]
"""What torch.nn.Embedding.state_dict() returns."""

OptimizerState = dict[str, object]
"""What torch.optim.SparseAdam.state_dict() returns."""

_SPARSE_ADAM_KEYS = frozenset({"lr", "betas", "eps", "maximize", "params"})
"""Of a param group; those of a scheduler, and names of parameters, may stand beside them."""

_OTHER_OPTIMIZERS_KEYS = frozenset({"amsgrad", "momentum", "weight_decay", "lr_decay", "alpha", "rho"})
"""Of groups of torch's other optimizers, whose moments mean something else."""


@dataclasses.dataclass(frozen=True)
class _Moments:
    """What SparseAdam keeps of one parameter.

    Attributes:
        step: t.
        exp_avg: float32 [N, dim].
        exp_avg_sq: float32 [N, dim].
        options: hyper-parameters of its group.
    """

    step: int
    exp_avg: Float32s
    exp_avg_sq: Float32s
    options: AdamOptions


def import_state(
    table: Table,
    weight: Values,
    optimizer_state: Mapping[str, object] | None,
    param: int | str,
    row_ids: Values | None,
    overwrite: bool,
) -> ImportReport:
    """Fills a table; see Embedding.import_state_dict."""
    ids = _ids_of(table, row_ids)
    rows = _checked(ids, table, weight, "weight")
    moments = None if optimizer_state is None else _moments_of(table, ids, optimizer_state, param)
    step = None if moments is None else moments.step
    stats = check_replaceable(table, step, overwrite=overwrite, source="the state_dict")
    num_deleted = delete_others(table, np.sort(ids)) if stats.num_rows else 0
    exp_avg, exp_avg_sq = (np.zeros_like(rows),) * 2 if moments is None else (moments.exp_avg, moments.exp_avg_sq)
    own_steps = np.zeros(ids.size, np.uint32) if table.spec.step == "row" else None
    block = rows_per_block(table.dim)
    num_rows = 0
    for start in range(0, max(1, ids.size), block):
        part = slice(start, start + block)
        write = RowWrite(
            ids[part],
            rows[part],
            exp_avg[part],
            exp_avg_sq[part],
            row_steps=None if own_steps is None else own_steps[part],
            table_step=step,
        )
        num_rows += write_rows(table, write)
    return ImportReport(
        table=table.name,
        num_rows=num_rows,
        num_deleted=num_deleted,
        created=False,
        table_step=table.stats().table_step,
        moments=moments is not None,
        same_initial_rows=table.spec.num_embeddings is not None,  # then every row is written
        one_moment=True,
        options=None if moments is None else moments.options,
    )


def export_state(
    table: Table, name: str, row_ids: Values | None, options: AdamOptions | None
) -> tuple[ModuleState, OptimizerState]:
    """Reads a table as torch's two state_dicts; see Embedding.export_state_dict."""
    if table.spec.step == "row":
        raise BadOption(
            f"table {table.name!r} counts the steps of each row (step='row'), and torch.optim.SparseAdam has one step for all; "
            "export it to a file with table.export(path), or read weights alone with table.pull"
        )
    ids = _ids_of(table, row_ids)
    before = moment_of(table)
    rows = table.rows(ids)
    last = table.stats().last_options
    after = moment_of(table)
    if before.table_step != after.table_step or not after.steps_agree:
        raise StaleState(
            f"table {table.name!r} was pushed to while its state was read (step {before.table_step} before, {after.table_step} "
            "after), so weights and moments may be of different steps; pause the other workers and call this again"
        )
    group = _param_group(table, options or last or AdamOptions())
    state: dict[int, dict[str, object]] = {}
    if after.table_step:  # torch keeps nothing before the first step
        state[0] = {
            "step": after.table_step,
            "exp_avg": torch.from_numpy(rows.exp_avg),
            "exp_avg_sq": torch.from_numpy(rows.exp_avg_sq),
        }
    return {name: torch.from_numpy(rows.weight)}, {"state": state, "param_groups": [group]}


def _param_group(table: Table, options: AdamOptions) -> dict[str, object]:
    if options.weight_decay:
        raise BadOption(
            f"table {table.name!r}: torch.optim.SparseAdam has no weight decay, and the last push had {options.weight_decay}; "
            "hand in options=shardam.AdamOptions(lr=...) for the run that goes on"
        )
    return {
        "lr": options.lr,
        "betas": options.betas,
        "eps": options.eps,
        "maximize": options.maximize,
        "params": [0],
    }


def weight_of(state_dict: Mapping[str, object], name: str, table: str) -> torch.Tensor:
    """Returns a module's weight.

    Raises:
        BadOption: the state_dict has no tensor of that name; the message has the names that it has.
    """
    weight = state_dict.get(name) if isinstance(state_dict, Mapping) else None
    if not isinstance(weight, torch.Tensor):
        names = list(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise BadOption(
            f"table {table!r}: the state_dict has no tensor {name!r}, it has {names}; say which one is the "
            "table's with name=..."
        )
    return weight.detach().cpu()


def _ids_of(table: Table, row_ids: Values | None) -> Int64s:
    """Returns the ids that the rows of torch's matrices stand for."""
    bound = table.spec.num_embeddings
    if row_ids is None:
        if bound is None:
            raise BadOption(
                f"table {table.name!r} is unbounded, so a row of torch's weight is no id; say which id each row is with "
                "ids=[...] (all that exist: numpy.concatenate([rows.row_ids for rows in table.scan()]))"
            )
        return np.arange(bound)
    if bound is not None:
        raise BadOption(f"table {table.name!r} has num_embeddings={bound}, so row i is id i; leave ids out")
    ids = as_flat_row_ids(row_ids, "ids")
    distinct, counts = np.unique(ids, return_counts=True)
    if distinct.size != ids.size:
        raise WrongShape(f"table {table.name!r}: ids {some(distinct[counts > 1])} are named twice; each row is one id")
    check_bounds(ids, bound, table.name)
    return ids


def _checked(ids: Int64s, table: Table, values: Values, what: str) -> Float32s:
    rows = check_rows_shape(ids, as_rows(values, what), table.dim, what)
    bad = ~np.isfinite(rows).all(axis=1)
    if what == "exp_avg_sq":
        bad |= (rows < 0).any(axis=1)
    if bad.any():
        rule = "finite and not negative" if what == "exp_avg_sq" else "finite"
        raise NonFiniteState(
            f"table {table.name!r}: {what} must be {rule}; it is not for ids {some(ids[bad])}; nothing was written",
            metadata={"table": table.name, "row_ids": some(ids[bad]), "column": what},
        )
    return rows


def _moments_of(table: Table, ids: Int64s, optimizer_state: Mapping[str, object], param: int | str) -> _Moments:
    """Reads one parameter's part of an optimizer's state_dict.

    Raises:
        BadOption: it is no SparseAdam's, or has no such parameter.
        WrongShape, NonFiniteState: its moments do not fit the table.
    """
    if table.spec.step == "row":
        raise BadOption(
            f"table {table.name!r} counts the steps of each row (step='row'), and torch.optim.SparseAdam has one step for all; "
            "make the table with step='table', or leave the optimizer's state out"
        )
    group, index = _group_of(table, optimizer_state, param)
    state = optimizer_state["state"]
    kept = state.get(index, {}) if isinstance(state, Mapping) else None
    if not isinstance(kept, Mapping) or (kept and not {"step", "exp_avg", "exp_avg_sq"} <= set(kept)):
        raise _not_sparse_adam(table, f"the state of parameter {index} is {_keys(kept)}")
    options = _options_of(table, group)
    if not kept:  # it has taken no step
        zeros = np.zeros((ids.size, table.dim), np.float32)
        return _Moments(0, zeros, zeros, options)
    step = int(kept["step"])
    if step < 1:
        raise BadOption(f"table {table.name!r}: the optimizer's step must be at least 1 where it has moments, it is {step}")
    exp_avg, exp_avg_sq = (
        _checked(ids, table, kept[what].detach().cpu() if isinstance(kept[what], torch.Tensor) else kept[what], what)
        for what in ("exp_avg", "exp_avg_sq")
    )
    return _Moments(step, exp_avg, exp_avg_sq, options)


def _group_of(table: Table, optimizer_state: Mapping[str, object], param: int | str) -> tuple[Mapping[str, object], int]:
    """Returns the param group of a parameter, and the parameter's index."""
    groups = optimizer_state.get("param_groups") if isinstance(optimizer_state, Mapping) else None
    if not isinstance(groups, list) or "state" not in optimizer_state:
        raise _not_sparse_adam(table, f"it has {_keys(optimizer_state)}")
    known: list[object] = []
    for group in groups:
        names = group.get("param_names") or [None] * len(group["params"])
        for index, name in zip(group["params"], names, strict=True):
            if param in (index, name):
                odd = sorted(_OTHER_OPTIMIZERS_KEYS & set(group))
                if odd or not set(group) >= _SPARSE_ADAM_KEYS:
                    raise _not_sparse_adam(table, f"the parameter's group has {odd or _keys(group)}")
                return group, index
            known.append(index if name is None else name)
    raise BadOption(
        f"table {table.name!r}: the optimizer's state_dict has no parameter {param!r}; it has {known}; say param=..."
    )


def _options_of(table: Table, group: Mapping[str, object]) -> AdamOptions:
    try:
        betas = group["betas"]
        if not isinstance(betas, (tuple, list)):
            raise OptionError(f"betas are {betas!r}")
        options = AdamOptions(
            lr=float(group["lr"]),  # type: ignore[arg-type]  # what is no number raises
            betas=(float(betas[0]), float(betas[1])),
            eps=float(group["eps"]),  # type: ignore[arg-type]  # as lr
            maximize=bool(group["maximize"]),
        )
        options.check()
    except (TypeError, ValueError, IndexError) as error:
        raise BadOption(
            f"table {table.name!r}: a hyper-parameter of the optimizer's state_dict is not legal: {error}"
        ) from error
    return options


def _not_sparse_adam(table: Table, found: str) -> BadOption:
    return BadOption(
        f"table {table.name!r}: the optimizer's state_dict is not torch.optim.SparseAdam's ({found}); other optimizers' "
        "moments mean something else: leave optimizer_state_dict out to take the weights alone"
    )


def _keys(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
