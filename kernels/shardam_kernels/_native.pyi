"""Native row indexes, arenas and kernels; use shardam_kernels.native."""

from collections.abc import Sequence
from typing import Annotated, overload

import numpy
from numpy.typing import NDArray


class HashIndex:
    """Any int64 id -> slot, in the order of mix64(id)."""

    def __init__(self) -> None: ...

    def __len__(self) -> int:
        """Number of rows."""

    @property
    def num_slots(self) -> int:
        """One more than the largest slot ever given."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the index in bytes."""

    def lookup(self, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out_slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """Writes slots, -1 if absent; returns how many exist."""

    def reserve(self, num_new: int) -> None:
        """Makes room so that inserting num_new new ids cannot fail."""

    def insert(self, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out_slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], out_is_new: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """
        Writes slots, giving one to each new id; returns the number of new rows.
        """

    def remove(self, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out_slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """
        Removes rows, writes the slots they had, -1 if absent; returns how many were removed.
        """

    def scan(self, from_key: int, max_rows: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], int | None]:
        """
        Returns (row_ids, slots, next_key): rows from from_key on in the index's order; next_key is None at the end.
        """

    def spread(self) -> None:
        """
        Spreads the rows that are there evenly: searches are quick again after many came in the index's order.
        """

class ArrayIndex:
    """Ids 0 to num_embeddings - 1 -> slot, in the order of the id."""

    def __init__(self, num_embeddings: int) -> None: ...

    def __len__(self) -> int:
        """Number of rows."""

    @property
    def num_slots(self) -> int:
        """One more than the largest slot ever given."""

    @property
    def memory_bytes(self) -> int:
        """Memory of the index in bytes."""

    def lookup(self, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out_slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """Writes slots, -1 if absent; returns how many exist."""

    def reserve(self, num_new: int) -> None:
        """Makes room so that inserting num_new new ids cannot fail."""

    def insert(self, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out_slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], out_is_new: Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """
        Writes slots, giving one to each new id; returns the number of new rows.
        """

    def remove(self, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out_slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]) -> int:
        """
        Removes rows, writes the slots they had, -1 if absent; returns how many were removed.
        """

    def scan(self, from_key: int, max_rows: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], int | None]:
        """
        Returns (row_ids, slots, next_key): rows from from_key on in the index's order; next_key is None at the end.
        """

    @property
    def num_embeddings(self) -> int:
        """Number of possible ids."""

def zeroed_memory(size_bytes: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]:
    """Returns zeros that are not resident before they are written."""

class Arena:
    """
    Records of one stride in native memory; a record never moves, untouched memory is not resident.
    """

    def __init__(self, stride_bytes: int) -> None: ...

    @property
    def stride_bytes(self) -> int:
        """Distance from one record to the next."""

    @property
    def num_slots(self) -> int:
        """Number of records there is room for."""

    @property
    def memory_bytes(self) -> int:
        """Address space in bytes; pages never written are not resident."""

    def reserve(self, num_slots: int) -> None:
        """
        Makes room for slots 0 to num_slots - 1; MemoryError if there is none, and nothing has changed.
        """

    def view_record(self, slot: int) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]:
        """Returns the bytes of a record, writable, uint8 [stride_bytes]."""

class RecordLayout:
    """
    The weight's dtype, dim, and where a record has its components, in bytes.
    """

    def __init__(self, dtype: str, dim: int, weight: int, exp_avg: int, exp_avg_sq: int) -> None: ...

class Rounding:
    """What the stochastic rounding of a step's weights is drawn from."""

    def __init__(self, table_seed: int, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], steps: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

class AdamFactors:
    """The factors of one step that all its rows share."""

    def __init__(self, c1: float, c2: float, d: float, eps: float, weight_decay: float, maximize: bool, decoupled: bool) -> None: ...

class InitialRows:
    """A folded initializer with a table's seed and padding row."""

    def __init__(self, kind: str, a: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], b: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], table_seed: int, padding_idx: int | None) -> None: ...

def merge_gradients(row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], gradients: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], unscale: float, divisor: float, num_threads: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]]:
    """Returns (row_ids, gradients, bad_rows), merged by id."""

def group_gradients(row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], gradients: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], unscale: float, num_threads: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu')], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]]:
    """Returns (row_ids, starts, order, bad_rows), grouped by id."""

