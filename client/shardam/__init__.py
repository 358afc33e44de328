"""shardam's client: tables of embedding rows that live on shards, trained from PyTorch.

`connect`, `LocalCluster` and `Table` need no torch; `Embedding` and `SparseAdam` import it when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardam import errors, init
from shardam.cluster import Cluster, connect
from shardam.local import LocalCluster
from shardam.table import PushResult, Rows, Table, TableInfo, TableStats
from shardam_kernels.factors import AdamOptions
from shardam_proto.schema import TableSpec

if TYPE_CHECKING:
    from shardam.embedding import Embedding
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
    "PushResult",
    "AdamOptions",
    "Embedding",
    "SparseAdam",
    "init",
    "errors",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Imports the parts that need torch (2 s, 200 MB) when they are first asked for."""
    if name == "Embedding":
        from shardam.embedding import Embedding

        return Embedding
    if name == "SparseAdam":
        from shardam.optimizer import SparseAdam

        return SparseAdam
    raise AttributeError(f"module 'shardam' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
