"""Many features in one lookup: one message to each shard per forward, whatever the number of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from shardam._arrays import Values
from shardam._lookup import look_up
from shardam._module import Parameterless, TableModule
from shardam._uses import Use, checked_offsets
from shardam.embedding import Embedding
from shardam.embedding_bag import EmbeddingBag
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


class EmbeddingCollection(Parameterless):
    """Looks up all features of a batch at once: one set of distinct ids per table, one message per shard.

    Features may share a module or a table. Hand the collection to SparseAdam as a whole; it has no parameters, as its modules
    have none.

    Args:
        modules: Embedding and EmbeddingBag modules by feature.

    Raises:
        BadOption: no features, or a value that is no such module.
    """

    def __init__(self, modules: Mapping[str, Embedding | EmbeddingBag]) -> None:
        super().__init__()
        if not isinstance(modules, Mapping) or not modules:
            raise BadOption(f"EmbeddingCollection takes a dict of features to modules, at least one, got {modules!r}")
        for feature, module in modules.items():
            if not isinstance(feature, str) or not isinstance(module, (Embedding, EmbeddingBag)):
                raise BadOption(
                    f"EmbeddingCollection: feature {feature!r} must be a string with a shardam.Embedding or EmbeddingBag, got "
                    f"{type(module).__name__}"
                )
        distinct = list(dict.fromkeys(modules.values()))
        self.distinct_modules = nn.ModuleList(distinct)
        self._index_of = {feature: distinct.index(module) for feature, module in modules.items()}

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the features, in the order given."""
        return tuple(self._index_of)

    def __getitem__(self, feature: str) -> TableModule:
        """Returns a feature's module."""
        module = self.distinct_modules[self._index_of[feature]]
        if not isinstance(module, TableModule):
            raise AssertionError("the constructor takes no other modules")
        return module

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch has no types here
    def forward(self, features: Mapping[str, Feature] | KeyedJagged) -> dict[str, Output]:
        """Pulls the rows of all features.

        Args:
            features: for each feature of the collection its ids, of any shape for an Embedding, [B, L] for an EmbeddingBag; or
                a tuple of ids [N] and offsets, as EmbeddingBag takes them (its include_last_offset counts), with a weight for
                each id if the bag's mode is "sum". Or one object with all of them, such as a KeyedJaggedTensor.

        Returns:
            By feature: [*, D] for ids [*] of an Embedding; (rows [N, D], offsets) for its ids with offsets; [B, D] for a bag.

        Raises:
            BadOption: the features are not those of the collection, or one has weights that its module cannot take; else as
                Embedding.
            WrongShape: as EmbeddingBag.
            WrongIdDtype, IdOutOfRange, ShardUnreachable, ShardLost: as Embedding.
        """
        given = features if isinstance(features, Mapping) else self._split(features)
        if set(given) != set(self._index_of):
            missing, unknown = sorted(set(self._index_of) - set(given)), sorted(set(given) - set(self._index_of))
            raise BadOption(
                f"EmbeddingCollection needs exactly its features {list(self._index_of)}; missing: {missing}, unknown: {unknown}"
            )
        jagged = {feature: _as_jagged(feature, given[feature]) for feature in self._index_of}
        outputs = look_up([self._use(feature, *parts) for feature, parts in jagged.items()])
        return {
            feature: (output, torch.as_tensor(offsets))
            if offsets is not None and isinstance(self[feature], Embedding)
            else output
            for (feature, (_, offsets, _)), output in zip(jagged.items(), outputs, strict=True)
        }

    def _use(self, feature: str, row_ids: Ids, offsets: Ids | None, weights: torch.Tensor | None) -> Use:
        module = self[feature]
        if isinstance(module, EmbeddingBag):
            return module._use(row_ids, offsets, weights)
        if not isinstance(module, Embedding):
            raise AssertionError("the constructor takes no other modules")
        if weights is not None:
            raise BadOption(
                f"EmbeddingCollection: feature {feature!r} has weights, and its module is an Embedding, which sums nothing; "
                "use shardam.EmbeddingBag(..., mode='sum'), or leave them out"
            )
        use = module._use(row_ids)
        if offsets is not None:
            checked_offsets(offsets, use.row_ids.size, f"EmbeddingCollection: feature {feature!r}")
        return use

    def _split(self, features: KeyedJagged) -> dict[str, Feature]:
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
            raise WrongShape(
                f"EmbeddingCollection: the last offset must be the number of ids, {values.numel()}; got {ends[-1:]}"
            )
        if weights is not None and weights.shape != values.shape:
            raise WrongShape(
                f"EmbeddingCollection: weights have shape {tuple(weights.shape)} and values have shape {tuple(values.shape)}"
            )
        split: dict[str, Feature] = {}
        for index, feature in enumerate(keys):
            bags = offsets[index * batch_size : (index + 1) * batch_size + 1]
            start, end = ends[index * batch_size], ends[(index + 1) * batch_size]
            bags = bags - start
            if (
                feature in self._index_of
                and isinstance(module := self[feature], EmbeddingBag)
                and not module.include_last_offset
            ):
                bags = bags[:-1]
            split[feature] = (values[start:end], bags) if weights is None else (values[start:end], bags, weights[start:end])
        return split

    def _who(self) -> str:
        return f"EmbeddingCollection of {list(self._index_of)}"

    def _table_modules(self) -> list[TableModule]:
        return [self[feature] for feature in self._index_of]

    def extra_repr(self) -> str:
        """Lists the features with their module's number."""
        return ", ".join(f"{feature!r}: {index}" for feature, index in self._index_of.items())


def _as_jagged(feature: str, given: Feature) -> tuple[Ids, Ids | None, torch.Tensor | None]:
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
