"""A loader whose batches' rows are pulled before the program asks for them."""

from __future__ import annotations

import collections
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np

from shardam._arrays import check_flag
from shardam._features import Feature, KeyedJagged
from shardam._foreseen import ForeseenRows, activate
from shardam._gradient import TableGradient
from shardam._module import TableModule
from shardam._uses import Bags, TableIds, Use
from shardam.cluster import Cluster
from shardam.collection import EmbeddingCollection
from shardam.embedding_bag import EmbeddingBag
from shardam_proto.errors import BadOption, ShardamError, WrongIdDtype, make_error

BatchT = TypeVar("BatchT")

Foreseen = Feature | Mapping[str, Feature] | KeyedJagged
"""What a module's forward will be given, or the ids of it alone."""

Module = TableModule | EmbeddingCollection

_NO_OFFSETS = np.empty(0, np.int64)


def prefetch(
    loader: Iterable[BatchT],
    lookups: Mapping[Module, Callable[[BatchT], Foreseen]],
    depth: int = 1,
    exact: bool = False,
) -> Prefetch[BatchT]:
    """Yields a loader's batches and has the rows of the next ones pulled meanwhile, so that a forward need not wait for them.

    A forward takes what was foreseen for the batch that was yielded last; ids that were not foreseen are pulled in the forward.
    Under no_grad it does so only if the iteration was begun under no_grad, so that an evaluation within a training loop reads
    what is on the shards.

    In async mode without `exact` a forward sees rows that are up to `depth` of this worker's steps old, and pulls older ones:
    results differ from training without prefetch, in every run a little. With `exact` a forward asks for the rows that have
    changed since they were pulled, and results are those without prefetch, to the bit; it then waits for the shards, but for
    fewer bytes. In a group prefetch is always exact, and the group's waiting is that of the forward: pulling ahead waits for
    nobody.

    Args:
        loader: any iterable of batches, such as a DataLoader. It runs in this thread, `depth` batches ahead; what it raises is
            raised after the batches before.
        lookups: for each module what it will be given of a batch: ids for an Embedding; ids, or a tuple of ids and offsets and
            perhaps weights, for an EmbeddingBag; what its forward takes for an EmbeddingCollection.
        depth: batches ahead, >= 1; so many batches' rows are kept in memory besides those of the present one.
        exact: bring rows up to date in the forward.

    Returns:
        An iterable as long as the loader, to be iterated as often.

    Raises:
        BadOption: depth, exact or lookups are not what they must be.
    """
    return Prefetch(loader, lookups, depth, exact)


