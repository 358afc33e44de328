"""How tables are said in JSON, by the command line and REST alike: schemas as POST /v1/tables takes them, hyper-parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from shardam_proto.schema import Constant, Initializer, Normal, TableSpec, Uniform, XavierNormal, XavierUniform
from shardam_proto.v1 import common_pb2

Scalar = None | bool | int | float | str
"""A value without parts."""

Words = Scalar | Sequence["Words"] | Mapping[str, "Words"]
"""What JSON shows."""


def spec_to_json(spec: TableSpec) -> dict[str, Words]:
    """Returns a schema in the form in which POST /v1/tables takes it."""
    return {
        "name": spec.name,
        "dim": spec.dim,
        "dtype": spec.dtype,
        "init": init_to_json(spec.init),
        "num_embeddings": spec.num_embeddings,
        "padding_idx": None if spec.padding_idx is None else str(spec.padding_idx),
        "optimizer": spec.optimizer,
        "step": spec.step,
        "max_rows_per_shard": spec.max_rows_per_shard,
    }


def init_to_json(init: Initializer) -> dict[str, Words]:
    """Returns an initializer with its kind."""
    match init:
        case Normal(mean, std):
            return {"kind": "normal", "mean": mean, "std": std}
        case Uniform(low, high):
            return {"kind": "uniform", "low": low, "high": high}
        case Constant(value):
            return {"kind": "constant", "value": value}
        case XavierUniform():
            return {"kind": "xavier_uniform"}
        case XavierNormal():
            return {"kind": "xavier_normal"}


def options_to_json(options: common_pb2.AdamOptions) -> dict[str, Words]:
    """Returns the hyper-parameters of a push."""
    return {
        "lr": spelled(options.lr),
        "betas": [spelled(options.beta1), spelled(options.beta2)],
        "eps": spelled(options.eps),
        "weight_decay": spelled(options.weight_decay),
        "decoupled_weight_decay": options.decoupled_weight_decay,
        "maximize": options.maximize,
        "grad_scale": spelled(options.grad_scale),
    }


def spelled(value: float) -> float | str:
    """Returns a finite value as it is, and "NaN", "Infinity" or "-Infinity" for the others."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
