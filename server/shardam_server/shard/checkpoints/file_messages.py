"""What a shard wrote, as messages and back."""

from __future__ import annotations

from shardam_proto.v1 import checkpoint_pb2
from shardam_server.shard.checkpoints.manifest import CheckpointFile, ShardFiles


def encode_file(file: CheckpointFile) -> checkpoint_pb2.CheckpointFile:
    """Converts a file."""
    return checkpoint_pb2.CheckpointFile(name=file.name, size_bytes=file.size_bytes, xxh3=file.xxh3, num_rows=file.num_rows)


def decode_file(message: checkpoint_pb2.CheckpointFile) -> CheckpointFile:
    """Converts a file."""
    return CheckpointFile(message.name, message.size_bytes, message.xxh3, message.num_rows)


def encode_shard(shard: ShardFiles) -> checkpoint_pb2.CheckpointShard:
    """Converts what a shard wrote."""
    return checkpoint_pb2.CheckpointShard(
        index=shard.index,
        host_name=shard.host_name,
        folder=shard.folder,
        change_number=shard.change_number,
        files=map(encode_file, shard.files),
    )


def decode_shard(message: checkpoint_pb2.CheckpointShard) -> ShardFiles:
    """Converts what a shard wrote."""
    return ShardFiles(
        index=message.index,
        host_name=message.host_name,
        folder=message.folder,
        change_number=message.change_number,
        files=tuple(map(decode_file, message.files)),
    )
