"""What a checkpoint is made of, as its manifest says it; the manifest is JSON, and not trusted when it is read."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

import xxhash
from google.protobuf import json_format

from shardam_kernels.factors import AdamOptions
from shardam_proto.errors import ShardamError, VersionMismatch
from shardam_proto.routing import NUM_BUCKETS
from shardam_proto.schema import TableSpec, check_name
from shardam_proto.v1 import common_pb2
from shardam_server.shard.checkpoints.file_names import extra_name, segment_name
from shardam_server.shard.checkpoints.json_fields import Fields, damaged, parse_object
from shardam_server.shard.journal.frames import ARITHMETIC_VERSION
from shardam_server.shard.option_messages import decode_options, encode_options
from shardam_server.shard.pre_images import row_bytes

FORMAT_VERSION = 1
"""Form of a checkpoint's files and manifest, and meaning of their messages; another one is refused. It knows no increments: a
checkpoint has all rows, and a manifest that names another one is refused for a field that is not known."""

MAX_MANIFEST_BYTES = 64 * 2**20
"""Bytes of a manifest that are read at most: 65,536 clients, as many as a shard keeps, take 4 MB."""

MAX_TEXT = 4096
"""Characters of a folder's name, and more than any other text has."""

_MAX_COUNT = 2**63 - 1
"""Rows, bytes, ids and seeds are below it, so that sums and products stay exact."""

_XXH3_128 = re.compile(r"[0-9a-f]{32}")
_CLIENT_ID = re.compile(r"(?:[0-9a-f]{2}){1,64}")


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
        arithmetic: version of what a push computes, by which the state came about.
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
    arithmetic: int = ARITHMETIC_VERSION

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

    @property
    def change_number(self) -> int:
        """Highest change number of a shard at the cut."""
        return max(shard.change_number for shard in self.shards)

    def check_arithmetic(self, *, accept: bool = False) -> None:
        """Refuses a state that older arithmetic led to, unless that is accepted.

        Raises:
            VersionMismatch: steps from here on have other bits than they would have had.
        """
        if self.arithmetic != ARITHMETIC_VERSION and not accept:
            raise VersionMismatch(
                f"checkpoint {self.name!r} was made with arithmetic version {self.arithmetic}, this shardam has "
                f"{ARITHMETIC_VERSION}: steps may come out with other bits. Restore it with accept_arithmetic_change "
                f"(--accept-arithmetic-change), or use shardam {self.version}, which made it",
                metadata={"found": str(self.arithmetic), "known": str(ARITHMETIC_VERSION)},
            )

    def to_json(self) -> str:
        """Returns the file's content."""
        content = {
            "format": FORMAT_VERSION,
            **dataclasses.asdict(self),
            "checkpoint_id": f"{self.checkpoint_id:016x}",
            "tables": [_table_to_json(table) for table in self.tables],
            "clients": {client_id.hex(): number for client_id, number in self.clients.items()},
            "extra": [{"rank": rank, "file": dataclasses.asdict(file)} for rank, file in sorted(self.extra.items())],
        }
        return json.dumps({"checksum": _checksum(content), "content": content}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, path: Path) -> Self:
        """Reads the file's content; an arithmetic version older than this program's is for check_arithmetic to refuse.

        Args:
            text: the content.
            path: the file, for messages.

        Raises:
            CheckpointDamaged: it is not as it was written.
            VersionMismatch: a newer shardam wrote it, or one that has another format.
        """
        outer = Fields(parse_object(text, path), "the manifest", path)
        content, checksum = outer.object("content"), outer.take("checksum")
        if checksum != _checksum(content):
            raise damaged(path, "its checksum does not match its content")
        fields = Fields(content, "the manifest", path)
        _check_format(fields, path)
        num_shards = fields.integer("num_shards", 1, NUM_BUCKETS)
        manifest = cls(
            name=_name(fields, "name"),
            checkpoint_id=_id_from_hex(fields),
            created_unix_s=fields.seconds("created_unix_s"),
            seconds=fields.seconds("seconds"),
            version=fields.text("version", MAX_TEXT),
            cluster_name=_name(fields, "cluster_name"),
            cluster_id=fields.text("cluster_id", MAX_TEXT),
            seed=fields.integer("seed", 0, 2**64 - 1),
            timeline=fields.integer("timeline", 0, _MAX_COUNT),
            epoch=fields.integer("epoch", 0, _MAX_COUNT),
            num_shards=num_shards,
            tables=tuple(map(_table_from_json, fields.objects("tables"))),
            shards=tuple(_shard_from_json(one, num_shards) for one in fields.objects("shards")),
            clients=_clients_from_json(fields),
            extra=_extra_from_json(fields),
            group_step=fields.integer("group_step", 0, _MAX_COUNT),
            arithmetic=fields.integer("arithmetic", 0, ARITHMETIC_VERSION),
        )
        fields.finish()
        outer.finish()
        _check_sums(manifest, fields)
        return manifest


