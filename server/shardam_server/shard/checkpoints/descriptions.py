"""Checkpoints as messages describe them."""

from __future__ import annotations

from pathlib import Path

from shardam_proto.v1 import checkpoint_pb2, common_pb2
from shardam_server.shard.checkpoints.file_messages import encode_file, encode_shard
from shardam_server.shard.checkpoints.manifest import Manifest, StoredTable
from shardam_server.shard.option_messages import encode_options


def describe(manifest: Manifest, folder: Path, problem: str, *, whole: bool) -> checkpoint_pb2.CheckpointInfo:
    """Returns what is said of a checkpoint that has a manifest.

    Args:
        manifest: its manifest.
        folder: where it lies.
        problem: why it is not complete all the same; empty: it is.
        whole: with its tables and files.
    """
    info = checkpoint_pb2.CheckpointInfo(
        name=manifest.name,
        folder=str(folder),
        complete=not problem,
        problem=problem,
        created_unix_s=manifest.created_unix_s,
        cluster=manifest.cluster_name,
        timeline=manifest.timeline,
        num_shards=manifest.num_shards,
        num_rows=manifest.num_rows,
        size_bytes=manifest.size_bytes,
        extra=[
            checkpoint_pb2.CheckpointExtra(rank=rank, file=encode_file(manifest.extra[rank])) for rank in sorted(manifest.extra)
        ],
        version=manifest.version,
        group_step=manifest.group_step,
        seconds=manifest.seconds,
    )
    if whole:
        info.tables.extend(_table(table) for table in manifest.tables)
        info.shards.extend(map(encode_shard, manifest.shards))
    return info


def _table(table: StoredTable) -> common_pb2.TableInfo:
    info = common_pb2.TableInfo(
        spec=table.spec.to_proto(),
        table_id=table.table_id,
        table_seed=table.table_seed,
        table_step=table.step,
        num_rows=table.num_rows,
    )
    if table.last_options is not None:
        info.last_options.CopyFrom(encode_options(table.last_options))
    return info
