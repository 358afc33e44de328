"""`python -m shardam_testing.gated_shard shard ...`: a shard that writes no row of a checkpoint while a gate file exists.

The environment variable TEST_GATE names the file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

from shardam_proto.v1 import journal_pb2
from shardam_server.__main__ import main
from shardam_server.shard.checkpoints.segments import SegmentWriter
from shardam_server.shard.journal.interface import Arrays
from shardam_testing.waiting import wait_for

GATE = "TEST_GATE"
"""Environment variable with the gate's path."""

OPEN_TIMEOUT_S = 300.0
"""A test opens the gate within seconds."""

_add = SegmentWriter.add


def _wait_and_add(writer: SegmentWriter, record: journal_pb2.BaseRecord, arrays: Arrays = ()) -> int:
    gate = Path(os.environ[GATE])
    wait_for("the gate to open", lambda: not gate.exists(), OPEN_TIMEOUT_S)
    return _add(writer, record, arrays)


if __name__ == "__main__":
    with mock.patch.object(SegmentWriter, "add", _wait_and_add):
        sys.exit(main(sys.argv[1:]))
