"""A table's initializer as kernels take it."""

from __future__ import annotations

from shardam_kernels import initializers
from shardam_kernels.factors import OptionError
from shardam_proto.errors import BadOption
from shardam_proto.schema import Constant, Normal, TableSpec, Uniform, XavierNormal, XavierUniform


def fold_initializer(spec: TableSpec) -> initializers.FoldedInit:
    """Returns a table's initializer as kernels take it.

    Raises:
        BadOption: it does not fit float32.
    """
    try:
        return _fold(spec)
    except OptionError as error:
        raise BadOption(f"table {spec.name!r}: {error}", metadata={"table": spec.name}) from error


def _fold(spec: TableSpec) -> initializers.FoldedInit:
    match spec.init:
        case Normal(mean, std):
            return initializers.fold_normal(mean, std)
        case Uniform(low, high):
            return initializers.fold_uniform(low, high)
        case Constant(value):
            return initializers.fold_constant(value)
        case XavierUniform():
            bound = initializers.xavier_uniform_bound(_bound(spec), spec.dim)
            return initializers.fold_uniform(-bound, bound)
        case XavierNormal():
            return initializers.fold_normal(0.0, initializers.xavier_normal_std(_bound(spec), spec.dim))


def _bound(spec: TableSpec) -> int:
    if spec.num_embeddings is None:
        raise BadOption(f"table {spec.name!r}: a xavier initializer needs num_embeddings")
    return spec.num_embeddings
