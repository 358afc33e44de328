"""SparseAdam's step (CONTRACT.md, Arithmetic)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import Factors
from shardam_kernels.gradients import DECAYED_GRADIENT_LIMIT
from shardam_kernels.hashing import stream_hashes
from shardam_kernels.reference.records import Records
from shardam_kernels.reference.weights import round_stochastically, saturate_float32
from shardam_kernels.row_steps import RowSteps


def adam_update(
    records: Records,
    slots: npt.NDArray[np.int64],
    gradients: npt.NDArray[np.float32],
    factors: Factors,
    steps: RowSteps,
) -> int:
    """Applies one step to rows and returns how many weights were saturated.

    Args:
        records: the table's records.
        slots: int64 [U], distinct.
        gradients: float32 [U, dim], merged, unscaled, divided.
        factors: of the step; its s is not used.
        steps: the step of each row; where its s is 0 the gradient does not move the weight.

    Source:
        torch.optim.SparseAdam (eps beside the raw square root); decay as torch.optim.Adam and AdamW.
    """
    steps.check(records.layout.dtype)
    c1, c2 = np.float32(factors.c1), np.float32(factors.c2)
    g = gradients
    w, m, v = (records.read(name, slots) for name in ("weight", "exp_avg", "exp_avg_sq"))
    s = steps.factors[:, np.newaxis]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if factors.maximize:
            g = -g
        if factors.decoupled:
            w, _ = saturate_float32(w * np.float32(factors.d))
        elif factors.weight_decay != 0:
            limit = np.float32(DECAYED_GRADIENT_LIMIT)
            g = np.clip(g + np.float32(factors.weight_decay) * w, -limit, limit)
        m = m + (g - m) * c1
        v = v + (g * g - v) * c2
        moved = w - s * (m / (np.sqrt(v) + np.float32(factors.eps)))
    w = np.where(s == 0, w, moved)
    if steps.rounding is None:
        records.component("weight")[slots], saturated = saturate_float32(w)
    else:
        random = stream_hashes(steps.rounding.streams(), records.layout.dim)
        records.narrow_weights()[slots], saturated = round_stochastically(w, records.layout.dtype, random)
    records.component("exp_avg")[slots] = m
    records.component("exp_avg_sq")[slots] = v
    return saturated
