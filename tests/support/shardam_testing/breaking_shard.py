"""`python -m shardam_testing.breaking_shard shard ...`: a shard whose memory fails in the second push to a certain table."""

from __future__ import annotations

import sys
from unittest import mock

from shardam_server.__main__ import main
from shardam_server.shard.table import StagedTableStep, Table

BREAKS = "breaks"
"""Name of the table."""

_apply = Table.apply


def _apply_or_break_off(table: Table, staged: StagedTableStep) -> None:
    _apply(table, staged)
    if table.spec.name == BREAKS and table.step == 2:
        raise RuntimeError("injected")


if __name__ == "__main__":
    with mock.patch.object(Table, "apply", _apply_or_break_off):
        sys.exit(main(sys.argv[1:]))