def initialize(arena: Arena, layout: RecordLayout, slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], initial: InitialRows) -> int:
    """Writes new records; returns saturated weights."""

def gather_weights(arena: Arena, layout: RecordLayout, slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], initial: InitialRows, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], num_threads: int) -> None:
    """Writes the weights of rows, existing or not."""

@overload
def gather_rows(arena: Arena, layout: RecordLayout, index: HashIndex, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], initial: InitialRows, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], num_threads: int) -> None: ...

@overload
def gather_rows(arena: Arena, layout: RecordLayout, index: ArrayIndex, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], initial: InitialRows, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')], num_threads: int) -> None:
    """Writes the weights of rows as an index has them."""

def adam_update(arena: Arena, layout: RecordLayout, slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], gradients: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], factors: AdamFactors, step_factors: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)], rounding: Rounding | None, num_threads: int) -> int:
    """Applies one step; returns saturated weights."""

def read_component(arena: Arena, dim: int, offset_bytes: int, dtype: str, slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """Writes one component of rows to out, zeros where a slot is -1."""

def write_component(arena: Arena, dim: int, offset_bytes: int, dtype: str, slots: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], values: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)]) -> int:
    """Writes values to one component of rows; returns saturated values."""

class StepRows:
    """The rows of one step, each once, with its gradients and slot."""

    def __init__(self, row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], gradients: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], unscale: float, divisor: float, num_threads: int) -> None: ...

    @property
    def num_rows(self) -> int:
        """Number of distinct ids."""

    @property
    def num_absent(self) -> int:
        """Rows without a slot, after find."""

    @property
    def row_ids(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]:
        """The distinct ids, in order of first appearance."""

    @property
    def slots(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]:
        """Slots as they were found and given; -1 for a row that has none."""

    @property
    def bad_rows(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)]:
        """Positions of rows whose gradient must be refused, ascending."""

    @overload
    def find(self, index: HashIndex) -> int: ...

    @overload
    def find(self, index: ArrayIndex) -> int:
        """Looks the rows up; returns how many are absent."""

    @overload
    def insert(self, index: HashIndex) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]: ...

    @overload
    def insert(self, index: ArrayIndex) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]:
        """Gives slots to the absent rows; returns their positions."""

def update_rows(arena: Arena, layout: RecordLayout, rows: StepRows, factors: AdamFactors, step_factor: float, row_factors: Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, table_seed: int, row_steps: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)] | None, touches: Annotated[NDArray[numpy.uint64], dict(shape=(None, None), order='C', device='cpu')] | None, change_number: int, table_step: int, num_threads: int) -> int:
    """Applies one step and notes what it touched; returns saturated weights."""

def sum_places(gradients: Annotated[NDArray[numpy.float32], dict(shape=(None, None), device='cpu', writable=False)], places: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], skipped: int | None, out: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu')]) -> None:
    """Writes the sum of the gradients of each place."""

def distinct_ids(row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_shards: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')], Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]]:
    """Returns (row_ids, places, ends)."""

def all_below(row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], bound: int) -> bool:
    """Returns whether all ids are 0 to bound - 1."""

def split_by_shard(row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], num_shards: int) -> tuple[Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')] | None, Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu')]]:
    """Returns (order, ends); order is None if the ids lie by shard."""

def is_merged(row_ids: Annotated[NDArray[numpy.int64], dict(shape=(None,), order='C', device='cpu', writable=False)], gradients: Annotated[NDArray[numpy.float32], dict(shape=(None, None), order='C', device='cpu', writable=False)], unscale: float) -> bool:
    """
    Returns whether ids are distinct and all values so small that no shard refuses them.
    """

def writable(values: object) -> Annotated[NDArray[numpy.float32], dict(shape=(None,), order='C', device='cpu')]:
    """Returns the same floats, writable."""

def new_message(prefixes: Sequence[bytes], sizes: Sequence[int]) -> tuple[bytes, list[Annotated[NDArray[numpy.uint8], dict(shape=(None,), order='C', device='cpu')]]]:
    """Returns a bytes object and its payloads, uninitialised and writable."""

def encode_messages(field: int, columns: Sequence[tuple[int, Annotated[NDArray[numpy.uint64], dict(shape=(None,), order='C', device='cpu', writable=False)]]]) -> bytes:
    """Returns a repeated field of messages, as protobuf encodes it."""
