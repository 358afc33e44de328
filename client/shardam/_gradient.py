"""The gradient that autograd has recorded for one table since the last push, merged by row over all uses of the table.

A table's rows are no parameters of the model: a dense proxy parameter stands for the rows that got a gradient, so that
clipping, GradScaler and torch's optimizer class find a `.grad` where they look for one.
"""

from __future__ import annotations

import dataclasses
import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from shardam._arrays import Int64s
from shardam._forks import FORKS
from shardam._timings import Timings
from shardam._uses import places_among
from shardam._values import TableInfo
from shardam.cluster import Cluster
from shardam_kernels import native
from shardam_proto.errors import BadOption
from shardam_proto.schema import TableSpec

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx

    from shardam.optimizer import SparseAdam


class KeptRows:
    """Rows that a training forward has pulled; they live as long as its graph does, which refers to them.

    Args:
        row_ids: int64 [U], distinct.
        rows: float32 [U, dim].
    """

    def __init__(self, row_ids: Int64s, rows: torch.Tensor) -> None:
        self.row_ids = row_ids
        self.rows = rows

    def part(self, row_ids: Int64s) -> KeptRows | None:
        """Returns these ids' rows, or None if some are not here."""
        if np.array_equal(row_ids, self.row_ids):
            return self
        places = places_among(row_ids, self.row_ids)
        if (places < 0).any():
            return None
        return KeptRows(row_ids, self.rows[torch.from_numpy(places).to(self.rows.device)])


