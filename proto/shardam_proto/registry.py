"""What a cluster keeps in Redis, and how it is read: names, addresses, the route map, table schemas.

Redis holds no rows and is never on the pull or push path. Writers (shards) live in the server; this module is the one
place that knows keys and values.
"""

from __future__ import annotations

import dataclasses
import json

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shardam_proto.errors import RedisUnreachable
from shardam_proto.routing import RouteMap
from shardam_proto.schema import check_name

REDIS_TIMEOUT_S = 3.0
"""A Redis call that takes longer has failed; callers retry by their own rules."""


@dataclasses.dataclass(frozen=True)
class Keys:
    """Redis keys of one cluster.

    Raises:
        BadOption: the cluster's name is outside the alphabet.
    """

    cluster: str

    def __post_init__(self) -> None:
        check_name(self.cluster, "cluster name")

    @property
    def cluster_entry(self) -> str:
        """String: ClusterEntry as JSON, written once."""
        return f"shardam:{self.cluster}:cluster"

    @property
    def route_map(self) -> str:
        """String: RouteMap as JSON, written once all shards are registered."""
        return f"shardam:{self.cluster}:map"

    @property
    def tables(self) -> str:
        """Hash: table name -> TableInfo (protobuf bytes, schema part only)."""
        return f"shardam:{self.cluster}:tables"

    def shard(self, index: int) -> str:
        """String with a time to live: ShardEntry as JSON; the lease of the shard's name."""
        return f"shardam:{self.cluster}:shard:{index}"

    @property
    def plan(self) -> str:
        """String: Plan as JSON, the last one; a shard whose state is before it takes its checkpoint over."""
        return f"shardam:{self.cluster}:plan"

    @property
    def lineages(self) -> str:
        """Hash: shard index -> lineage of the state that it serves, to notice a shard that comes back without it."""
        return f"shardam:{self.cluster}:lineages"

    @property
    def marks(self) -> str:
        """Hash: shard index -> lineage:change number, the highest that its folder held, to notice an older copy of it."""
        return f"shardam:{self.cluster}:marks"

    def move(self, hold_id: int) -> str:
        """String with a time to live: while it is there a move to other shards may be decided under a final hold.

        Its value is a JSON list, by shard, of how ShardEntry.to_json writes the incarnations that were cut.
        """
        return f"shardam:{self.cluster}:move:{hold_id}"

    def given_rows(self, table_id: int) -> str:
        """String with a time to live: the lease of the one client that writes a table's given (pretrained) rows."""
        return f"shardam:{self.cluster}:given_rows:{table_id}"


@dataclasses.dataclass(frozen=True)
class ClusterEntry:
    """A cluster as it was created.

    Attributes:
        cluster_id: random hex digits.
        num_shards: number of shards it was configured with.
        seed: cluster_seed of the initial weights.
    """

    cluster_id: str
    num_shards: int
    seed: int

    def to_json(self) -> str:
        """Returns the value stored in Redis."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ClusterEntry:
        """Reads the value stored in Redis."""
        return cls(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checkpoint that the whole cluster goes on from: a restore's on a new timeline, a reshard's in a new route epoch.

    Once it is in Redis it is decided. A shard whose state has a lower timeline or epoch takes its share of the checkpoint over;
    one that has done so says so by its lineage, and all serve once all have one.

    Attributes:
        plan_id: random hex digits.
        timeline: timeline of the state from here on.
        epoch: epoch of the route map from here on.
        num_shards: shards from here on.
        seed: cluster_seed from here on, the checkpoint's.
        folder: the checkpoint's folder, relative to the root folder.
        checkpoint_id: id in its manifest and files.
        keep_clients: clients and groups go on with their numbers (a reshard).
        weights_only: moments and steps begin anew.
        read_only: all tables that are loaded refuse changes.
        read_only_tables: of those, tables that refuse them in any case, by name.
        load: tables to load, by name.
        keep: tables that stay as they are, by name.
        created: tables to load that the cluster did not have.
    """

    plan_id: str
    timeline: int
    epoch: int
    num_shards: int
    seed: int
    folder: str
    checkpoint_id: int
    keep_clients: bool = False
    weights_only: bool = False
    read_only: bool = False
    load: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()
    created: tuple[str, ...] = ()
    read_only_tables: tuple[str, ...] = ()

    def makes_read_only(self, table: str) -> bool:
        """True: a table that it loads refuses changes from here on."""
        return self.read_only or table in self.read_only_tables

    def is_ahead_of(self, timeline: int, epoch: int) -> bool:
        """True: a state of this timeline and epoch is from before the plan."""
        return self.timeline > timeline or (self.timeline == timeline and self.epoch > epoch)

    def to_json(self) -> str:
        """Returns the value stored in Redis."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads the value stored in Redis."""
        values = json.loads(text)
        return cls(**{**values, **{name: tuple(values[name]) for name in ("load", "keep", "created", "read_only_tables")}})


