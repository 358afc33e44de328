"""Small folders of shards, one set for each format that was ever released, with the values that must come back from them.

Usage: PYTHONPATH=tests/support python -m shardam_testing.journal_samples

Makes the newest set below tests/durability/data: of the present format and arithmetic, with the records of groups of workers,
which came to the format after its first set. A set is made once: what a later program reads must have been written by the
program of its time.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from shardam_server.shard.clients import ClientEntry
from shardam_server.shard.groups.entries import GroupEntry, StagedPart
from shardam_server.shard.journal.frames import ARITHMETIC_VERSION, FORMAT_VERSION
from shardam_server.shard.state import ShardState
from shardam_server.shard.table import Table
from shardam_testing.group_changes import SYNC, members, part
from shardam_testing.shard_histories import abandon, begin_store, every_change, new_state, write_base
from shardam_testing.state_changes import Change

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SAMPLES = Path(__file__).resolve().parents[2] / "durability" / "data"

NEWEST = f"format-{FORMAT_VERSION}-arithmetic-{ARITHMETIC_VERSION}-groups"
"""Name of the set that this program makes."""


def sample_changes() -> list[Change]:
    """A history with every kind of change, that ends with a group of which one part is staged."""
    rng = np.random.default_rng(6)
    ending = [members(SYNC, 4, 1), part(rng, 1, "words", "users", "tags")]
    return [*every_change(), *ending]


NUM_CHANGES = len(sample_changes())

BASE_AFTER = {"journal alone": None, "base alone": NUM_CHANGES, "base and journal": NUM_CHANGES // 2}
"""Sample -> changes after which its base is written."""


def describe(state: ShardState) -> dict[str, object]:
    """All of a state as JSON has it; floats by their bits. What only groups have is left out where there are none."""
    clients = {client_id.decode(): _describe_client(entry) for client_id, entry in state.clients}
    tables = {table.spec.name: _describe_table(table) for table in state.tables()}
    described = {"change_number": state.change_number, "clients": clients, "tables": tables}
    groups = {entry.group.name: _describe_group(entry) for entry in state.groups}
    return described | ({"groups": groups, "parts": [_describe_part(one) for one in state.groups.parts()]} if groups else {})


def _describe_client(entry: ClientEntry) -> dict[str, object]:
    described: dict[str, object] = {
        "last_number": entry.last_number,
        "flags": [entry.closed, entry.settled, entry.heartbeats],
        "outcomes": {
            str(number): [
                digest.decode(),
                {str(key): step for key, step in outcome.steps.items()},
                outcome.num_rows,
                *([] if outcome.result is None else [_plain(outcome.result)]),
            ]
            for number, (digest, outcome) in entry.outcomes.items()
        },
    }
    return described | ({"clock": entry.clock} if entry.clock else {})


def _describe_group(entry: GroupEntry) -> dict[str, object]:
    return {"group": _plain(entry.group), "step": entry.step, "decision": entry.decision and _plain(entry.decision)}


def _describe_part(part: StagedPart) -> dict[str, object]:
    tables = {
        str(table_id): [one.row_ids.tolist(), one.gradients.tobytes().hex(), one.hyper_parameters, one.peak]
        for table_id, one in part.tables.items()
    }
    return {"origin": _plain(part.origin), "step": [part.group, part.step, part.rank, part.kind], "tables": tables}


def _plain(value: DataclassInstance) -> object:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(value), default=bytes.decode))


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
        for number, change in enumerate(sample_changes(), start=1):
            change(state)
            if number == base_after:
                write_base(store)
        abandon(store)
        (store.path / "LOCK").unlink()
    (folder / "expected.json").write_text(json.dumps(describe(state), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    target = SAMPLES / NEWEST
    if target.exists():
        sys.exit(f"{target} was made by the program of its time and is not made again")
    make_samples(target)
