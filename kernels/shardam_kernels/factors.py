"""Adam's hyper-parameters and the float32 factors that kernels and journal get: one function for all (CONTRACT.md, Arithmetic).

Pure: float64 on the host, each factor rounded once to float32; knows no arrays of rows and no device.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

FLOAT32_MAX = float(np.finfo(np.float32).max)


class OptionError(ValueError):
    """A hyper-parameter is outside what the contract allows; the message names it, its value and the rule."""


@dataclasses.dataclass(frozen=True)
class AdamOptions:
    """The hyper-parameters of one optimizer step, with torch's names and defaults.

    Attributes:
        lr: learning rate; 0 moves moments and step, not weights.
        betas: decay of the first and the second moment.
        eps: added to the raw sqrt(exp_avg_sq).
        weight_decay: 0 for none.
        decoupled_weight_decay: True: the weight decays (AdamW); False: weight_decay * weight is added to the gradient.
        maximize: True: a step goes up the gradient.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled_weight_decay: bool = False
    maximize: bool = False

    def check(self) -> None:
        """Checks what is legal in a push, for every step t.

        Raises:
            OptionError: a number is not finite, negative, or too large or small for float32; a beta is outside [0, 1);
                a flag is not a bool.
        """
        _require_number("lr", self.lr)
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise OptionError(f"betas must be a pair of numbers in [0, 1), got {self.betas!r}")
        for index, beta in enumerate(self.betas):
            _require_number(f"betas[{index}]", beta)
            if beta >= 1:
                raise OptionError(f"betas[{index}] must be in [0, 1), got {beta!r}")
        _require_number("eps", self.eps)
        if float(np.float32(self.eps)) == 0:
            raise OptionError(f"eps must be greater than zero as float32, got {self.eps!r}; use at least 1e-44")
        _require_number("weight_decay", self.weight_decay)
        for name in ("decoupled_weight_decay", "maximize"):
            if not isinstance(getattr(self, name), bool):
                raise OptionError(f"{name} must be True or False, got {getattr(self, name)!r}")
        # s is largest where 1 - beta1**t is smallest, at t = 1, and sqrt(1 - beta2**t) is at most 1.
        if self.lr / (1 - self.betas[0]) > FLOAT32_MAX:
            raise OptionError(f"lr {self.lr!r} with betas[0] {self.betas[0]!r} makes a step beyond float32; use a smaller lr")
        if self.lr * self.weight_decay > FLOAT32_MAX:
            raise OptionError(f"lr * weight_decay is beyond float32: lr {self.lr!r}, weight_decay {self.weight_decay!r}")


def _require_number(name: str, value: float) -> None:
    """Refuses what is not a finite float32 number >= 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(f"{name} must be a number, got {value!r}")
    if not 0 <= value <= FLOAT32_MAX:  # False for NaN, too
        raise OptionError(f"{name} must be a finite float32 number >= 0, got {value!r}")


def check_grad_scale(grad_scale: float) -> None:
    """Checks the loss scale that a push carries.

    Raises:
        OptionError: it is not a finite number > 0, or its reciprocal is no finite float32 number > 0.
    """
    _require_number("grad_scale", grad_scale)
    if grad_scale == 0 or 1 / grad_scale > FLOAT32_MAX or float(np.float32(1 / grad_scale)) == 0:
        raise OptionError(f"grad_scale and its reciprocal must be finite float32 numbers > 0, got {grad_scale!r}")


@dataclasses.dataclass(frozen=True)
class Factors:
    """What a kernel needs of one table's step; every float is exactly a float32 value.

    Attributes:
        c1: 1 - beta1.
        c2: 1 - beta2.
        s: lr * sqrt(1 - beta2**t) / (1 - beta1**t), the step factor of all rows in table step mode.
        d: 1 - lr * weight_decay, what a weight is multiplied by when decay is decoupled.
        eps: added to sqrt(exp_avg_sq).
        weight_decay: of the coupled kind, or of the decoupled kind that d already holds; 0: no decay of either kind.
        unscale: 1 / grad_scale; 1: not scaled.
        divisor: number of contributions of a mean; 1: not divided.
        maximize: negate the gradient.
        decoupled: weight_decay acts through d.
    """

    c1: float
    c2: float
    s: float
    d: float
    eps: float
    weight_decay: float
    unscale: float
    divisor: float
    maximize: bool
    decoupled: bool

    def step_factors(self, num_rows: int) -> npt.NDArray[np.float32]:
        """Returns s for each of num_rows rows, float32 [num_rows]: what adam_update takes in table step mode."""
        return np.full(num_rows, self.s, np.float32)


def factors(options: AdamOptions, t: int, *, grad_scale: float = 1.0, contributions: int = 1) -> Factors:
    """Returns the float32 factors of step t.

    Args:
        options: the hyper-parameters.
        t: the table's step after this one, from 1.
        grad_scale: loss scale of the gradients, finite and > 0.
        contributions: K of a mean over K contributions; 1 for async and for sums.

    Raises:
        OptionError: an option or grad_scale is not legal.
        ValueError: t or contributions is below 1.
    """
    options.check()
    check_grad_scale(grad_scale)
    if t < 1:
        raise ValueError(f"the first step is t = 1, got {t}")
    if contributions < 1:
        raise ValueError(f"contributions must be at least 1, got {contributions}")
    beta1, beta2 = options.betas
    return Factors(
        c1=_round32(1 - beta1),
        c2=_round32(1 - beta2),
        s=_step_factor(options, t),
        d=_round32(1 - options.lr * options.weight_decay),
        eps=_round32(options.eps),
        weight_decay=_round32(options.weight_decay),
        unscale=_round32(1 / grad_scale),
        divisor=_round32(contributions),
        maximize=options.maximize,
        decoupled=options.decoupled_weight_decay,
    )


def row_step_factors(options: AdamOptions, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Returns s of rows that count their own steps, float32 [N]: each the s that `factors` gives for its step.

    Args:
        options: the hyper-parameters.
        steps: int64 [N], the step of each row after this one, from 1.

    Raises:
        OptionError: an option is not legal.
        ValueError: a step is below 1.
    """
    options.check()
    if steps.size and steps.min() < 1:
        raise ValueError(f"the first step of a row is 1, got {steps.min()}")
    # Scalar arithmetic, once per distinct step: NumPy's vector pow may differ from libm's by an ulp.
    distinct, place = np.unique(steps, return_inverse=True)
    values = np.array([_step_factor(options, t) for t in distinct.tolist()], np.float32)
    return values[place]


def _step_factor(options: AdamOptions, t: int) -> float:
    beta1, beta2 = options.betas
    return _round32(options.lr * math.sqrt(1 - beta2**t) / (1 - beta1**t))


def _round32(value: float) -> float:
    return float(np.float32(value))