@dataclasses.dataclass(frozen=True)
class ShardEntry:
    """A registered shard.

    Attributes:
        index: shard index; 0 is home.
        address: host:port of its gRPC server, as clients reach it.
        http_address: host:port of its metrics and health listener.
        incarnation: random number of the process life.
        lineage: lineage of its state; 0: it has none yet, or has lost it.
        device: device that holds its rows, e.g. "cpu".
        pid: process id on its host.
        ready: True: it serves.
        lost: True: it came back without the state that the cluster knows it had, and serves nothing.
        folder: which folder's lock it holds; a copy of the folder is another one. Empty: none.
    """

    index: int
    address: str
    http_address: str
    incarnation: int
    lineage: int
    device: str
    pid: int
    ready: bool
    lost: bool = False
    folder: str = ""

    def to_json(self) -> str:
        """Returns the value stored in Redis."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ShardEntry:
        """Reads the value stored in Redis."""
        return cls(**json.loads(text))


def lost_shard_problem(index: int) -> str:
    """Says that a shard is LOST and what to do about it."""
    return f"shard {index} {lost_shard_words(index)}"


def lost_shard_words(index: int) -> str:
    """Says the same in words that follow the shard's name."""
    return (
        "is LOST: it started without the rows that the cluster knows it had. Start it with its own data folder, restore a "
        f"checkpoint, or give its rows up with `shardam forget-shard --index {index}` and train again"
    )


def route_map_to_json(route_map: RouteMap) -> str:
    """Returns the value stored in Redis."""
    return json.dumps(dataclasses.asdict(route_map))


def route_map_from_json(text: str | bytes) -> RouteMap:
    """Reads the value stored in Redis.

    Raises:
        ValueError: the map was made by an unknown routing version.
    """
    return RouteMap(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class ClusterView:
    """What Redis says of a cluster at one moment.

    Attributes:
        entry: the cluster, or None before home has created it.
        route_map: the route map, or None until all shards are registered.
        shards: registered shards by index; a shard whose lease ran out is missing.
    """

    entry: ClusterEntry | None
    route_map: RouteMap | None
    shards: dict[int, ShardEntry]


def connect_redis(url: str, timeout_s: float = REDIS_TIMEOUT_S) -> redis.Redis:
    """Returns a Redis client that fails fast and never repeats a command by itself.

    Args:
        url: redis://[[user]:password@]host:port/db, rediss:// or unix://.
        timeout_s: seconds until a call has failed.

    Raises:
        RedisUnreachable: the URL is not of this form.
    """
    try:
        return redis.Redis.from_url(
            url,
            socket_timeout=timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # a repeated command could act twice; the callers' loops decide
            decode_responses=False,
        )
    except ValueError as error:
        raise RedisUnreachable(
            f"{display_url(url)!r} is no Redis URL ({error}); use redis://[:password@]host:port/db"
        ) from error


def display_url(url: str) -> str:
    """Returns the URL without its password, for messages."""
    scheme, _, rest = url.partition("://")
    credentials, at, location = rest.rpartition("@")
    if not at:
        return url
    user = credentials.split(":", 1)[0]
    return f"{scheme}://{user}:***@{location}"


def read_cluster(connection: redis.Redis, keys: Keys) -> ClusterView:
    """Reads a cluster's entry, map and registered shards.

    Raises:
        RedisUnreachable: Redis did not answer.
    """
    try:
        entry_text, map_text = connection.mget(keys.cluster_entry, keys.route_map)
        entry = None if entry_text is None else ClusterEntry.from_json(entry_text)
        shards: dict[int, ShardEntry] = {}
        if entry is not None:
            values = connection.mget([keys.shard(index) for index in range(entry.num_shards)])
            found = [ShardEntry.from_json(value) for value in values if value is not None]
            shards = {shard.index: shard for shard in found}
    except redis.AuthenticationError as error:
        raise RedisUnreachable(
            f"Redis refused the credentials ({error}): put the right ones into its URL, redis://[user]:password@host:port/db"
        ) from error
    except redis.RedisError as error:
        raise RedisUnreachable(f"Redis did not answer ({error}): check the URL and that it runs") from error
    return ClusterView(entry, None if map_text is None else route_map_from_json(map_text), shards)
