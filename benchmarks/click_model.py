"""The dense part of a click model in the manner of DLRM: two towers and the dot products between all vectors.

Source: M. Naumov et al., Deep Learning Recommendation Model for Personalization and Recommendation Systems, arXiv:1906.00091.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

BOTTOM, TOP = (128, 64), (128, 64)
"""Widths of the towers' layers: a quarter of those that DLRM's authors give for click logs of this shape, so that on one core
rows of 64 take a third of a local step. A wider model leaves less to be gained, whoever holds the rows: train.py shows it."""


def tower(widths: Sequence[int], *, ends: bool) -> nn.Sequential:
    """Returns linear layers with ReLU between them, and behind the last one unless it ends the model."""
    layers: list[nn.Module] = []
    for width, next_width in itertools.pairwise(widths):
        layers += [nn.Linear(width, next_width), nn.ReLU()]
    return nn.Sequential(*layers[: -1 if ends else None])


class ClickModel(nn.Module):
    """Logits of a batch.

    Args:
        num_dense: counts of a sample.
        num_fields: categorical fields.
        dim: elements of a row.
    """

    def __init__(self, num_dense: int, num_fields: int, dim: int) -> None:
        super().__init__()
        num_vectors = num_fields + 1
        self.bottom = tower((num_dense, *BOTTOM, dim), ends=False)
        self.top = tower((dim + num_vectors * (num_vectors - 1) // 2, *TOP, 1), ends=True)
        self.register_buffer("below_diagonal", torch.tril_indices(num_vectors, num_vectors, -1), persistent=False)

    def forward(self, dense: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Computes logits [B].

        Args:
            dense: [B, num_dense].
            rows: a field's rows [B, dim], for each field.
        """
        bottom = self.bottom(dense)
        vectors = torch.stack([bottom, *rows], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        first, second = self.get_buffer("below_diagonal")
        logits: torch.Tensor = self.top(torch.cat([bottom, products[:, first, second]], 1))
        return logits.squeeze(1)