class TableGradient:
    """What one client has to push for one table; shared by all modules of the table.

    Args:
        info: the table.

    Attributes:
        anchor: an empty tensor that requires grad, so that rows pulled from a shard enter the graph.
        proxy: stands for the rows; its storage is one zero, its `.grad` is float32 [U, dim].
        row_ids: int64 [U] on the CPU, distinct; None: no gradient since the last clear.
        pushed: the gradient has been pushed; the next backward starts a new one.
        num_steps: how often that was.
    """

    def __init__(self, info: TableInfo) -> None:
        self.info = info
        self.anchor = torch.empty(0, info.spec.dim, requires_grad=True)
        self.proxy = nn.Parameter(torch.empty(0, info.spec.dim))
        self.row_ids: torch.Tensor | None = None
        self.pushed = False
        self.num_steps = 0
        self._sent_from: tuple[int, int] | None = None
        self._was_written = False
        self._kept: list[weakref.ref[KeptRows]] = []
        self._owners: weakref.WeakSet[SparseAdam] = weakref.WeakSet()
        self._lock = threading.Lock()
        FORKS.add_heir(self)

    def _begin_anew(self) -> None:
        """Has, in a forked child, a lock that no thread of the parent holds; the gradient is a copy, as any tensor is."""
        self._lock = threading.Lock()

    def add(self, row_ids: torch.Tensor, gradient: torch.Tensor) -> None:
        """Adds the gradient of one use of the table.

        Args:
            row_ids: int64 [U] on the CPU, distinct.
            gradient: [U, dim] on any device, any float dtype; sums are float32.
        """
        gradient = gradient.detach().float().contiguous()
        with self._lock:
            if self.row_ids is not None and not self.pushed:
                if self.proxy.grad is None:
                    raise BadOption(
                        f"table {self.info.name!r}: the gradient of sparse.parameters() was set to None from outside; use "
                        "sparse.zero_grad()"
                    )
                row_ids, gradient = _merge(self.row_ids, self.proxy.grad, row_ids, gradient)
            self._note_writes()
            self.proxy.grad = None
            self.proxy.data = gradient.new_zeros(()).expand(gradient.shape)
            self.proxy.grad, self.row_ids, self.pushed = gradient, row_ids, False

    def to_push(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns ids and gradient that wait to be pushed, or None."""
        with self._lock:
            row_ids, gradient = self.row_ids, self.proxy.grad
            return None if row_ids is None or gradient is None or self.pushed else (row_ids, gradient)

    def mark_pushed(self) -> None:
        """Notes that the gradient is used: it is not pushed again, and the next backward starts a new one."""
        with self._lock:
            self.pushed = True
            self.num_steps += 1
            if self.proxy.grad is not None:
                self._sent_from = self.proxy.grad.data_ptr(), self.proxy.grad._version

    def check_pushed(self, *, applied: bool) -> None:
        """Complains, once, of a pushed gradient that was written to: its push is sent, and sent again, from the same memory.

        Args:
            applied: what has been pushed is applied; whatever is done to its gradient from now on is all right.

        Raises:
            BadOption: it was.
        """
        with self._lock:
            self._note_writes()
            was_written, self._was_written = self._was_written, False
            if applied:
                self._sent_from = None
        if was_written:
            raise BadOption(
                f"table {self.info.name!r}: the gradient in sparse.parameters() was written to after step(), which sends it "
                "from there: what was pushed may be the old values or the new. Clip and scale before step(), and drop "
                "gradients with sparse.zero_grad()",
                metadata={"table": self.info.name},
            )

    def _note_writes(self) -> None:
        grad = self.proxy.grad
        if self.pushed and grad is not None and self._sent_from is not None:
            memory, version = self._sent_from
            if grad.data_ptr() == memory and grad._version > version:
                self._sent_from, self._was_written = None, True

    def clear(self) -> None:
        """Forgets the gradient, pushed or not."""
        with self._lock:
            self._note_writes()
            self.proxy.grad, self.row_ids, self.pushed = None, None, False

    def keep(self, row_ids: Int64s, rows: torch.Tensor) -> KeptRows:
        """Keeps what a training forward has pulled for a forward inside its backward; forgotten when its graph is gone.

        Args:
            row_ids: int64 [U], distinct.
            rows: float32 [U, dim].
        """
        kept = KeptRows(row_ids, rows)
        with self._lock:
            self._kept = [known for known in self._kept if known() is not None]
            self._kept.append(weakref.ref(kept))
        return kept

    def kept_rows(self, row_ids: Int64s) -> KeptRows:
        """Returns rows for a forward inside a backward, which may not wait for a shard; the last ones pulled count.

        Args:
            row_ids: int64 [U], distinct.

        Raises:
            BadOption: no training forward whose graph is alive has pulled all of them.
        """
        with self._lock:
            known = [kept for reference in reversed(self._kept) if (kept := reference()) is not None]
        for kept in known:
            part = kept.part(row_ids)
            if part is not None:
                return part
        raise BadOption(
            f"table {self.info.name!r}: a forward inside a backward takes the rows that the training forward pulled, and none "
            "pulled these ids. For activation checkpointing use torch.utils.checkpoint.checkpoint(..., use_reentrant=False); "
            "pull other rows before backward",
            metadata={"table": self.info.name},
        )

    def own(self, optimizer: SparseAdam) -> None:
        """Notes that an optimizer pushes this gradient."""
        self._owners.add(optimizer)

    def require_owner(self) -> None:
        """Checks that exactly one optimizer will push what a training forward records.

        Raises:
            BadOption: no SparseAdam has this table, or two have.
        """
        if len(self._owners) > 1:
            gc.collect()  # a former optimizer that a scheduler ties into a cycle is gone only now
        if len(self._owners) == 1:
            return
        if not self._owners:
            raise BadOption(
                f"table {self.info.name!r} is used for training but no SparseAdam has it: make "
                "shardam.SparseAdam([module]) before the first forward, or run under torch.no_grad(), or make the module with "
                "trainable=False",
                metadata={"table": self.info.name},
            )
        raise BadOption(
            f"table {self.info.name!r} belongs to {len(self._owners)} SparseAdam optimizers, and its gradient would be pushed "
            "by whichever steps first; give all modules of the table to one",
            metadata={"table": self.info.name},
        )


def _merge(
    first_ids: torch.Tensor, first: torch.Tensor, second_ids: torch.Tensor, second: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Adds two gradients row by row; each has distinct ids, so the order within one does not matter."""
    distinct, found, _ = native.distinct_ids(torch.cat([first_ids, second_ids]).numpy())
    total = torch.zeros(distinct.size, first.shape[1], dtype=torch.float32, device=second.device)
    places = torch.from_numpy(found).to(second.device)
    total[places[: first_ids.numel()]] = first.to(second.device)
    total.index_add_(0, places[first_ids.numel() :], second)
    return torch.from_numpy(distinct), total


class PulledRows(torch.autograd.Function):
    """Puts pulled rows into the graph; their gradient goes to a TableGradient."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, anchor: torch.Tensor, rows: torch.Tensor, gradient: TableGradient, kept: KeptRows
    ) -> torch.Tensor:
        """Returns the rows as they are."""
        ctx.gradient, ctx.kept = gradient, kept  # type: ignore[attr-defined]  # torch's way to keep what is no tensor
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[None, None, None, None]:
        """Records the rows' gradient; nothing flows further."""
        ctx.gradient.add(torch.from_numpy(ctx.kept.row_ids), grad)  # type: ignore[attr-defined]
        return None, None, None, None


@dataclasses.dataclass(frozen=True, eq=False)
class Lookup:
    """One lookup of ids, each in a row of its own, that is a table's only use in a forward on a CPU.

    Attributes:
        gradient: of the table.
        kept: its rows.
        padding_place: position of the padding row in them, if it is there.
        timings: where the backward's time is counted.
    """

    gradient: TableGradient
    kept: KeptRows
    padding_place: int | None
    timings: Timings


class LookedUpRows(torch.autograd.Function):
    """As PulledRows with torch's embedding behind it, and its bits: the gradient of each row is summed in one native pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, anchor: torch.Tensor, places: torch.Tensor, lookup: Lookup) -> torch.Tensor:
        """Returns the row of each place [*], float32 [*, dim]."""
        ctx.lookup = lookup  # type: ignore[attr-defined]  # torch's way to keep what is no tensor
        ctx.save_for_backward(places)  # with it a second backward is refused as torch refuses it
        return functional.embedding(places, lookup.kept.rows)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple[None, None, None]:
        """Records the rows' gradient; nothing flows further."""
        started = time.perf_counter()
        lookup: Lookup = ctx.lookup  # type: ignore[attr-defined]
        (places,) = ctx.saved_tensors  # type: ignore[attr-defined]
        sums = np.empty(lookup.kept.rows.shape, np.float32)
        given = grad.detach().resolve_neg().reshape(-1, sums.shape[1]).numpy()
        if given.strides[1] != given.itemsize:  # that of a sum, for one, is a single number
            given = np.ascontiguousarray(given)
        native.sum_places(given, places.reshape(-1).numpy(), sums, lookup.padding_place)
        lookup.gradient.add(torch.from_numpy(lookup.kept.row_ids), torch.from_numpy(sums))
        lookup.timings.add("backward", time.perf_counter() - started)
        return None, None, None


def gradient_of(cluster: Cluster, info: TableInfo) -> TableGradient:
    """Returns the one gradient of a client and table; a table that a restore has put in the place of one is the same."""
    return _GRADIENTS.of(cluster, info)


class _Gradients:
    """One process's gradients, by client and table. Thread-safe."""

    def __init__(self) -> None:
        self._tables: weakref.WeakKeyDictionary[Cluster, dict[TableSpec, TableGradient]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(self, cluster: Cluster, info: TableInfo) -> TableGradient:
        with self._lock:
            tables = self._tables.setdefault(cluster, {})
            if info.spec not in tables:
                FORKS.add_heir(self)
                tables[info.spec] = TableGradient(info)
            gradient = tables[info.spec]
            gradient.info = info
            return gradient

    def _begin_anew(self) -> None:
        self._lock = threading.Lock()


_GRADIENTS = _Gradients()