def _checksum(content: Mapping[str, object]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return xxhash.xxh3_64_hexdigest(canonical.encode())


def _check_format(fields: Fields, path: Path) -> None:
    for name, known in (("format", FORMAT_VERSION), ("arithmetic", ARITHMETIC_VERSION)):
        found = fields.integer(name, 0, _MAX_COUNT)
        if found > known or (name == "format" and found != known):
            raise VersionMismatch(
                f"{path} has {name} version {found}, this shardam knows {known}; use a shardam that knows it, as the one that "
                "wrote it does",
                metadata={"file": str(path), "found": str(found), "known": str(known)},
            )


def _name(fields: Fields, field: str) -> str:
    try:
        return check_name(fields.text(field, MAX_TEXT), field)
    except ShardamError as error:
        raise fields.damaged(error.message) from error


def _id_from_hex(fields: Fields) -> int:
    text = fields.text("checkpoint_id", MAX_TEXT)
    if not re.fullmatch(r"[0-7][0-9a-f]{15}", text):
        raise fields.damaged("checkpoint_id is not a 63-bit number in hex")
    return int(text, 16)


def _table_to_json(table: StoredTable) -> dict[str, object]:
    spec = json_format.MessageToDict(table.spec.to_proto(), preserving_proto_field_name=True)
    options = table.last_options and json_format.MessageToDict(
        encode_options(table.last_options), preserving_proto_field_name=True
    )
    return {**dataclasses.asdict(table), "spec": spec, "last_options": options}


def _table_from_json(fields: Fields) -> StoredTable:
    try:
        spec = TableSpec.from_proto(json_format.ParseDict(dict(fields.object("spec")), common_pb2.TableSpec()))
        options = None
        if fields.take("last_options") is not None:
            message = json_format.ParseDict(dict(fields.object("last_options")), common_pb2.AdamOptions())
            if not all(math.isfinite(value) for _, value in message.ListFields()):
                raise fields.damaged("last_options has a number that is not finite")
            options = decode_options(message)
    except (json_format.ParseError, ShardamError) as error:
        raise fields.damaged(str(error)) from error
    table = StoredTable(
        spec=spec,
        table_id=fields.integer("table_id", 1, _MAX_COUNT),
        table_seed=fields.integer("table_seed", 0, 2**64 - 1),
        step=fields.integer("step", 0, _MAX_COUNT),
        num_rows=fields.integer("num_rows", 0, _MAX_COUNT if spec.num_embeddings is None else spec.num_embeddings),
        last_options=options,
    )
    fields.finish()
    return table


def _file_from_json(fields: Fields, name: str) -> CheckpointFile:
    file = CheckpointFile(
        name=fields.text("name", MAX_TEXT),
        size_bytes=fields.integer("size_bytes", 0, _MAX_COUNT),
        xxh3=fields.text("xxh3", MAX_TEXT),
        num_rows=fields.integer("num_rows", 0, _MAX_COUNT),
    )
    if file.name != name:
        raise fields.damaged(f"the name is {file.name[:200]!r}, it should be {name!r}")
    if not _XXH3_128.fullmatch(file.xxh3):
        raise fields.damaged("xxh3 is not 32 hex digits")
    fields.finish()
    return file


def _shard_from_json(fields: Fields, num_shards: int) -> ShardFiles:
    index = fields.integer("index", 0, num_shards - 1)
    files = fields.objects("files")
    shard = ShardFiles(
        index=index,
        host_name=fields.text("host_name", MAX_TEXT),
        folder=fields.text("folder", MAX_TEXT),
        change_number=fields.integer("change_number", 0, _MAX_COUNT),
        files=tuple(_file_from_json(file, segment_name(index, num_shards, place)) for place, file in enumerate(files)),
    )
    fields.finish()
    return shard


def _clients_from_json(fields: Fields) -> dict[bytes, int]:
    clients = Fields(fields.object("clients"), "clients", fields.path)
    for client_id in clients.names():
        if not _CLIENT_ID.fullmatch(client_id):
            raise clients.damaged(f"{client_id[:200]!r} is no client id in hex")
    return {bytes.fromhex(client_id): clients.integer(client_id, 0, _MAX_COUNT) for client_id in clients.names()}


def _extra_from_json(fields: Fields) -> dict[int, CheckpointFile]:
    extra = {}
    for one in fields.objects("extra"):
        rank = one.integer("rank", 0, 2**32 - 1)
        extra[rank] = _file_from_json(Fields(one.object("file"), f"extra of rank {rank}", fields.path), extra_name(rank))
        one.finish()
    return extra


def _check_sums(manifest: Manifest, fields: Fields) -> None:
    """Refuses parts that do not go together; what is left allocates no more than the files' bytes allow."""
    if [shard.index for shard in manifest.shards] != list(range(manifest.num_shards)):
        raise fields.damaged(f"it should list the files of shards 0 to {manifest.num_shards - 1}, each once and in order")
    for shard in manifest.shards:
        if not shard.files or shard.files[-1].num_rows:
            raise fields.damaged(f"shard {shard.index} lacks the file without rows that ends its part")
    _check_distinct(fields, "name", (table.spec.name for table in manifest.tables))
    _check_distinct(fields, "id", (table.table_id for table in manifest.tables))
    smallest = min((row_bytes(table.spec.dim) for table in manifest.tables), default=1)
    files = [file for shard in manifest.shards for file in shard.files]
    for file in files:
        if file.num_rows * smallest > file.size_bytes:
            raise fields.damaged(f"{file.name} cannot have {file.num_rows} rows in {file.size_bytes} bytes")
    in_files = sum(file.num_rows for file in files)
    if in_files != manifest.num_rows:
        raise fields.damaged(f"its tables have {manifest.num_rows} rows, its files {in_files}")


def _check_distinct(fields: Fields, what: str, values: Iterable[object]) -> None:
    listed = list(values)
    if len(set(listed)) != len(listed):
        raise fields.damaged(f"two tables have the same {what}")
