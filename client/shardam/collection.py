"""Many features in one lookup: one message to each shard per forward, whatever the number of tables."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardam._features import Feature, Ids, Jagged, KeyedJagged, Output, jagged_features
from shardam._lookup import look_up
from shardam._module import Parameterless, TableModule
from shardam._uses import Use, checked_offsets
from shardam.embedding import Embedding
from shardam.embedding_bag import EmbeddingBag
from shardam_proto.errors import BadOption


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
        jagged = self._jagged(features)
        outputs = look_up([self._use(feature, *parts) for feature, parts in jagged.items()])
        return {
            feature: (output, torch.as_tensor(offsets))
            if offsets is not None and isinstance(self[feature], Embedding)
            else output
            for (feature, (_, offsets, _)), output in zip(jagged.items(), outputs, strict=True)
        }

    def _jagged(self, features: Mapping[str, Feature] | KeyedJagged) -> dict[str, Jagged]:
        return jagged_features(features, self._index_of, self._ends_without_last_offset())

    def _uses(self, features: Mapping[str, Feature] | KeyedJagged) -> list[Use]:
        """Returns what a forward looks up."""
        return [self._use(feature, *parts) for feature, parts in self._jagged(features).items()]

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

    def _ends_without_last_offset(self) -> list[str]:
        """Returns the features whose bags' offsets do not end with the number of ids."""
        return [
            feature
            for feature in self._index_of
            if isinstance(module := self[feature], EmbeddingBag) and not module.include_last_offset
        ]

    def _who(self) -> str:
        return f"EmbeddingCollection of {list(self._index_of)}"

    def _table_modules(self) -> list[TableModule]:
        return [self[feature] for feature in self._index_of]

    def extra_repr(self) -> str:
        """Lists the features with their module's number."""
        return ", ".join(f"{feature!r}: {index}" for feature, index in self._index_of.items())
