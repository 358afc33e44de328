"""What a checkpoint is made of, as its manifest says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from shardam_kernels.factors import AdamOptions
from shardam_proto.schema import TableSpec


@dataclasses.dataclass(frozen=True)
class CheckpointFile:
    """A file.

    Attributes:
        name: relative to the checkpoint's folder; never a path out of it.
        size_bytes: its bytes.
        xxh3: xxh3_128 of its content, in hex.
        num_rows: rows in it.
    """

    name: str
    size_bytes: int
    xxh3: str
    num_rows: int = 0


@dataclasses.dataclass(frozen=True)
class ShardFiles:
    """What one shard wrote.

    Attributes:
        index: the shard.
        host_name: the host that wrote it.
        folder: the folder, as that host names it.
        change_number: its change number at the cut.
        files: its files, in order.
    """

    index: int
    host_name: str
    folder: str
    change_number: int
    files: tuple[CheckpointFile, ...]


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table at the cut.

    Attributes:
        spec: its schema.
        table_id: its id.
        table_seed: seed of its initial weights.
        step: t.
        num_rows: rows over all shards.
        last_options: hyper-parameters of its last push; None: there was none.
    """

    spec: TableSpec
    table_id: int
    table_seed: int
    step: int
    num_rows: int
    last_options: AdamOptions | None = None


@dataclasses.dataclass(frozen=True)
class Manifest:
    """All that is said of a checkpoint.

    Attributes:
        name: its name.
        checkpoint_id: random 63 bits, in each of its files, too.
        created_unix_s: when it was cut.
        seconds: how long it took from there.
        version: of the shardam package.
        cluster_name: name of the cluster.
        cluster_id: its id.
        seed: its cluster_seed.
        timeline: timeline of the state.
        epoch: route epoch.
        num_shards: shards that wrote it.
        tables: tables, by name.
        shards: what each shard wrote, by index.
        clients: client id -> last number, of all clients that were not over.
        extra: rank -> what its trainer added.
        group_step: step of the sync group whose members asked for it; zero: otherwise.
    """

    name: str
    checkpoint_id: int
    created_unix_s: float
    seconds: float
    version: str
    cluster_name: str
    cluster_id: str
    seed: int
    timeline: int
    epoch: int
    num_shards: int
    tables: tuple[StoredTable, ...]
    shards: tuple[ShardFiles, ...]
    clients: Mapping[bytes, int] = dataclasses.field(default_factory=dict)
    extra: Mapping[int, CheckpointFile] = dataclasses.field(default_factory=dict)
    group_step: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.size_bytes for shard in self.shards for file in shard.files) + sum(
            file.size_bytes for file in self.extra.values()
        )

    @property
    def num_rows(self) -> int:
        """Rows over all tables."""
        return sum(table.num_rows for table in self.tables)
