"""What an EmbeddingCollection takes: ids by feature, plain or in bags, or one object with all of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from shardam._arrays import Values
from shardam._uses import checked_offsets
from shardam_proto.errors import BadOption, WrongShape


@runtime_checkable
class KeyedJagged(Protocol):
    """Ids of several features, one feature after the other, such as a KeyedJaggedTensor."""

    def keys(self) -> Sequence[str]:
        """Names of the F features."""
        ...

    def values(self) -> torch.Tensor:
        """Ids [N] of all features."""
        ...

    def offsets(self) -> torch.Tensor:
        """Where each bag starts, and the end: integers [F * B + 1]."""
        ...

    def weights_or_none(self) -> torch.Tensor | None:
        """A weight for each id, or None."""
        ...


Ids = torch.Tensor | Values
Feature = Ids | tuple[Ids, Ids] | tuple[Ids, Ids, torch.Tensor]
"""Ids of any shape, or ids [N] with offsets, or these with a weight for each id."""

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]

Jagged = tuple[Ids, Ids | None, torch.Tensor | None]
"""Ids, offsets and weights of one feature."""


def jagged_features(
    features: Mapping[str, Feature] | KeyedJagged, names: Collection[str], without_last_offset: Collection[str]
) -> dict[str, Jagged]:
    """Takes a forward's features apart.

    Args:
        features: as EmbeddingCollection.forward takes them.
        names: the collection's features.
        without_last_offset: those whose bags' offsets do not end with the number of ids.

    Returns:
        Ids, offsets and weights by feature, in the order of the names.

    Raises:
        BadOption: other features than those, or a value of another kind.
        WrongShape: offsets or weights that fit no ids.
    """
    given = features if isinstance(features, Mapping) else _split(features, without_last_offset)
    if set(given) != set(names):
        missing, unknown = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise BadOption(f"EmbeddingCollection needs exactly its features {list(names)}; missing: {missing}, unknown: {unknown}")
    return {feature: _as_jagged(feature, given[feature]) for feature in names}


def _split(features: KeyedJagged, without_last_offset: Collection[str]) -> dict[str, Feature]:
    """Takes an object with all features apart; its offsets end with the number of ids, a bag's may not."""
    if not isinstance(features, KeyedJagged):
        raise BadOption(
            "EmbeddingCollection takes a dict of features to ids, or an object with keys(), values(), offsets() and "
            f"weights_or_none(), got {type(features).__name__}"
        )
    keys, values, offsets, weights = features.keys(), features.values(), features.offsets(), features.weights_or_none()
    if not keys or (offsets.numel() - 1) % len(keys):
        raise WrongShape(
            f"EmbeddingCollection: {offsets.numel()} offsets cannot be one more than a multiple of {len(keys)} features"
        )
    batch_size = (offsets.numel() - 1) // len(keys)
    ends = checked_offsets(offsets, values.numel(), "EmbeddingCollection").tolist()
    if not ends or ends[-1] != values.numel():
        raise WrongShape(f"EmbeddingCollection: the last offset must be the number of ids, {values.numel()}; got {ends[-1:]}")
    if weights is not None and weights.shape != values.shape:
        raise WrongShape(
            f"EmbeddingCollection: weights have shape {tuple(weights.shape)} and values have shape {tuple(values.shape)}"
        )
    split: dict[str, Feature] = {}
    for index, feature in enumerate(keys):
        bags = offsets[index * batch_size : (index + 1) * batch_size + 1]
        start, end = ends[index * batch_size], ends[(index + 1) * batch_size]
        bags = bags - start
        if feature in without_last_offset:
            bags = bags[:-1]
        split[feature] = (values[start:end], bags) if weights is None else (values[start:end], bags, weights[start:end])
    return split


def _as_jagged(feature: str, given: Feature) -> Jagged:
    """Returns ids, offsets and weights."""
    if not isinstance(given, tuple):
        return given, None, None
    if len(given) == 2:
        return given[0], given[1], None
    if len(given) == 3:
        return given
    raise BadOption(
        f"EmbeddingCollection: feature {feature!r} must be ids, (ids, offsets) or (ids, offsets, weights), got a tuple of "
        f"{len(given)}"
    )
