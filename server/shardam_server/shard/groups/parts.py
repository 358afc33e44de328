"""Parts of a sync group's step: each summed by row on its own, then over the ranks (CONTRACT.md, Arithmetic).

Pure: knows tables' schemas, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardam_kernels import native
from shardam_kernels.factors import AdamOptions, OptionError, factors
from shardam_kernels.gradients import ACCEPT_LIMIT, GRADIENT_LIMIT
from shardam_proto.errors import BadOption
from shardam_server.shard.groups.entries import MergedGradient, StagedPart
from shardam_server.shard.groups.values import Decision, GroupTerms
from shardam_server.shard.records import Float32s, Int64s
from shardam_server.shard.table import GradientSection, RecordedStep, Table

SURE_LIMIT = ACCEPT_LIMIT
"""Peaks of one table that add up to less cannot make a merged gradient that is refused, rounding included: a group has fewer
ranks than sums may have terms by that rule (2**22), since a shard keeps far fewer clients."""

PLAIN = factors(AdamOptions(), 1)
"""Neither unscales nor divides: that comes after the sum over the ranks."""


def merge_section(section: GradientSection, num_threads: int = 1) -> MergedGradient:
    """Sums one section of a part by row, in the order of the push, and checks it.

    Raises:
        ReadOnly: the table takes no changes.
        IdOutOfRange: an id lies outside a bounded table.
        BadOption: a hyper-parameter is out of range.
        NonFiniteGradient: a sum, unscaled, is NaN or at least 2**64 in magnitude.
    """
    table = section.table
    table.check_writable()
    table.check_ids(section.row_ids)
    try:
        unscale = np.float32(factors(section.options, 1, grad_scale=section.grad_scale).unscale)
    except OptionError as error:
        raise BadOption(f"table {table.spec.name!r}: {error}", metadata={"table": table.spec.name}) from error
    merged = native.merge_gradients(*table.without_padding(section.row_ids, section.gradients), PLAIN, num_threads)
    peak = _magnitude(merged.gradients)
    if not _unscaled(peak, unscale) < GRADIENT_LIMIT:
        bad = [not _unscaled(_magnitude(gradient), unscale) < GRADIENT_LIMIT for gradient in merged.gradients]
        raise table.refuse_gradients(merged.row_ids[bad])
    return MergedGradient(
        table.spec.name,
        merged.row_ids,
        merged.gradients,
        section.options,
        section.grad_scale,
        float(peak) * max(1.0, float(unscale)),
    )


def _magnitude(gradients: Float32s) -> np.float32:
    """Returns the largest magnitude, without a copy of the gradients; NaN if one is."""
    zero = np.float32(0)
    return np.float32(np.maximum(gradients.max(initial=zero), -gradients.min(initial=zero)))


def _unscaled(magnitude: np.float32, unscale: np.float32) -> np.float32:
    with np.errstate(over="ignore", invalid="ignore"):
        return magnitude * unscale


def counted_parts(decision: Decision, parts: Mapping[bytes, StagedPart]) -> list[StagedPart]:
    """Returns the parts with gradients of a step that is to be applied, in rank order.

    Args:
        decision: the step.
        parts: client id -> staged part.

    Raises:
        LookupError: one is not here.
    """
    counted = []
    for one in decision.contributions:
        part = parts.get(one.client_id)
        if part is None or part.origin.number != one.number or part.step != decision.step:
            raise LookupError(f"the part of rank {one.rank} (client {one.client_id.hex()}, number {one.number}) is not here")
        if part.kind == "gradient":
            counted.append(part)
    return counted


def merged_sections(
    terms: GroupTerms,
    num_contributions: int,
    parts: Sequence[StagedPart],
    tables: Mapping[int, Table],
    recorded: Mapping[int, RecordedStep] | None = None,
) -> list[GradientSection]:
    """Merges parts by table, as one push of the group: by ascending table id, rows of a table in rank order.

    A row that several ranks name is in a section several times; what sums it left to right therefore adds the ranks' sums in
    rank order.

    Args:
        terms: of the group.
        num_contributions: K, which divides a mean.
        parts: with gradients, in rank order.
        tables: the tables that they name, by id.
        recorded: of a step that is replayed: table id -> the step it was.
    """
    sections = []
    for table_id in sorted({table_id for part in parts for table_id in part.tables}):
        gradients = [part.tables[table_id] for part in parts if table_id in part.tables]
        sections.append(
            GradientSection(
                tables[table_id],
                *_joined(gradients),
                gradients[0].options,
                gradients[0].grad_scale,
                num_contributions if terms.reduce == "mean" else 1,
                None if recorded is None else recorded.get(table_id),
            )
        )
    return sections


def _joined(gradients: Sequence[MergedGradient]) -> tuple[Int64s, Float32s]:
    """Returns the ids and gradients of ranks one behind the other; those of a single rank as they are."""
    if len(gradients) == 1:
        return gradients[0].row_ids, gradients[0].gradients
    return np.concatenate([one.row_ids for one in gradients]), np.concatenate([one.gradients for one in gradients])
