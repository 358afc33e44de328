"""SparseAdam's step on a GPU: the sum of each row's run of gradients and the update, in one pass over the record.

A program works on ROWS rows times BLOCK columns. Each element is one chain of float32 operations, each rounded by itself, in
the order of CONTRACT.md; nothing is added across threads, so neither the tile nor the grid changes a bit. The columns of a row
with a long run are spread over programs; its gradients are added in order in each (tiles.py).

Source: torch.optim.SparseAdam (eps beside the raw square root); decay as torch.optim.Adam and AdamW.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shardam_kernels.triton.weights import (
    FLOAT32,
    LARGEST_FLOAT32,
    clamp,
    element_hashes,
    is_beyond,
    narrow_bits,
    round_stochastically,
    widen,
)

NO_DECAY = tl.constexpr(0)
COUPLED = tl.constexpr(1)
DECOUPLED = tl.constexpr(2)

_DECAYED_GRADIENT_LIMIT = tl.constexpr(18446742974197923840.0)  # 2**64 - 2**40


@triton.jit
def sum_run(gradients, starts, rows, is_row, last, columns, mask, DIM: tl.constexpr, UNROLL: tl.constexpr):
    """Returns each row's sum of its gradients, float32 [ROWS, BLOCK]: left to right, from the first one.

    Rows are in ascending order of the length of their runs; `last` is the program's last row.
    """
    start = tl.load(starts + rows, mask=is_row, other=0)
    length = tl.load(starts + rows + 1, mask=is_row, other=0) - start
    run = gradients + start[:, None].to(tl.int64) * DIM + columns
    total = tl.load(run, mask=mask, other=0.0)
    longest = tl.load(starts + last + 1) - tl.load(starts + last)
    for done in range(1, longest, UNROLL):
        for step in tl.static_range(UNROLL):
            more = mask & (done + step < length)[:, None]
            term = tl.load(run + tl.cast(done + step, tl.int64) * DIM, mask=more, other=0.0)
            total = tl.where(more, total + term, total)  # adding the 0.0 of a masked load would turn -0.0 into 0.0
    return total


@triton.jit(do_not_specialize=["first_row", "end_row", "sign_flip"])
def adam_update_kernel(
    gradients,  # float32 [N, DIM], run after run
    starts,  # int32 [U + 1], of the runs
    distances,  # int64 [U], 16-byte units
    step_factors,  # float32 [U]
    streams,  # int64 [U], used for narrow weights
    narrow_base,  # int16, the arena's base
    base,  # float32, the same
    saturated,  # int64, one counter
    c1,
    c2,
    d,
    eps,
    weight_decay,
    unscale,
    divisor,
    sign_flip,  # the sign bit if maximize, else 0
    first_row,
    end_row,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    UNROLL: tl.constexpr,
    EXP_AVG: tl.constexpr,  # in float32 from the record's start
    EXP_AVG_SQ: tl.constexpr,
    DTYPE: tl.constexpr,
    DECAY: tl.constexpr,
    MEAN: tl.constexpr,
):
    """Updates rows first_row .. end_row - 1: weight, exp_avg, exp_avg_sq."""
    rows = first_row + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = rows < end_row
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = is_row[:, None] & (columns < DIM)
    distance = tl.load(distances + rows, mask=is_row, other=0)[:, None]
    s = tl.load(step_factors + rows, mask=is_row, other=0.0)[:, None]
    record = base + distance * 4 + columns
    if DTYPE == FLOAT32:
        stored = record
    else:
        stored = narrow_base + distance * 8 + columns
    w = widen(tl.load(stored, mask=mask, other=0), DTYPE)
    m = tl.load(record + EXP_AVG, mask=mask, other=0.0)
    v = tl.load(record + EXP_AVG_SQ, mask=mask, other=0.0)
    last = tl.minimum(first_row + tl.program_id(0) * ROWS + ROWS, end_row) - 1
    g = sum_run(gradients, starts, rows, is_row, last, columns, mask, DIM, UNROLL) * unscale
    if MEAN:
        g = tl.div_rn(g, divisor)
    g = (g.to(tl.int32, bitcast=True) ^ sign_flip).to(tl.float32, bitcast=True)
    if DECAY == COUPLED:
        g = clamp(g + weight_decay * w, _DECAYED_GRADIENT_LIMIT)
    if DECAY == DECOUPLED:
        w = clamp(w * d, LARGEST_FLOAT32)
    m = m + (g - m) * c1
    v = v + (g * g - v) * c2
    tl.store(record + EXP_AVG, m, mask=mask)
    tl.store(record + EXP_AVG_SQ, v, mask=mask)
    # s = 0 leaves the weight as it is, also where the quotient is infinite and 0 * inf would be NaN.
    w = tl.where(s == 0.0, w, w - s * tl.div_rn(m, tl.sqrt_rn(v) + eps))
    if DTYPE == FLOAT32:
        beyond = tl.abs(w) > LARGEST_FLOAT32
        tl.store(stored, clamp(w, LARGEST_FLOAT32), mask=mask)
    else:
        stream = tl.load(streams + rows, mask=is_row, other=0)[:, None]
        magnitude = round_stochastically(w, element_hashes(stream, columns), DTYPE)
        beyond = is_beyond(magnitude, DTYPE)
        tl.store(stored, narrow_bits(magnitude, w, DTYPE), mask=mask)
    counter = saturated + tl.zeros_like(columns) + tl.zeros_like(distance).to(tl.int32)
    tl.atomic_add(counter, tl.full(mask.shape, 1, tl.int64), mask=mask & beyond, sem="relaxed")
