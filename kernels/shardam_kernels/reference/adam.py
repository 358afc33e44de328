"""SparseAdam's step (CONTRACT.md, Arithmetic)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from shardam_kernels.factors import Factors
from shardam_kernels.gradients import DECAYED_GRADIENT_LIMIT
from shardam_kernels.reference.records import Records

_LARGEST = np.finfo(np.float32).max


def adam_update(
    records: Records,
    slots: npt.NDArray[np.int64],
    gradients: npt.NDArray[np.float32],
    factors: Factors,
    step_factors: npt.NDArray[np.float32],
) -> int:
    """Applies one step to rows and returns how many weights were saturated.

    Args:
        records: the table's records.
        slots: int64 [U], distinct.
        gradients: float32 [U, dim], merged, unscaled, divided.
        factors: of the step; its s is not used.
        step_factors: float32 [U], s of each row; where it is 0 the gradient does not move the weight.

    Source:
        torch.optim.SparseAdam (eps beside the raw square root); decay as torch.optim.Adam and AdamW.
    """
    c1, c2 = np.float32(factors.c1), np.float32(factors.c2)
    g = gradients
    w = records.component("weight")[slots]
    m = records.component("exp_avg")[slots]
    v = records.component("exp_avg_sq")[slots]
    s = step_factors[:, np.newaxis]
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if factors.maximize:
            g = -g
        if factors.decoupled:
            w = np.clip(w * np.float32(factors.d), -_LARGEST, _LARGEST)
        elif factors.weight_decay != 0:
            limit = np.float32(DECAYED_GRADIENT_LIMIT)
            g = np.clip(g + np.float32(factors.weight_decay) * w, -limit, limit)
        m = m + (g - m) * c1
        v = v + (g * g - v) * c2
        moved = w - s * (m / (np.sqrt(v) + np.float32(factors.eps)))
    w = np.where(s == 0, w, moved)
    records.component("weight")[slots] = np.clip(w, -_LARGEST, _LARGEST)
    records.component("exp_avg")[slots] = m
    records.component("exp_avg_sq")[slots] = v
    return int(np.isinf(w).sum())
