"""A gradient checked whole before its first byte leaves: options, ids, shapes, and the refusal rule of CONTRACT.md."""

from __future__ import annotations

import numpy as np

from shardam._arrays import Float32s, Int64s, Values, as_flat_row_ids, as_rows, check_bounds, check_rows_shape, dtype_name, some
from shardam._parts import TableStepGradient
from shardam._values import TableInfo
from shardam_kernels.factors import AdamOptions, OptionError, check_grad_scale, factors
from shardam_kernels.native import is_merged, merge_gradients
from shardam_proto.errors import BadOption, NonFiniteGradient, WrongShape

_SPARSE_REMEDY = (
    "a push names the rows it changes: row_ids of shape [N] and one gradient row for each, gradients of shape [N, dim]. For a "
    "gradient of torch.nn.Embedding make the module with sparse=True and hand in grad._indices()[0] and grad._values()"
)


def check_options(options: AdamOptions, grad_scale: float, table: str) -> None:
    """Refuses hyper-parameters that no push may carry.

    Raises:
        BadOption: a value is out of range, or options is no AdamOptions.
    """
    if not isinstance(options, AdamOptions):
        raise BadOption(f"table {table!r}: options must be shardam.AdamOptions(lr=...), got {options!r}")
    try:
        options.check()
        check_grad_scale(grad_scale)
    except OptionError as error:
        raise BadOption(f"table {table!r}: {error}", metadata={"table": table}) from error


def as_gradient(info: TableInfo, row_ids: Values, gradients: Values) -> tuple[Int64s, Float32s]:
    """Returns ids [N] and gradients [N, dim] as handed to Table.push.

    Raises:
        WrongIdDtype, WrongShape, BadOption, IdOutOfRange: what does not fit the table.
    """
    spec = info.spec
    full_shape = None if spec.num_embeddings is None else (spec.num_embeddings, spec.dim)
    if getattr(row_ids, "ndim", 1) == 2 and dtype_name(row_ids).startswith(("float", "bfloat")):
        raise WrongShape(f"table {info.name!r}: row_ids is a matrix of {dtype_name(row_ids)}, not ids; {_SPARSE_REMEDY}")
    ids = as_flat_row_ids(row_ids)
    rows = as_rows(gradients, "gradients")
    if rows.shape == full_shape and ids.size != rows.shape[0]:
        raise WrongShape(
            f"table {info.name!r}: row_ids has shape {ids.shape} and gradients has shape {rows.shape}, the dense gradient of "
            f"the whole table; {_SPARSE_REMEDY}"
        )
    rows = check_rows_shape(ids, rows, spec.dim, "gradients")
    check_bounds(ids, spec.num_embeddings, info.name)
    return ids, rows


def merged_gradient(
    info: TableInfo, row_ids: Int64s, gradients: Float32s, options: AdamOptions, grad_scale: float, *, finite: bool = True
) -> TableStepGradient:
    """Sums each id's gradients, left to right in float32 as the shard would, and checks the sums.

    The sums leave as they are: the shard unscales. A gradient that names each id once is its own sum, and is not copied.

    Args:
        info: the table.
        row_ids: int64 [N].
        gradients: float32 [N, dim].
        options: checked hyper-parameters.
        grad_scale: checked loss scale.
        finite: refuse a sum that a shard would refuse. False: the shards shall refuse it, and so the step of all ranks.

    Raises:
        NonFiniteGradient: a merged, unscaled value is NaN or at least 2**64 in magnitude; the message has up to 8 ids.
    """
    if is_merged(row_ids, gradients, float(np.float32(1.0 / grad_scale))):
        return TableStepGradient(info.name, info.table_id, row_ids, gradients, options, grad_scale)
    merged = merge_gradients(row_ids, gradients, factors(options, 1))
    bad_rows = merged.bad_rows
    if finite and grad_scale != 1.0:
        bad_rows = merge_gradients(row_ids, gradients, factors(options, 1, grad_scale=grad_scale)).bad_rows
    if finite and bad_rows.size:
        bad_ids = some(merged.row_ids[bad_rows])
        raise NonFiniteGradient(
            f"table {info.name!r}: the summed gradient of ids {bad_ids} is NaN, infinite or at least 2**64; nothing was sent "
            "and nothing changed. Check the loss, lower the learning rate or clip",
            metadata={"table": info.name, "row_ids": bad_ids},
        )
    return TableStepGradient(info.name, info.table_id, merged.row_ids, merged.gradients, options, grad_scale)
