"""Settings of every process: one frozen class per command, read once from flags and environment.

A field is a flag in kebab-case and the environment name SHARDAM_<FIELD>; flags win (flags.py). The fields say units, bounds and
what a value means; `--help` is generated from them. Nothing else reads the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from redis.connection import parse_url

from shardam_proto import channels
from shardam_proto.errors import BadToken
from shardam_proto.registry import REDIS_TIMEOUT_S
from shardam_proto.routing import NUM_BUCKETS
from shardam_proto.schema import check_name
from shardam_server.data_folder import absolute_data_dir, default_data_dir
from shardam_server.devices import check_device_name

ENV_PREFIX = "SHARDAM_"
"""Every environment name starts with it."""

LIFELINE_VARIABLE = "SHARDAM_LIFELINE"
"""Set to `stdin` by a parent that holds the other end of the child's stdin (children.py); no setting of a user."""

DEFAULT_PORT = 7070
"""Shard I listens on this port + I unless told otherwise."""

_MAX_UINT64 = 2**64 - 1


def _check_cluster(name: str) -> str:
    check_name(name, "cluster name")
    return name


def _check_redis(url: str) -> str:
    if not url.startswith(("redis://", "rediss://", "unix://")):
        raise ValueError("not a Redis URL; use redis://[:password@]host:port/db, rediss:// or unix://")
    try:
        parse_url(url)  # type: ignore[no-untyped-call]
    except ValueError as error:
        raise ValueError(f"not a Redis URL ({error}); use redis://[:password@]host:port/db") from None
    return url


def _check_host(host: str) -> str:
    if not host or any(character.isspace() for character in host):
        raise ValueError("not a host; use a name or an address such as 127.0.0.1 or 0.0.0.0")
    return host


def _check_address(address: str) -> str:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise ValueError("not HOST:PORT; use for example shard-0.example:7070 or [::1]:7070")
    return address


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _read_data_dir(value: object) -> object:
    if value == "":
        raise ValueError("must be a folder, or none for memory only")
    return None if isinstance(value, str) and value.lower() == "none" else value


def check_token(token: str) -> str:
    """Returns the token if it can travel in a header.

    Raises:
        ValueError: it is empty or holds anything but visible ASCII.
    """
    try:
        return channels.check_token(token)
    except BadToken as error:
        raise ValueError(error.message) from error


def _check_secret(token: SecretStr) -> SecretStr:
    check_token(token.get_secret_value())
    return token


Host = Annotated[str, AfterValidator(_check_host)]
Port = Annotated[int, Field(ge=0, le=65_535)]
Device = Annotated[str, AfterValidator(check_device_name)]
RedisUrl = Annotated[str, AfterValidator(_check_redis)]
Seed = Annotated[int, Field(ge=0, le=_MAX_UINT64)]
Threads = Annotated[int, Field(ge=1, le=256)]
LeaseSeconds = Annotated[float, Field(ge=0.1, le=300)]
DrainSeconds = Annotated[float, Field(ge=0, le=3600)]
TimeoutSeconds = Annotated[float, Field(gt=0, le=3600)]

_DEVICE = (
    "where rows live: auto, cpu or cuda:N. auto spreads shards over the visible GPUs, else takes the CPU, and says "
    "which and why; a GPU that is named is never replaced"
)
_SEED = "seed of the initial weights, kept when the cluster is created; another one is refused after that"
_MAX_ROWS = "rows that one shard may hold over all tables; 0 = no limit. A push that would create more is refused"
_THREADS = "threads that one shard's kernels use for one request"
_LEASE = "seconds for which a shard's name in Redis outlives its last renewal"
_DRAIN = "seconds that a stopping process may take to finish what it has accepted"


