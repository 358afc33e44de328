"""The native kernels: row indexes, arenas, and the operations on records, on a CPU.

Every operation has a twin of the same signature and the same bits in shardam_kernels.reference. Nothing here imports torch.

Sizes are checked before anything is written: ValueError for lengths that do not fit each other, TypeError for an array of
another dtype, order or writability, IndexError for a slot or id out of range. Nothing is locked inside: any number of threads
may read (lookup, scan, find, gather_rows, gather_weights, read_component) at a time, and whoever changes an index or an arena
must be alone. A call that works for more than microseconds releases the GIL. Threads are kept between calls. No result depends
on num_threads. Arrays of weights are float32 whatever the dtype of the records.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shardam_kernels import _native
from shardam_kernels._native import Arena, ArrayIndex, HashIndex, StepRows
from shardam_kernels.factors import Factors
from shardam_kernels.gradients import Merged, Runs
from shardam_kernels.initializers import InitialRows
from shardam_kernels.layout import Layout
from shardam_kernels.row_index import RowIndex
from shardam_kernels.row_steps import RowSteps

__all__ = [
    "Arena",
    "ArrayIndex",
    "HashIndex",
    "Records",
    "RowIndex",
    "StepRows",
    "adam_update",
    "all_below",
    "distinct_ids",
    "encode_messages",
    "gather_rows",
    "gather_weights",
    "group_gradients",
    "group_rows",
    "initialize",
    "is_merged",
    "merge_gradients",
    "new_message",
    "read_component",
    "split_by_shard",
    "update_rows",
    "sum_places",
    "writable",
    "write_component",
    "zeroed_memory",
]

Int64s = npt.NDArray[np.int64]
Uint8s = npt.NDArray[np.uint8]
Uint64s = npt.NDArray[np.uint64]
Float32s = npt.NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of a table: the arena and the layout by which it is read.

    Raises:
        ValueError: the arena has another stride.
    """

    arena: Arena
    layout: Layout
    _native_layout: _native.RecordLayout = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.stride_bytes != self.arena.stride_bytes:
            raise ValueError(f"the arena's stride is {self.arena.stride_bytes} bytes, the layout's {layout.stride_bytes}")
        offsets = [layout.component(name).offset_bytes for name in ("weight", "exp_avg", "exp_avg_sq")]
        object.__setattr__(self, "_native_layout", _native.RecordLayout(layout.dtype, layout.dim, *offsets))


def merge_gradients(row_ids: Int64s, gradients: Float32s, factors: Factors, num_threads: int = 1) -> Merged:
    """Sums the gradients of each distinct id, left to right in float32, then unscales, then divides.

    Args:
        row_ids: int64 [N], N < 2**31.
        gradients: float32 [N, dim].
        factors: of which unscale and divisor are used.
        num_threads: at least 1.

    Returns:
        The merged gradient; its bad_rows must be empty before it is applied.
    """
    return Merged(*_native.merge_gradients(row_ids, gradients, factors.unscale, factors.divisor, num_threads))


def group_gradients(row_ids: Int64s, gradients: Float32s, factors: Factors, num_threads: int = 1) -> Runs:
    """Groups the gradients of each id without summing them: what a GPU's update takes (shardam_kernels.triton).

    Args:
        row_ids: int64 [N], N < 2**31.
        gradients: float32 [N, dim].
        factors: of which unscale is used, to find the bad rows.
        num_threads: at least 1.

    Returns:
        The runs; their bad_rows must be empty before they are applied.
    """
    return Runs(*_native.group_gradients(row_ids, gradients, factors.unscale, num_threads))


def group_rows(row_ids: Int64s, gradients: Float32s, factors: Factors, num_threads: int = 1) -> StepRows:
    """Groups the gradients of a step by row for update_rows, which sums them; copies none.

    Of what it returns, find(index) looks the rows up and returns how many are absent, and insert(index) gives these slots and
    returns their positions: MemoryError if there is no room and none was reserved, and nothing has changed. row_ids (int64 [U],
    each id once, in order of first appearance), slots (int64 [U], after find) and bad_rows (int64, ascending positions) are
    views.

    Args:
        row_ids: int64 [N], N < 2**31; kept.
        gradients: float32 [N, dim], at any place that a float32 may have; kept.
        factors: of the step, of which unscale and divisor are used.
        num_threads: at least 1.

    Returns:
        The rows; their bad_rows (as in Merged) must be empty before they are updated.
    """
    return StepRows(row_ids, gradients, factors.unscale, factors.divisor, num_threads)