class Prefetch(Generic[BatchT]):
    """A loader with rows ahead; made by prefetch.

    Args:
        loader: as prefetch takes it; likewise the others.
    """

    def __init__(
        self, loader: Iterable[BatchT], lookups: Mapping[Module, Callable[[BatchT], Foreseen]], depth: int, exact: bool
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise BadOption(f"prefetch: depth is how many batches ahead, an integer of at least 1, got {depth!r}")
        if not isinstance(loader, Iterable):
            raise BadOption(f"prefetch: loader must be an iterable of batches, got {type(loader).__name__}")
        if not isinstance(lookups, Mapping) or not lookups:
            raise BadOption(
                f"prefetch: lookups is a dict of modules to what each will be given of a batch, at least one, got {lookups!r}"
            )
        for module, ids_of in lookups.items():
            if not isinstance(module, (TableModule, EmbeddingCollection)) or not callable(ids_of):
                raise BadOption(
                    "prefetch: lookups goes from shardam.Embedding, EmbeddingBag and EmbeddingCollection modules to functions "
                    f"of a batch, got {type(module).__name__}: {type(ids_of).__name__}"
                )
        self._loader = loader
        self._lookups = dict(lookups)
        self._depth = depth
        self._exact = check_flag(exact, "prefetch: exact")

    def __len__(self) -> int:
        """Number of the loader's batches, if it has one."""
        return len(self._loader)  # type: ignore[arg-type]  # len() says so itself, as it does of the loader

    def __iter__(self) -> Iterator[BatchT]:
        batches = iter(self._loader)  # first: a loader that forks does so before there is a thread
        with contextlib.ExitStack() as stack:
            puller = stack.enter_context(_Puller())
            present = stack.enter_context(_Present())
            yield from self._ahead(batches, puller, present)

    def _ahead(self, batches: Iterator[BatchT], puller: _Puller, present: _Present) -> Iterator[BatchT]:
        coming: collections.deque[tuple[BatchT, list[ForeseenRows]]] = collections.deque()
        problem: Exception | None = None
        has_ended = False
        while True:
            while not has_ended and problem is None and len(coming) <= self._depth:
                try:
                    batch = next(batches)
                except StopIteration:
                    has_ended = True
                    break
                except Exception as error:  # noqa: BLE001 - raised when its batch is due: those before are whole
                    problem = error
                    break
                try:
                    coming.append((batch, self._foresee(batch, puller)))
                except Exception as error:  # noqa: BLE001 - likewise
                    problem = error
            if not coming:
                if problem is not None:
                    raise problem
                return
            batch, rows = coming.popleft()
            present.become(rows)
            yield batch

    def _foresee(self, batch: BatchT, puller: _Puller) -> list[ForeseenRows]:
        uses: dict[Cluster, dict[TableGradient, list[Use]]] = {}
        for module, ids_of in self._lookups.items():
            for use in _uses_of(module, ids_of(batch)):
                tables = uses.setdefault(use.module.table.cluster, {})
                tables.setdefault(use.module._gradient, []).append(use)
        foreseen = []
        for cluster, tables in uses.items():
            ids = {gradient: TableIds.of(those) for gradient, those in tables.items()}
            rows = ForeseenRows(cluster, ids, exact=self._exact, max_steps=self._depth)
            puller.start(rows)
            foreseen.append(rows)
        return foreseen


def _uses_of(module: Module, given: Foreseen) -> list[Use]:
    """Returns what a module will look up.

    Raises:
        ShardamError: as the module's forward.
    """
    try:
        if isinstance(module, EmbeddingCollection):
            return module._uses(given)  # type: ignore[arg-type]  # jagged_features checks what it is
        is_bag = isinstance(module, EmbeddingBag)
        if isinstance(given, tuple) and not is_bag:
            raise WrongIdDtype(f"an Embedding is given ids alone, and this is a tuple of {len(given)}")
        if isinstance(given, tuple) and given:
            given = given[0]
        ids, device = module._ids(given)  # type: ignore[arg-type]  # as_row_ids checks what it is
        return [Use(module, ids, device, Bags(_NO_OFFSETS, None) if is_bag else None)]
    except ShardamError as error:
        raise make_error(error.reason, f"prefetch: {error.message}", error.metadata) from error


class _Present:
    """The batch that the program is at; a context manager that ends with none."""

    def __init__(self) -> None:
        self._rows: list[ForeseenRows] = []

    def __enter__(self) -> _Present:
        return self

    def __exit__(self, *_: object) -> None:
        self.become([])

    def become(self, rows: list[ForeseenRows]) -> None:
        for old in self._rows:
            activate(old.cluster, old, None)
        for new in rows:
            activate(new.cluster, None, new)
        self._rows = rows


class _Puller:
    """A thread that pulls one batch's rows after the other; a context manager that does not wait for what is under way."""

    def __init__(self) -> None:
        self._ended = False

    def __enter__(self) -> _Puller:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._tasks.put(None)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._tasks: queue.SimpleQueue[ForeseenRows | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, args=(self._tasks,), name="shardam-prefetch", daemon=True).start()

    def start(self, rows: ForeseenRows) -> None:
        """Has rows pulled after those before."""
        if os.getpid() != self._pid:  # a forked child goes on with a copy of the loop, and without its thread
            self._begin()
        self._tasks.put(rows)

    def _run(self, tasks: queue.SimpleQueue[ForeseenRows | None]) -> None:
        while (rows := tasks.get()) is not None:
            if self._ended:
                rows.give_up()  # another thread may wait for them in a forward
            else:
                rows.pull()
            del rows  # an idle thread keeps no rows alive