class CommonSettings(BaseSettings):
    """What every process knows.

    Attributes:
        token: secret that every RPC and route but health must carry; None: no token.
    """

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,  # compose files pass unset variables on as empty ones
        validate_by_name=True,
        validate_by_alias=True,
        loc_by_alias=False,
    )

    cluster: Annotated[str, AfterValidator(_check_cluster)] = Field(
        "default", description="name of the cluster: up to 128 of A-Z a-z 0-9 _ . -; prefixes every key in Redis"
    )
    token: Annotated[SecretStr, AfterValidator(_check_secret)] | None = Field(
        None, description="secret that every RPC and route but health must carry"
    )
    token_file: Path | None = Field(
        None, description="file that holds the token (a flag with the token itself would show in the list of processes)"
    )
    redis_timeout_s: TimeoutSeconds = Field(REDIS_TIMEOUT_S, description="seconds until a Redis call has failed")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = Field(
        "info", description="least severe level that is logged"
    )
    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = Field(
        "text", description="form of a log line: text or one JSON object; logs go to stderr"
    )

    @model_validator(mode="after")
    def _read_token_file(self) -> Self:
        if self.token_file is None:
            return self
        try:
            text = self.token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--token-file {self.token_file}: cannot be read: {error}") from error
        try:
            secret = SecretStr(check_token(text))
        except ValueError as error:
            raise ValueError(f"--token-file {self.token_file}: {error}") from None
        if self.token is not None and self.token != secret:
            raise ValueError("--token-file and SHARDAM_TOKEN give different tokens; keep one")
        object.__setattr__(self, "token", secret)  # the class is frozen for everyone else
        return self

    @property
    def plain_token(self) -> str | None:
        """The token as text, for headers only; never for messages."""
        return None if self.token is None else self.token.get_secret_value()


class StateSettings(CommonSettings):
    """How a shard keeps its state, and how much it takes on.

    Attributes:
        data_dir: folder that holds the state of shards; None: memory only.
        journal: how changes are kept; None: write with a data folder, off without (see `journal_mode`).
    """

    data_dir: Annotated[Path | None, BeforeValidator(_read_data_dir)] = Field(
        None,
        description="folder for journals and bases, one below it for each cluster and shard; none = rows live in memory only",
    )
    journal: Annotated[Literal["off", "write", "fsync"] | None, BeforeValidator(_lower)] = Field(
        None,
        description="off: a killed shard loses its rows; write: it loses nothing acknowledged; fsync: nor does a power loss. "
        "Without it: write with a data folder, off without",
    )
    on_journal_full: Annotated[Literal["suspend", "refuse"], BeforeValidator(_lower)] = Field(
        "suspend",
        description="when the journal's disk is full: suspend = go on without a journal (DEGRADED) until there is space for a "
        "new base; refuse = refuse changes",
    )
    journal_limit_mib: Annotated[int, Field(ge=1, le=2**20)] = Field(
        1024,
        description="size of a journal in MiB at which the shard writes a new base and starts the journal anew; if its last "
        "base is larger, that one's size",
    )
    truncate_journal: bool = Field(
        False, description="start from a damaged or incomplete journal as far as it can be read; what follows is lost"
    )
    client_lease_s: Annotated[float, Field(ge=0.1, le=3600)] = Field(
        30.0, description="silence in seconds after which a client counts as gone and its half-sent push is settled"
    )
    step_timeout_s: Annotated[float, Field(ge=0.1, le=86_400)] = Field(
        600.0,
        description="seconds that a step of a sync group waits for its ranks once one has arrived; then it is refused, and the "
        "error names the missing ranks",
    )
    max_queue_mib: Annotated[int, Field(ge=1, le=2**20)] = Field(
        256, description="MiB of changes that may wait to be applied; beyond, streams are not read and calls are refused"
    )
    max_reserved_mib: Annotated[int, Field(ge=1, le=2**20)] = Field(
        512, description="MiB that pushes may reserve which arrive in chunks; one that does not fit is refused"
    )
    max_parked: Annotated[int, Field(ge=1, le=2**20)] = Field(
        1024, description="requests on streams that may wait for something; one more is refused"
    )
    max_clients: Annotated[int, Field(ge=1, le=2**24)] = Field(
        65_536, description="clients that a shard remembers; closed ones are forgotten first"
    )

    @property
    def journal_mode(self) -> Literal["off", "write", "fsync"]:
        """How changes are kept."""
        if self.journal is not None:
            return self.journal
        return "off" if self.data_dir is None else "write"

    @model_validator(mode="after")
    def _check_journal(self) -> Self:
        if self.data_dir is not None:
            return self
        if self.journal in ("write", "fsync"):
            raise ValueError(f"--journal {self.journal} needs --data-dir, the folder to keep it in")
        given = {
            "--on-journal-full": "on_journal_full" in self.model_fields_set,
            "--journal-limit-mib": "journal_limit_mib" in self.model_fields_set,
            "--truncate-journal": self.truncate_journal,
        }
        flags = [flag for flag, is_given in given.items() if is_given]
        if flags:
            names = " and ".join(f"{flag} ({ENV_PREFIX}{flag[2:].replace('-', '_').upper()})" for flag in flags)
            raise ValueError(
                f"without --data-dir there is no journal, so {names} would do nothing: name a folder, or leave it out"
            )
        return self


