"""shardam's client: tables of embedding rows that live on shards, trained from PyTorch.

`connect`, `LocalCluster` and `Table` need no torch; the modules, `SparseAdam` and `GradScaler` import it when they are first
used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shardam import errors, init
from shardam._checkpoint_job import CheckpointJob
from shardam._checkpoint_values import CheckpointInfo, RestoreReport, TableReport
from shardam._cluster_timings import timings_collector
from shardam._connect import connect
from shardam._table_files import ExportReport, ImportReport
from shardam._timings import PhaseTimes
from shardam.cluster import Cluster
from shardam.local import LocalCluster
from shardam.table import PendingPull, PushResult, Rows, Table, TableInfo, TableStats
from shardam_kernels.factors import AdamOptions
from shardam_proto.schema import TableSpec

if TYPE_CHECKING:
    from shardam._localize import localize
    from shardam._prefetch import prefetch
    from shardam.amp import GradScaler
    from shardam.collection import EmbeddingCollection
    from shardam.embedding import Embedding
    from shardam.embedding_bag import EmbeddingBag
    from shardam.optimizer import SparseAdam

__version__ = "0.1.0"

__all__ = [
    "connect",
    "Cluster",
    "LocalCluster",
    "Table",
    "TableSpec",
    "TableInfo",
    "TableStats",
    "Rows",
    "PendingPull",
    "PushResult",
    "ExportReport",
    "ImportReport",
    "AdamOptions",
    "CheckpointJob",
    "CheckpointInfo",
    "RestoreReport",
    "TableReport",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingCollection",
    "SparseAdam",
    "GradScaler",
    "prefetch",
    "PhaseTimes",
    "timings_collector",
    "localize",
    "init",
    "errors",
    "__version__",
]


_NEED_TORCH = {
    "Embedding": "shardam.embedding",
    "EmbeddingBag": "shardam.embedding_bag",
    "EmbeddingCollection": "shardam.collection",
    "SparseAdam": "shardam.optimizer",
    "GradScaler": "shardam.amp",
    "localize": "shardam._localize",
    "prefetch": "shardam._prefetch",
}
"""Public name -> the module that has it."""


def __getattr__(name: str) -> object:
    """Imports the parts that need torch (2 s, 200 MB) when they are first asked for."""
    if name in _NEED_TORCH:
        return getattr(importlib.import_module(_NEED_TORCH[name]), name)
    raise AttributeError(f"module 'shardam' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
