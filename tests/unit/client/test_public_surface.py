"""What `import shardam` offers and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import shardam
import shardam.errors
import shardam_proto.errors
from shardam_proto.errors import REASONS, ShardamError

NO_TORCH = """
import sys
import shardam
from shardam import Cluster, LocalCluster, Rows, Table, TableSpec, connect, errors, init
TableSpec("t", 4, init=init.Normal(0.0, 0.05))
assert dir(shardam) == sorted(shardam.__all__)
loaded = [name for name in sys.modules if name == "torch" or name.startswith("torch.")]
assert not loaded, loaded
assert shardam.Embedding.__name__ == "Embedding" and "torch" in sys.modules
"""


def test_all_lists_the_public_names() -> None:
    assert shardam.__all__ == [
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
    for name in shardam.__all__:
        assert getattr(shardam, name) is not None
    assert shardam.init.__all__[:5] == ["Normal", "Uniform", "Constant", "XavierUniform", "XavierNormal"]


def test_a_missing_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'DenseAdam'"):
        _ = shardam.DenseAdam


def test_import_connect_and_tables_do_not_load_torch() -> None:
    command = [sys.executable, "-W", "error", "-c", NO_TORCH]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_errors_are_the_whole_tree() -> None:
    tree, found = [ShardamError], {ShardamError.__name__}
    while tree:
        for error in tree.pop().__subclasses__():
            if error.__module__ == shardam_proto.errors.__name__:
                tree.append(error)
                found.add(error.__name__)
    assert set(shardam.errors.__all__) == found
    assert {rule.error.__name__ for rule in REASONS.values()} <= found