class MemberSettings(CommonSettings):
    """What every process knows that joins a running cluster.

    Attributes:
        redis: the URL, with its password: not for messages (`shardam_proto.registry.display_url`).
    """

    redis: RedisUrl = Field(
        validation_alias=AliasChoices("SHARDAM_REDIS", "SHARDAM_REDIS_URL"),
        repr=False,
        description="Redis that the cluster meets at: redis://[:password@]host:port/db. Required",
    )


class ShardSettings(MemberSettings, StateSettings):
    """Settings of `shardam shard`."""

    index: int = Field(ge=0, lt=NUM_BUCKETS, description="this shard's index, from 0; shard 0 is home. Required")
    shards: int = Field(ge=1, le=NUM_BUCKETS, description="number of shards of the cluster. Required")
    host: Host = Field("127.0.0.1", description="address to bind; a wider one than loopback needs a token or --insecure")
    port: Port | None = Field(
        None, description=f"port of the gRPC server; 0 = any free port; without it {DEFAULT_PORT} + index"
    )
    http_port: Port = Field(0, description="port of the metrics and health listener; 0 = any free port")
    advertise: Annotated[str, AfterValidator(_check_address)] | None = Field(
        None, description="HOST:PORT by which workers and other shards reach this shard, if not the bound one"
    )
    insecure: bool = Field(False, description="allow a bind wider than loopback without a token")
    device: Device = Field("auto", description=_DEVICE)
    seed: Seed = Field(0, description=_SEED)
    max_rows: int = Field(0, ge=0, le=2**63 - 1, description=_MAX_ROWS)
    threads: Threads = Field(1, description=_THREADS)
    lease_s: LeaseSeconds = Field(5.0, description=_LEASE)
    drain_s: DrainSeconds = Field(10.0, description=_DRAIN)

    @property
    def bound_port(self) -> int:
        """The port to bind; 0: any free one."""
        return DEFAULT_PORT + self.index if self.port is None else self.port

    @model_validator(mode="after")
    def _check_index(self) -> Self:
        if self.index >= self.shards:
            raise ValueError(f"--index {self.index} needs --shards {self.index + 1} or more, got --shards {self.shards}")
        return self


class AdminSettings(MemberSettings):
    """Settings of `shardam admin`."""

    host: Host = Field("127.0.0.1", description="address to bind; a wider one than loopback needs a token or --insecure")
    port: Port = Field(8080, description="port of the HTTP server; 0 = any free port")
    insecure: bool = Field(False, description="allow a bind wider than loopback without a token")
    shard_timeout_s: TimeoutSeconds = Field(5.0, description="seconds until a call to a shard has failed")
    max_batch_ids: int = Field(10_000, ge=1, le=1_000_000, description="ids that one batchGet may name")
    drain_s: DrainSeconds = Field(10.0, description=_DRAIN)


