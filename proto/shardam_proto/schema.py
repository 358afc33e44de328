"""Table schemas and initializers as values, their rules, and their protobuf form; shared by client, shard and admin.

Knows nothing of processes, devices or arrays.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Literal

from shardam_proto.errors import BadOption
from shardam_proto.v1 import common_pb2

NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
"""Alphabet of table and cluster names: safe in file names, URLs and Redis keys."""

MAX_DIM = 65_536
"""A record of this dim is 768 KiB; larger rows are no embeddings."""

INT64_MAX = 2**63 - 1

DtypeName = Literal["float32", "bfloat16", "float16"]
StepModeName = Literal["table", "row"]

_DTYPES: dict[DtypeName, common_pb2.Dtype.ValueType] = {
    "float32": common_pb2.DTYPE_FLOAT32,
    "bfloat16": common_pb2.DTYPE_BFLOAT16,
    "float16": common_pb2.DTYPE_FLOAT16,
}
_STEP_MODES: dict[StepModeName, common_pb2.StepMode.ValueType] = {
    "table": common_pb2.STEP_MODE_TABLE,
    "row": common_pb2.STEP_MODE_ROW,
}
_DTYPE_NAMES = {value: name for name, value in _DTYPES.items()}
_STEP_MODE_NAMES = {value: name for name, value in _STEP_MODES.items()}


def _require_finite(what: str, **values: float) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise BadOption(f"{what}: {name} must be a finite number, got {value!r}", metadata={name: repr(value)})


@dataclasses.dataclass(frozen=True)
class Normal:
    """Normally distributed initial weights; torch.nn.Embedding's default with mean 0 and std 1."""

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _require_finite("Normal", mean=self.mean, std=self.std)
        if self.std < 0:
            raise BadOption(f"Normal: std must be >= 0, got {self.std}", metadata={"std": repr(self.std)})


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Uniformly distributed initial weights over [low, high)."""

    low: float
    high: float

    def __post_init__(self) -> None:
        _require_finite("Uniform", low=self.low, high=self.high)
        if self.high < self.low:
            raise BadOption(f"Uniform: high must be >= low, got low={self.low}, high={self.high}")


@dataclasses.dataclass(frozen=True)
class Constant:
    """One initial weight for all elements."""

    value: float

    def __post_init__(self) -> None:
        _require_finite("Constant", value=self.value)


@dataclasses.dataclass(frozen=True)
class XavierUniform:
    """torch.nn.init.xavier_uniform_ (gain 1) over a bounded table: bound sqrt(6 / (num_embeddings + dim))."""


@dataclasses.dataclass(frozen=True)
class XavierNormal:
    """torch.nn.init.xavier_normal_ (gain 1) over a bounded table: std sqrt(2 / (num_embeddings + dim))."""


Initializer = Normal | Uniform | Constant | XavierUniform | XavierNormal


def check_name(name: str, what: str = "table name") -> str:
    """Returns the name, or raises BadOption if it is outside the alphabet."""
    if not isinstance(name, str) or not NAME_PATTERN.fullmatch(name):
        raise BadOption(
            f"{what} {name!r} is not allowed: use 1 to 128 characters of A-Z a-z 0-9 _ . - and do not start with . or -",
            metadata={"name": str(name)},
        )
    return name


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class TableSpec:
    """The schema of a table.

    Args:
        name: 1 to 128 characters of A-Z a-z 0-9 _ . -
        dim: elements of a row, 1 to 65,536.
        dtype: stored dtype of the weights; moments are float32.
        init: weights of a row before its first push.
        num_embeddings: a bounded table has ids 0 .. num_embeddings - 1; None: any int64.
        padding_idx: row that starts at zero and is never written by a push; negative counts from the end of a bounded table.
        optimizer: "sparse_adam".
        step: "table": one step count per table, as torch; "row": one per row.
        max_rows_per_shard: rows the table may hold on one shard; 0: no limit but the shard's own.

    Raises:
        BadOption: a value is outside these rules.
    """

    name: str
    dim: int
    dtype: DtypeName = "float32"
    init: Initializer = dataclasses.field(default_factory=Normal)
    num_embeddings: int | None = None
    padding_idx: int | None = None
    optimizer: str = "sparse_adam"
    step: StepModeName = "table"
    max_rows_per_shard: int = 0

    def __post_init__(self) -> None:
        check_name(self.name)
        self._check_sizes()
        self._check_padding()
        if self.dtype not in _DTYPES:
            raise BadOption(f"table {self.name!r}: dtype must be one of {sorted(_DTYPES)}, got {self.dtype!r}")
        if self.step not in _STEP_MODES:
            raise BadOption(f"table {self.name!r}: step must be 'table' or 'row', got {self.step!r}")
        if self.optimizer != "sparse_adam":
            raise BadOption(f"table {self.name!r}: optimizer must be 'sparse_adam', got {self.optimizer!r}")
        if not isinstance(self.init, Initializer):
            raise BadOption(
                f"table {self.name!r}: init must be a shardam.init value such as Normal(0, 0.05), got {self.init!r}"
            )
        if isinstance(self.init, (XavierUniform, XavierNormal)) and self.num_embeddings is None:
            raise BadOption(
                f"table {self.name!r}: {type(self.init).__name__} needs num_embeddings; use Normal or Uniform instead"
            )

    def _check_sizes(self) -> None:
        if not _is_int(self.dim) or not 1 <= self.dim <= MAX_DIM:
            raise BadOption(f"table {self.name!r}: dim must be an integer from 1 to {MAX_DIM}, got {self.dim!r}")
        bound = self.num_embeddings
        if bound is not None and (not _is_int(bound) or not 1 <= bound <= INT64_MAX):
            raise BadOption(f"table {self.name!r}: num_embeddings must be an integer >= 1 or None, got {bound!r}")
        if not _is_int(self.max_rows_per_shard) or self.max_rows_per_shard < 0:
            raise BadOption(f"table {self.name!r}: max_rows_per_shard must be an integer >= 0, got {self.max_rows_per_shard!r}")

    def _check_padding(self) -> None:
        padding, bound = self.padding_idx, self.num_embeddings
        if padding is None:
            return
        if not _is_int(padding) or not -(2**63) <= padding <= INT64_MAX:
            raise BadOption(f"table {self.name!r}: padding_idx must be an int64 or None, got {padding!r}")
        if bound is None:
            return
        if not -bound <= padding < bound:
            raise BadOption(f"table {self.name!r}: padding_idx {padding} lies outside num_embeddings {bound}")
        if padding < 0:
            object.__setattr__(self, "padding_idx", padding + bound)

    def to_proto(self) -> common_pb2.TableSpec:
        """Returns the protobuf form."""
        message = common_pb2.TableSpec(
            name=self.name,
            dim=self.dim,
            dtype=_DTYPES[self.dtype],
            num_embeddings=self.num_embeddings,
            padding_idx=self.padding_idx,
            optimizer=self.optimizer,
            step_mode=_STEP_MODES[self.step],
            max_rows_per_shard=self.max_rows_per_shard,
        )
        match self.init:
            case Normal(mean, std):
                message.normal.CopyFrom(common_pb2.NormalInit(mean=mean, std=std))
            case Uniform(low, high):
                message.uniform.CopyFrom(common_pb2.UniformInit(low=low, high=high))
            case Constant(value):
                message.constant.CopyFrom(common_pb2.ConstantInit(value=value))
            case XavierUniform():
                message.xavier_uniform.CopyFrom(common_pb2.XavierUniformInit())
            case XavierNormal():
                message.xavier_normal.CopyFrom(common_pb2.XavierNormalInit())
        return message

    @classmethod
    def from_proto(cls, message: common_pb2.TableSpec) -> TableSpec:
        """Checks and converts the protobuf form.

        Raises:
            BadOption: a field is missing, unknown or out of range.
        """
        dtype = _DTYPE_NAMES.get(message.dtype)
        step = _STEP_MODE_NAMES.get(message.step_mode)
        if dtype is None:
            raise BadOption(f"table {message.name!r}: unknown dtype {message.dtype}")
        if step is None:
            raise BadOption(f"table {message.name!r}: unknown step mode {message.step_mode}")
        return cls(
            name=message.name,
            dim=message.dim,
            dtype=dtype,
            init=_init_from_proto(message),
            num_embeddings=message.num_embeddings if message.HasField("num_embeddings") else None,
            padding_idx=message.padding_idx if message.HasField("padding_idx") else None,
            optimizer=message.optimizer,
            step=step,
            max_rows_per_shard=message.max_rows_per_shard,
        )


def _init_from_proto(message: common_pb2.TableSpec) -> Initializer:
    match message.WhichOneof("init"):
        case "normal":
            return Normal(message.normal.mean, message.normal.std)
        case "uniform":
            return Uniform(message.uniform.low, message.uniform.high)
        case "constant":
            return Constant(message.constant.value)
        case "xavier_uniform":
            return XavierUniform()
        case "xavier_normal":
            return XavierNormal()
        case other:
            raise BadOption(f"table {message.name!r}: the schema names no initializer this version knows ({other})")