def initialize(records: Records, slots: Int64s, row_ids: Int64s, initial: InitialRows) -> int:
    """Writes new rows: the initial weight to nearest even, zero moments, zero padding bytes. What the slots held is gone.

    Args:
        records: the table's records.
        slots: int64 [N], distinct, each below arena.num_slots.
        row_ids: int64 [N], the rows' ids.
        initial: the table's initializer, seed and padding row.

    Returns:
        How many weights lay beyond the dtype's finite range and were saturated.
    """
    return _native.initialize(records.arena, records._native_layout, slots, row_ids, _native_initial(initial))


def gather_weights(
    records: Records, slots: Int64s, row_ids: Int64s, initial: InitialRows, out: Float32s, num_threads: int = 1
) -> None:
    """Writes the weights of rows; a row without a slot reads as it would start, and is not created.

    Args:
        records: the table's records.
        slots: int64 [N], -1 for a row that does not exist; duplicates allowed.
        row_ids: int64 [N], the rows' ids.
        initial: the table's initializer, seed and padding row.
        out: float32 [N, dim], written.
        num_threads: at least 1.
    """
    _native.gather_weights(records.arena, records._native_layout, slots, row_ids, _native_initial(initial), out, num_threads)


def gather_rows(
    records: Records, index: HashIndex | ArrayIndex, row_ids: Int64s, initial: InitialRows, out: Float32s, num_threads: int = 1
) -> None:
    """Looks rows up and writes their weights, as gather_weights does.

    Args:
        records: the table's records.
        index: has given slots of the records' arena; IndexError for an id out of its bounds.
        row_ids: int64 [N], the rows' ids; duplicates allowed.
        initial: the table's initializer, seed and padding row.
        out: float32 [N, dim], written, at any place that a float32 may have.
        num_threads: at least 1.
    """
    _native.gather_rows(records.arena, records._native_layout, index, row_ids, _native_initial(initial), out, num_threads)


def update_rows(
    records: Records,
    rows: StepRows,
    factors: Factors,
    touches: Uint64s | None,
    change_number: int,
    table_step: int,
    row_steps: RowSteps | None = None,
    table_seed: int = 0,
    num_threads: int = 1,
) -> int:
    """Applies one step to its rows as adam_update does, merged on the way, and notes what it touched. Allocates nothing.

    Args:
        records: the table's records.
        rows: of group_rows; found, and inserted where they were absent.
        factors: of the step.
        touches: uint64 [num_slots or more, 2], by slot: change_number and table_step are written there; None: nowhere.
        change_number: the change that the step is part of.
        table_step: t after it.
        row_steps: of rows that count their own steps; None: all take the table's.
        table_seed: what the rounding of weights below float32 is drawn from in that case, with ids and table_step.
        num_threads: at least 1.

    Returns:
        How many weights left their dtype's finite range and were saturated.
    """
    rounding = None
    if row_steps is not None:
        row_steps.check(records.layout.dtype)
        rounding = row_steps.rounding
    return _native.update_rows(
        records.arena,
        records._native_layout,
        rows,
        _native_factors(factors),
        factors.s,
        None if row_steps is None else row_steps.factors,
        table_seed if rounding is None else rounding.table_seed,
        None if rounding is None else rounding.steps,
        touches,
        change_number,
        table_step,
        num_threads,
    )


def adam_update(
    records: Records, slots: Int64s, gradients: Float32s, factors: Factors, steps: RowSteps, num_threads: int = 1
) -> int:
    """Applies one step to rows: moments and weight, in place (CONTRACT.md, Arithmetic). Allocates nothing.

    Args:
        records: the table's records.
        slots: int64 [U], distinct, each below arena.num_slots.
        gradients: float32 [U, dim], merged, unscaled, divided; finite and below GRADIENT_LIMIT.
        factors: of the step; its s is not used.
        steps: the step of each of the U rows.
        num_threads: at least 1.

    Returns:
        How many weights left their dtype's finite range and were saturated.
    """
    steps.check(records.layout.dtype)
    rounding = steps.rounding
    return _native.adam_update(
        records.arena,
        records._native_layout,
        slots,
        gradients,
        _native_factors(factors),
        steps.factors,
        None if rounding is None else _native.Rounding(rounding.table_seed, rounding.row_ids, rounding.steps),
        num_threads,
    )


def read_component(records: Records, name: str, slots: Int64s, out: Float32s) -> None:
    """Writes one component ("weight", "exp_avg", "exp_avg_sq") of rows to out, float32 [N, dim]; zeros where a slot is -1."""
    component = records.layout.component(name)
    _native.read_component(records.arena, records.layout.dim, component.offset_bytes, component.dtype, slots, out)


