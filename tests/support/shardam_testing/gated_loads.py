"""`python -m shardam_testing.gated_loads shard ...`: a shard that loads no checkpoint while there is a gate beside it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest import mock

from shardam_proto.registry import Plan
from shardam_server.__main__ import main
from shardam_server.shard.checkpoints import assembly, loading
from shardam_server.shard.checkpoints.manifest import Manifest
from shardam_server.shard.checkpoints.tasks import Progress
from shardam_server.shard.state import ShardState
from shardam_server.shard.storage import MakeRecords

GATE = "GATE"
"""Name of the file beside checkpoints' folders."""

LOOK_S = 0.02

_load = loading.load


def _load_behind_gate(
    state: ShardState,
    manifest: Manifest,
    folder: Path,
    plan: Plan,
    index: int,
    make_records: MakeRecords,
    progress: Progress,
) -> None:
    while (folder.parent / GATE).exists():
        progress.add(0)
        time.sleep(LOOK_S)
    _load(state, manifest, folder, plan, index, make_records, progress)


if __name__ == "__main__":
    with mock.patch.object(assembly, "load", _load_behind_gate):
        sys.exit(main(sys.argv[1:]))
