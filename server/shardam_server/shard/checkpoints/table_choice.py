"""Which tables a restore loads: what the caller asked for, held against what the checkpoint and the cluster have."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from shardam_proto.errors import CheckpointMismatch, SchemaMismatch
from shardam_proto.schema import TableSpec
from shardam_proto.v1 import checkpoint_pb2
from shardam_server.shard.checkpoints.manifest import Manifest


@dataclasses.dataclass(frozen=True)
class TableChoice:
    """What becomes of each table, by name.

    Attributes:
        load: loaded from the checkpoint.
        keep: stay as they are in the cluster.
        created: loaded, and the cluster did not have them.
        skipped: in the checkpoint and not loaded.
    """

    load: tuple[str, ...]
    keep: tuple[str, ...]
    created: tuple[str, ...]
    skipped: tuple[str, ...]


def choose_tables(manifest: Manifest, present: Mapping[str, TableSpec], options: checkpoint_pb2.RestoreOptions) -> TableChoice:
    """Decides what becomes of each table.

    Args:
        manifest: of the checkpoint.
        present: the cluster's tables.
        options: what the caller allows.

    Raises:
        CheckpointMismatch: tables are missing in the checkpoint or unexpected, and that was not allowed; all are listed.
        SchemaMismatch: a table to load is in the cluster with another schema.
    """
    stored = {table.spec.name: table.spec for table in manifest.tables}
    wanted = set(options.tables) or set(stored)
    _check_wanted(manifest.name, stored, wanted)
    if not options.tables and present:
        _check_sets(manifest.name, stored, present, options)
    for name in sorted(wanted & set(present)):
        if stored[name] != present[name]:
            raise SchemaMismatch(
                f"table {name!r} was saved in checkpoint {manifest.name!r} as {stored[name]}, and the cluster has it as "
                f"{present[name]}; restore other tables with tables=[...], or into a cluster without this one",
                metadata={"table": name, "saved": str(stored[name]), "present": str(present[name])},
            )
    return TableChoice(
        load=tuple(sorted(wanted)),
        keep=tuple(sorted(set(present) - wanted)),
        created=tuple(sorted(wanted - set(present))),
        skipped=tuple(sorted(set(stored) - wanted)),
    )


def _check_wanted(checkpoint: str, stored: Mapping[str, TableSpec], wanted: set[str]) -> None:
    unknown = wanted - set(stored)
    if unknown:
        raise CheckpointMismatch(
            f"checkpoint {checkpoint!r} has no table {_listed(unknown)}; it has {_listed(stored)}",
            metadata={"missing": ",".join(sorted(unknown))},
        )


def _check_sets(
    checkpoint: str,
    stored: Mapping[str, TableSpec],
    present: Mapping[str, TableSpec],
    options: checkpoint_pb2.RestoreOptions,
) -> None:
    missing, unexpected = set(present) - set(stored), set(stored) - set(present)
    refused_missing = missing and not options.allow_missing_tables
    refused_unexpected = unexpected and not options.allow_unexpected_tables
    if not refused_missing and not refused_unexpected:
        return
    remedies = [
        *(["allow_missing_tables keeps those that it lacks as they are"] if refused_missing else []),
        *(["allow_unexpected_tables creates those that the cluster lacks"] if refused_unexpected else []),
    ]
    raise CheckpointMismatch(
        f"checkpoint {checkpoint!r} has other tables than the cluster: missing in it are {_listed(missing)}, unexpected are "
        f"{_listed(unexpected)}; {'; '.join(remedies)}; tables=[...] loads those named alone",
        metadata={"missing": ",".join(sorted(missing)), "unexpected": ",".join(sorted(unexpected))},
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"
