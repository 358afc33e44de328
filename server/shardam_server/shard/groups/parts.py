"""Parts of a sync group's step: each summed by row on its own, then over the ranks (CONTRACT.md, Arithmetic).

Pure: knows tables' schemas, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from shardam_kernels import native
from shardam_kernels.factors import OptionError, factors
from shardam_kernels.gradients import GRADIENT_LIMIT
from shardam_proto.errors import BadOption
from shardam_server.shard.groups.entries import MergedGradient, StagedPart
from shardam_server.shard.groups.values import Decision, GroupTerms
from shardam_server.shard.table import GradientSection, RecordedStep, Table

SURE_LIMIT = 2.0**63
"""Peaks of one table that add up to less cannot make a merged gradient that is refused, rounding included."""


def merge_section(section: GradientSection) -> MergedGradient:
    """Sums one section of a part by row, in the order of the push, and checks it.

    Raises:
        IdOutOfRange: an id lies outside a bounded table.
        BadOption: a hyper-parameter is out of range.
        NonFiniteGradient: a sum, unscaled, is NaN or at least 2**64 in magnitude.
    """
    table = section.table
    table.check_ids(section.row_ids)
    try:
        unscale = np.float32(factors(section.options, 1, grad_scale=section.grad_scale).unscale)
        plain = factors(section.options, 1)
    except OptionError as error:
        raise BadOption(f"table {table.spec.name!r}: {error}", metadata={"table": table.spec.name}) from error
    merged = native.merge_gradients(*table.without_padding(section.row_ids, section.gradients), plain)
    with np.errstate(over="ignore", invalid="ignore"):
        magnitudes = np.abs(merged.gradients).max(axis=1, initial=0) * unscale
    bad = ~(magnitudes < GRADIENT_LIMIT)
    if bad.any():
        raise table.refuse_gradients(merged.row_ids[bad])
    peak = float(magnitudes.max(initial=0))
    num_new = table.count_new(merged.row_ids)
    return MergedGradient(merged.row_ids, merged.gradients, section.options, section.grad_scale, peak, num_new)


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
                np.concatenate([gradient.row_ids for gradient in gradients]),
                np.concatenate([gradient.gradients for gradient in gradients]),
                gradients[0].options,
                gradients[0].grad_scale,
                num_contributions if terms.reduce == "mean" else 1,
                None if recorded is None else recorded.get(table_id),
            )
        )
    return sections
