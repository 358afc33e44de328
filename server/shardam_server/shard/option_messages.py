"""Hyper-parameters as messages and back."""

from __future__ import annotations

from shardam_kernels.factors import AdamOptions
from shardam_proto.v1 import common_pb2


def decode_options(message: common_pb2.AdamOptions) -> AdamOptions:
    """Converts hyper-parameters; ranges are checked when factors are computed."""
    return AdamOptions(
        lr=message.lr,
        betas=(message.beta1, message.beta2),
        eps=message.eps,
        weight_decay=message.weight_decay,
        decoupled_weight_decay=message.decoupled_weight_decay,
        maximize=message.maximize,
    )


def encode_options(options: AdamOptions, grad_scale: float = 1.0) -> common_pb2.AdamOptions:
    """Converts hyper-parameters and the loss scale of their gradients."""
    return common_pb2.AdamOptions(
        lr=options.lr,
        beta1=options.betas[0],
        beta2=options.betas[1],
        eps=options.eps,
        weight_decay=options.weight_decay,
        decoupled_weight_decay=options.decoupled_weight_decay,
        maximize=options.maximize,
        grad_scale=grad_scale,
    )
