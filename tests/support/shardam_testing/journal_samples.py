"""Small folders of shards, one set for each format that was ever released, with the values that must come back from them.

Usage: PYTHONPATH=tests/support python -m shardam_testing.journal_samples

Makes the set of the present format and arithmetic below tests/durability/data. A set is made once: what a later program reads
must have been written by the program of its time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shardam_server.shard.journal.frames import ARITHMETIC_VERSION, FORMAT_VERSION
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table
from shardam_testing.shard_histories import abandon, begin_store, every_change, new_state, write_base

SAMPLES = Path(__file__).resolve().parents[2] / "durability" / "data"

BASE_AFTER = {"journal alone": None, "base alone": 29, "base and journal": 14}
"""Sample -> changes after which its base is written."""


def describe(state: ShardState) -> dict[str, object]:
    """All of a state as JSON has it; floats by their bits."""
    clients = {
        client_id.decode(): {
            "last_number": entry.last_number,
            "flags": [entry.closed, entry.settled, entry.heartbeats],
            "outcomes": {
                str(number): [digest.decode(), {str(key): step for key, step in outcome.steps.items()}, outcome.num_rows]
                for number, (digest, outcome) in entry.outcomes.items()
            },
        }
        for client_id, entry in state.clients
    }
    tables = {table.spec.name: _describe_table(table) for table in state.tables()}
    return {"change_number": state.change_number, "clients": clients, "tables": tables}


def _describe_table(table: Table) -> dict[str, object]:
    row_ids, _ = table.storage.scan(0, 10**6)
    row_ids.sort()
    batch = table.read(row_ids, include_optimizer=True)
    assert batch.exp_avg is not None
    assert batch.exp_avg_sq is not None
    rows = {
        str(row_id): [
            *(part[place].tobytes().hex() for part in (batch.weight, batch.exp_avg, batch.exp_avg_sq)),
            *(int(part[place]) for part in (batch.step, batch.last_touched_step, batch.change_number)),
        ]
        for place, row_id in enumerate(row_ids.tolist())
    }
    options = table.last_options
    return {
        "table_step": table.step,
        "saturated_values": table.storage.saturated_values,
        "last_lr": None if options is None else options.lr,
        "rows": rows,
    }


def make_samples(folder: Path) -> None:
    """Writes the samples into a new folder."""
    for name, base_after in BASE_AFTER.items():
        state = new_state()
        store = begin_store(folder / name, state)
        for number, change in enumerate(every_change(), start=1):
            change(state)
            if number == base_after:
                write_base(store)
        abandon(store)
        (store.path / "LOCK").unlink()
    (folder / "expected.json").write_text(json.dumps(describe(state), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    target = SAMPLES / f"format-{FORMAT_VERSION}-arithmetic-{ARITHMETIC_VERSION}"
    if target.exists():
        sys.exit(f"{target} was made by the program of its time and is not made again")
    make_samples(target)