def write_component(records: Records, name: str, slots: Int64s, values: Float32s) -> int:
    """Writes values, float32 [N, dim], to one component of rows; of a slot named twice the last value stays.

    Weights are rounded to nearest even in their dtype.

    Returns:
        How many values lay beyond the dtype's finite range and were saturated.
    """
    component = records.layout.component(name)
    return _native.write_component(records.arena, records.layout.dim, component.offset_bytes, component.dtype, slots, values)


def zeroed_memory(size_bytes: int) -> Uint8s:
    """Returns zeros, uint8 [size_bytes], that are not resident before they are written, whatever the allocator's settings.

    Raises:
        MemoryError: there is no such address space.
    """
    return _native.zeroed_memory(size_bytes)


def all_below(row_ids: Int64s, bound: int) -> bool:
    """Returns whether all ids, int64 [N], are 0 to bound - 1."""
    return _native.all_below(row_ids, bound)


def distinct_ids(row_ids: Int64s, num_shards: int = 1) -> tuple[Int64s, Int64s, Int64s]:
    """Names each id once, by the shard that owns it (shardam_proto.routing).

    Args:
        row_ids: int64 [N], N < 2**31.
        num_shards: 1 to 4,096.

    Returns:
        (distinct int64 [U], those of shard 0 first, each shard's in order of first appearance; places int64 [N], the position
        of each id in distinct; ends int64 [num_shards], behind each shard's last id in distinct).
    """
    return _native.distinct_ids(row_ids, num_shards)


def split_by_shard(row_ids: Int64s, num_shards: int) -> tuple[Int64s | None, Int64s]:
    """Finds the ids of each shard.

    Args:
        row_ids: int64 [N].
        num_shards: 1 to 4,096.

    Returns:
        (order int64 [N], positions of shard 0's ids first, each shard's ascending, or None if the ids lie so already; ends
        int64 [num_shards], behind each shard's last one in order).
    """
    return _native.split_by_shard(row_ids, num_shards)


def is_merged(row_ids: Int64s, gradients: Float32s, unscale: float) -> bool:
    """Says whether a gradient is its own sum: every id there once, and every value so small that none can be refused.

    Args:
        row_ids: int64 [N].
        gradients: float32 [N, dim].
        unscale: float32(1 / grad_scale).

    Returns:
        True, or False where merge_gradients has to look.
    """
    return _native.is_merged(row_ids, gradients, unscale)


def writable(values: Float32s) -> Float32s:
    """Makes floats writable that lie in a bytes object; it must be nobody else's, since bytes do not change as a rule.

    Args:
        values: float32 [N], of a message that has been received.

    Returns:
        The same ones, float32 [N].
    """
    return _native.writable(values)


def sum_places(gradients: Float32s, places: Int64s, out: Float32s, skipped: int | None = None) -> None:
    """Sums the gradients of each place, left to right in float32 from zero on, as torch's backward of an embedding does.

    Args:
        gradients: float32 [N, dim], each row contiguous.
        places: int64 [N], each 0 to U - 1.
        out: float32 [U, dim], written; zeros where no gradient belongs.
        skipped: place that gets none.
    """
    _native.sum_places(gradients, places, skipped, out)


def new_message(prefixes: Sequence[bytes], sizes: Sequence[int]) -> tuple[bytes, list[Uint8s]]:
    """Makes a bytes object into which payloads are written where they will lie; nobody may have it before they are.

    Args:
        prefixes: what stands before each payload.
        sizes: bytes of each payload.

    Returns:
        (the message, each payload as uint8 [size], uninitialised and writable).

    Raises:
        MemoryError: there is no room.
    """
    return _native.new_message(list(prefixes), list(sizes))


def encode_messages(field: int, columns: Sequence[tuple[int, Uint64s]]) -> bytes:
    """Encodes small messages of one kind as protobuf does, as the elements of a repeated field; zeros are left out.

    Args:
        field: number of the repeated field, 1 to 15.
        columns: of each field of the messages, ascending, its tag (number << 3 | wire type: 0 for a varint, 1 for eight bytes)
            and its values, uint64 [N]; 1 to 11 of them.
    """
    return _native.encode_messages(field, columns)


@functools.lru_cache(maxsize=2**14)  # one for each of thousands of tables
def _native_initial(initial: InitialRows) -> _native.InitialRows:
    folded = initial.folded
    return _native.InitialRows(folded.kind, folded.a, folded.b, initial.table_seed, initial.padding_idx)


@functools.lru_cache(maxsize=64)  # all tables of a step mostly have the same
def _native_factors(factors: Factors) -> _native.AdamFactors:
    return _native.AdamFactors(
        c1=factors.c1,
        c2=factors.c2,
        d=factors.d,
        eps=factors.eps,
        weight_decay=factors.weight_decay,
        maximize=factors.maximize,
        decoupled=factors.decoupled,
    )
