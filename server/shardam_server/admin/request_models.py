"""The shapes of request bodies: what is checked on the way in, and what OpenAPI shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from shardam_proto.schema import (
    Constant,
    DtypeName,
    Initializer,
    Normal,
    StepModeName,
    TableSpec,
    Uniform,
    XavierNormal,
    XavierUniform,
)
from shardam_server.admin.row_ids import parse_row_ids

MAX_TABLES = 1000
"""Tables that one batchGet may name: each is a call to every shard that owns one of its ids."""

MissingRule = Literal["init", "zero", "error"]
MissingField = Annotated[
    MissingRule,
    Field(
        description="a row that does not exist is answered with the weight that training would see (init), with zeros (zero), "
        "or fails the request (error)"
    ),
]
IncludeField = Annotated[Literal["optimizer"] | None, Field(description="optimizer: with exp_avg, exp_avg_sq and step")]

RowIds = Annotated[
    list[object],
    WithJsonSchema(
        {
            "type": "array",
            "items": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "description": "ids as decimal int64 strings; JSON integers are taken up to 2**53 in magnitude",
            "examples": [["1", "-1", "9007199254740993"]],
        }
    ),
]

FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is neither NaN nor infinite, as 1e999 would be."""

_SPELLED = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def _unspell(value: object) -> object:
    """Reads the strings that answers spell non-finite numbers with, so that the refusal is that of the value."""
    return _SPELLED.get(value, value) if isinstance(value, str) else value


StateFloat = Annotated[float, BeforeValidator(_unspell), WithJsonSchema({"type": "number"})]
"""An element of a row's state as sent; whether it is finite is checked with the table's rules (row_writes.py)."""


_UNKNOWN_MEMBER = "unknown_member"


def _unknown_member(context: Mapping[str, object]) -> PydanticCustomError:
    return PydanticCustomError(_UNKNOWN_MEMBER, "is unknown; known are {known}", dict(context))


class RequestModel(BaseModel):
    """A request body: an unknown member is an error that lists the known ones, and nothing is converted ("16" is no int)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="wrap")
    @classmethod
    def _list_known_members(cls, value: object, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(value)
        except ValidationError as error:
            details = [cls._explain(found) for found in error.errors()]
            raise ValidationError.from_exception_data(error.title, details) from None

    @classmethod
    def _explain(cls, found: ErrorDetails) -> InitErrorDetails:
        kind: str | PydanticCustomError = found["type"]
        if kind == "extra_forbidden":
            kind = _unknown_member({"known": ", ".join(cls.model_fields)})
        elif kind == _UNKNOWN_MEMBER:  # a nested model has explained its own
            kind = _unknown_member(found["ctx"])
        return InitErrorDetails(type=kind, loc=found["loc"], input=found["input"], ctx=found.get("ctx", {}))


class NormalModel(RequestModel):
    """Normally distributed initial weights."""

    kind: Literal["normal"]
    mean: FiniteFloat = 0.0
    std: Annotated[FiniteFloat, Field(ge=0)] = 1.0


class UniformModel(RequestModel):
    """Uniformly distributed initial weights over [low, high)."""

    kind: Literal["uniform"]
    low: FiniteFloat
    high: FiniteFloat


class ConstantModel(RequestModel):
    """One initial weight for all elements."""

    kind: Literal["constant"]
    value: FiniteFloat


class XavierUniformModel(RequestModel):
    """torch.nn.init.xavier_uniform_ over a bounded table."""

    kind: Literal["xavier_uniform"]


class XavierNormalModel(RequestModel):
    """torch.nn.init.xavier_normal_ over a bounded table."""

    kind: Literal["xavier_normal"]


InitModel = Annotated[
    NormalModel | UniformModel | ConstantModel | XavierUniformModel | XavierNormalModel, Field(discriminator="kind")
]


class TableSpecModel(RequestModel):
    """The schema of a table; hyper-parameters such as lr and betas are no part of it, they travel with every push."""

    name: str = Field(description="1 to 128 of A-Z a-z 0-9 _ . - and neither . nor - first")
    dim: int = Field(description="elements of a row, 1 to 65,536")
    dtype: DtypeName = Field("float32", description="stored dtype of the weights; moments are float32")
    init: InitModel = Field(NormalModel(kind="normal"), description="weights of a row before its first push")
    num_embeddings: int | None = Field(None, description="bounded table: ids are 0 .. num_embeddings - 1; null: any int64")
    padding_idx: str | int | None = Field(None, description="row that starts at zero and is never written by a push; an id")
    optimizer: str = Field("sparse_adam", description="optimizer kind")
    step: StepModeName = Field("table", description="one step count per table, as torch, or one per row")
    max_rows_per_shard: int = Field(0, description="rows the table may hold on one shard; 0: no limit but the shard's own")

    def to_spec(self) -> TableSpec:
        """Returns the checked schema.

        Raises:
            BadOption: a value is outside the rules of a schema.
            WrongIdDtype: padding_idx is no id.
        """
        padding = None if self.padding_idx is None else int(parse_row_ids([self.padding_idx], 1)[0])
        return TableSpec(
            name=self.name,
            dim=self.dim,
            dtype=self.dtype,
            init=_to_initializer(self.init),
            num_embeddings=self.num_embeddings,
            padding_idx=padding,
            optimizer=self.optimizer,
            step=self.step,
            max_rows_per_shard=self.max_rows_per_shard,
        )


def _to_initializer(model: InitModel) -> Initializer:
    match model:
        case NormalModel(mean=mean, std=std):
            return Normal(mean, std)
        case UniformModel(low=low, high=high):
            return Uniform(low, high)
        case ConstantModel(value=value):
            return Constant(value)
        case XavierUniformModel():
            return XavierUniform()
        case XavierNormalModel():
            return XavierNormal()


class BatchGetRequest(RequestModel):
    """Rows to be read by id."""

    ids: RowIds
    missing: MissingField = "init"
    include: IncludeField = None


class TableIdsModel(RequestModel):
    """Rows of one table."""

    table: str = Field(description="the table's name")
    ids: RowIds


class ManyTablesRequest(RequestModel):
    """Rows of several tables to be read by id."""

    tables: list[TableIdsModel] = Field(
        min_length=1, max_length=MAX_TABLES, description="each table once; the limit of ids is that of all tables together"
    )
    missing: MissingField = "init"
    include: IncludeField = None


MomentField = Annotated[
    list[StateFloat] | None,
    Field(description="null: an old row keeps its own, a new one gets zero; exp_avg_sq is not negative"),
]


class OptimizerStateModel(RequestModel):
    """SparseAdam's moments of a row; its step is the table's and cannot be set."""

    exp_avg: MomentField = None
    exp_avg_sq: MomentField = None


class PutRowRequest(RequestModel):
    """What a row shall hold; numbers are rounded to float32."""

    weight: list[StateFloat] = Field(description="one finite number per element")
    optimizer: OptimizerStateModel | None = Field(None, description="null: an old row keeps its moments, a new one gets zero")
