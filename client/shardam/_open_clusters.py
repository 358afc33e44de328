"""The cluster objects that this process refers to by itself: the open ones, for its exit, and those that pickles share."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.util
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from shardam._forks import FORKS
from shardam_proto.errors import ShardamError

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """A cluster object."""

    @property
    def _is_closed(self) -> bool:
        """True: it will not be used again."""
        ...

    def close(self) -> None:
        """Sends what is queued and closes."""
        ...


ClusterT = TypeVar("ClusterT", bound=Closable)


class OpenClusters(Generic[ClusterT]):
    """One process's cluster objects. Thread-safe; a forked child has none that is open."""

    def __init__(self) -> None:
        self._open: set[ClusterT] = set()
        self._pickled: weakref.WeakValueDictionary[Hashable, ClusterT] = weakref.WeakValueDictionary()
        self._finalized = False
        self._lock = threading.Lock()

    def add(self, cluster: ClusterT) -> None:
        """Has a cluster closed when this process exits."""
        with self._lock:
            FORKS.add_heir(self)
            atexit.unregister(self._close_all)
            atexit.register(self._close_all)  # last registered runs first: before the hooks of what it needs
            if not self._finalized and multiprocessing.parent_process() is not None:
                self._finalized = True
                multiprocessing.util.Finalize(None, self._close_all, exitpriority=0)  # a forked one skips atexit
            self._open.add(cluster)

    def discard(self, cluster: ClusterT) -> None:
        """Leaves a closed cluster out."""
        with self._lock:
            self._open.discard(cluster)

    def shared(self, key: Hashable, make: Callable[[], ClusterT]) -> ClusterT:
        """Returns the cluster object of a pickle, the same for all pickles with this key; made anew after it was closed."""
        with self._lock:
            FORKS.add_heir(self)
            known = self._pickled.get(key)
            if known is None or known._is_closed:
                known = self._pickled[key] = make()
            return known

    def _begin_anew(self) -> None:
        """Opens nothing and closes nothing: what is open is the parent's."""
        self._lock = threading.Lock()
        self._open = set()
        self._finalized = False
        self._pickled = weakref.WeakValueDictionary(dict(self._pickled))

    def _close_all(self) -> None:
        for cluster in list(self._open):
            try:
                cluster.close()
            except ShardamError as error:
                logger.error("%r could not send its last changes: %s", cluster, error)