class StatusSettings(MemberSettings):
    """Settings of `shardam status`.

    Attributes:
        as_json: `--json`.
    """

    shard_timeout_s: TimeoutSeconds = Field(5.0, description="seconds until a call to a shard has failed")
    as_json: bool = Field(
        False, validation_alias=AliasChoices("SHARDAM_JSON"), description="print one JSON object instead of a table"
    )


class ForgetShardSettings(MemberSettings):
    """Settings of `shardam forget-shard`."""

    index: int = Field(ge=0, lt=NUM_BUCKETS, description="index of the LOST shard whose rows are given up. Required")
    shard_timeout_s: TimeoutSeconds = Field(30.0, description="seconds until the call to the shard has failed")
    without_lost: bool = Field(
        False, description="go on though other shards are LOST, too: their rows are given up as well, tell them the same"
    )


class UpSettings(StateSettings):
    """Settings of `shardam up`; its shards get those of their state as they are here.

    Attributes:
        data_dir: absolute; None: memory only.
        redis: URL of a running server, with its password; None: a private one is started.
        as_json: `--json`.
    """

    data_dir: Annotated[Path | None, BeforeValidator(_read_data_dir), AfterValidator(absolute_data_dir)] = Field(
        default_factory=default_data_dir,
        description="folder that keeps rows, moments and steps, one below it for each cluster and shard: a killed shard comes "
        "back from it, and so does the next `up`. none = rows live in memory only. The default follows $XDG_STATE_HOME",
    )
    shards: int = Field(2, ge=1, le=256, description="number of shards to start")
    host: Host = Field("127.0.0.1", description="address that all bind; a wider one than loopback needs a token or --insecure")
    port: Port = Field(DEFAULT_PORT, description="shard I listens on this port + I; 0 = free ports")
    admin_port: Port = Field(8080, description="port of the admin API; 0 = any free port")
    redis: RedisUrl | None = Field(
        None, repr=False, description="Redis to meet at, as a URL; without it a private server is started on a free port"
    )
    insecure: bool = Field(False, description="allow a bind wider than loopback without a token")
    device: Device = Field("auto", description=_DEVICE)
    seed: Seed = Field(0, description=_SEED)
    max_rows: int = Field(0, ge=0, le=2**63 - 1, description=_MAX_ROWS)
    threads: Threads = Field(1, description=_THREADS)
    lease_s: LeaseSeconds = Field(5.0, description=_LEASE)
    drain_s: DrainSeconds = Field(10.0, description=_DRAIN)
    restart_delay_s: Annotated[float, Field(ge=0.01, le=60)] = Field(
        0.5, description="seconds before a dead process is started again; doubles with each exit before it was ready"
    )
    restart_delay_max_s: Annotated[float, Field(ge=0.01, le=600)] = Field(15.0, description="longest such wait in seconds")
    restart_limit: Annotated[int, Field(ge=1, le=1000)] = Field(
        5, description="exits in a row before becoming ready after which everything is stopped"
    )
    exit_with_stdin: bool = Field(False, description="drain and exit when stdin ends, as when the parent process dies")
    as_json: bool = Field(
        False, validation_alias=AliasChoices("SHARDAM_JSON"), description="print the banner as one JSON line on stdout"
    )

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        last = self.port + self.shards - 1
        if self.port and last > 65_535:
            raise ValueError(f"--port {self.port} with --shards {self.shards} needs ports up to {last}; the last port is 65535")
        if self.port and self.port <= self.admin_port <= last:
            raise ValueError(f"--admin-port {self.admin_port} is a shard's port ({self.port} to {last}); choose another")
        if self.restart_delay_max_s < self.restart_delay_s:
            raise ValueError(
                f"--restart-delay-max-s {self.restart_delay_max_s:g} is less than --restart-delay-s {self.restart_delay_s:g}"
            )
        return self
