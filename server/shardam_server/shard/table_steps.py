"""One optimizer step of a table, as its rows go through it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import AdamOptions, Factors, factors, row_step_factors
from shardam_proto.errors import JournalDamaged
from shardam_server.shard.records import Float32s, Gradients, Int64s, StagedStep


@dataclasses.dataclass(frozen=True)
class RowStepValues:
    """What rows that count their own steps go through in one step, by ascending id.

    Attributes:
        steps: uint32 [U], each row's own step after it.
        factors: float32 [U], each row's s.
    """

    steps: npt.NDArray[np.uint32]
    factors: Float32s


class Step(NamedTuple):
    """One optimizer step of a table.

    Attributes:
        options: its hyper-parameters.
        factors: their float32 factors at table_step.
        table_step: t after it.
        change_number: the shard's change that it is part of.
        recorded: of a step that is replayed from a journal: what its rows went through; None: computed.
    """

    options: AdamOptions
    factors: Factors
    table_step: int
    change_number: int
    recorded: RowStepValues | None = None


class StagedUpdate(NamedTuple):
    """A step that is ready to be applied.

    Attributes:
        gradients: of its rows.
        new_ids: rows that exist only for this step.
        row_steps: uint32 [U], each row's own step after it; None in table step mode.
        values: the same with each row's s, by ascending id, for a journal; None in table step mode.
        on_device: what the device needs.
        watching: called before it is applied.
    """

    gradients: Gradients
    new_ids: Int64s
    row_steps: npt.NDArray[np.uint32] | None
    values: RowStepValues | None
    on_device: StagedStep
    watching: Sequence[Callable[[], None]]

    @property
    def slots(self) -> Int64s:
        """int64 [U]."""
        return self.gradients.slots


@functools.lru_cache(maxsize=64)  # the tables of a push mostly have the same step and options
def cached_factors(options: AdamOptions, t: int, grad_scale: float, contributions: int) -> Factors:
    """Returns the factors of step t.

    Raises:
        OptionError: as `factors`.
    """
    return factors(options, t, grad_scale=grad_scale, contributions=contributions)


def values_by_id(row_ids: Int64s, row_steps: npt.NDArray[np.uint32], step: Step) -> RowStepValues:
    """Returns distinct rows' steps and factors by ascending id: computed, or the recorded ones of a replay.

    Raises:
        JournalDamaged: the recorded steps are not these.
    """
    sorted_steps = row_steps[np.argsort(row_ids)]
    if step.recorded is None:
        return RowStepValues(sorted_steps, row_step_factors(step.options, sorted_steps.astype(np.int64)))
    if not np.array_equal(step.recorded.steps, sorted_steps):
        raise JournalDamaged(f"a replayed push takes {row_ids.size} rows to steps that are not their next ones")
    return step.recorded
