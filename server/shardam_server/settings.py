"""Settings of every process: one frozen class per command, read once from flags and environment.

A field is a flag in kebab-case and the environment name SHARDAM_<FIELD>; flags win (flags.py). The fields say units, bounds and
what a value means; `--help` is generated from them. Nothing else reads the environment.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shardam_proto.registry import REDIS_TIMEOUT_S
from shardam_proto.routing import NUM_BUCKETS
from shardam_server.data_folder import absolute_data_dir, default_data_dir
from shardam_server.setting_types import (
    DEFAULT_PORT,
    DEVICE,
    DRAIN,
    ENV_PREFIX,
    LEASE,
    MAX_ROWS,
    SEED,
    THREADS,
    Device,
    DrainSeconds,
    Host,
    LeaseSeconds,
    Port,
    RedisUrl,
    Seed,
    Threads,
    TimeoutSeconds,
    check_address,
    check_cluster,
    check_secret,
    check_token,
    lower,
    read_data_dir,
)


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

    cluster: Annotated[str, AfterValidator(check_cluster)] = Field(
        "default", description="name of the cluster: up to 128 of A-Z a-z 0-9 _ . -; prefixes every key in Redis"
    )
    token: Annotated[SecretStr, AfterValidator(check_secret)] | None = Field(
        None, description="secret that every RPC and route but health must carry"
    )
    token_file: Path | None = Field(
        None, description="file that holds the token (a flag with the token itself would show in the list of processes)"
    )
    redis_timeout_s: TimeoutSeconds = Field(REDIS_TIMEOUT_S, description="seconds until a Redis call has failed")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(lower)] = Field(
        "info", description="least severe level that is logged"
    )
    log_format: Annotated[Literal["text", "json"], BeforeValidator(lower)] = Field(
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

    data_dir: Annotated[Path | None, BeforeValidator(read_data_dir)] = Field(
        None,
        description="folder for journals and bases, one below it for each cluster and shard; none = rows live in memory only",
    )
    journal: Annotated[Literal["off", "write", "fsync"] | None, BeforeValidator(lower)] = Field(
        None,
        description="off: a killed shard loses its rows; write: it loses nothing acknowledged; fsync: nor does a power loss. "
        "Without it: write with a data folder, off without",
    )
    on_journal_full: Annotated[Literal["suspend", "refuse"], BeforeValidator(lower)] = Field(
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
    checkpoint_dir: Annotated[Path | None, AfterValidator(absolute_data_dir)] = Field(
        None,
        description="root folder of checkpoints, one folder below it for each cluster; all shards have to see the same one. "
        "Without it `checkpoints` in the data folder; with neither there are no checkpoints",
    )
    checkpoint_every_s: Annotated[float, Field(ge=0, le=30 * 86_400)] = Field(
        0.0, description="seconds between two checkpoints that the cluster makes by itself; 0 = none"
    )
    checkpoint_keep: Annotated[int, Field(ge=0, le=2**20)] = Field(
        5,
        description="checkpoints that are kept of those without a name of their own; older ones are deleted once a new one is "
        "complete. 0 = all",
    )
    hold_s: Annotated[float, Field(ge=0.05, le=60)] = Field(
        2.0, description="seconds for which changes may be held back while a checkpoint is cut; then it is tried again"
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
    keep_free_mib: Annotated[int, Field(ge=0, le=1024)] = Field(
        128,
        description="MiB of freed memory that a shard keeps for its next messages instead of giving it back to the system; "
        "0 = as the C library does by itself, which is slower for messages of some MB",
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

    @property
    def checkpoint_root(self) -> Path | None:
        """Root folder of checkpoints; None: there are none."""
        if self.checkpoint_dir is not None:
            return self.checkpoint_dir
        return None if self.data_dir is None else self.data_dir / "checkpoints"

    @model_validator(mode="after")
    def _check_checkpoints(self) -> Self:
        if self.checkpoint_every_s and self.checkpoint_root is None:
            raise ValueError(
                "without --data-dir and --checkpoint-dir there is no folder for checkpoints, so --checkpoint-every-s "
                f"{self.checkpoint_every_s:g} would do nothing: name a folder, or leave it out"
            )
        return self

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
    advertise: Annotated[str, AfterValidator(check_address)] | None = Field(
        None, description="HOST:PORT by which workers and other shards reach this shard, if not the bound one"
    )
    insecure: bool = Field(False, description="allow a bind wider than loopback without a token")
    device: Device = Field("auto", description=DEVICE)
    seed: Seed = Field(0, description=SEED)
    max_rows: int = Field(0, ge=0, le=2**63 - 1, description=MAX_ROWS)
    threads: Threads = Field(1, description=THREADS)
    lease_s: LeaseSeconds = Field(5.0, description=LEASE)
    drain_s: DrainSeconds = Field(10.0, description=DRAIN)

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
    max_import_mib: int = Field(
        1024, ge=1, le=2**20, description="MiB of a table's file that one request may bring; it lies on disk while it is read"
    )
    drain_s: DrainSeconds = Field(10.0, description=DRAIN)


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

    data_dir: Annotated[Path | None, BeforeValidator(read_data_dir), AfterValidator(absolute_data_dir)] = Field(
        default_factory=default_data_dir,
        description="folder that keeps rows, moments and steps, one below it for each cluster and shard: a killed shard comes "
        "back from it, and so does the next `up`. none = rows live in memory only. The default follows $XDG_STATE_HOME",
    )
    shards: int = Field(2, ge=1, le=256, description="number of shards to start")
    host: Host = Field("127.0.0.1", description="address that all bind; a wider one than loopback needs a token or --insecure")
    port: Port = Field(DEFAULT_PORT, description="shard I listens on this port + I; 0 = free ports")
    admin_port: Port = Field(8080, description="port of the admin API; 0 = any free port")
    restore: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="checkpoint that a cluster without tables goes on from: its name, latest, or a path below the folder of "
        "checkpoints. A cluster that has tables is not touched, and does not start",
    )
    redis: RedisUrl | None = Field(
        None, repr=False, description="Redis to meet at, as a URL; without it a private server is started on a free port"
    )
    insecure: bool = Field(False, description="allow a bind wider than loopback without a token")
    device: Device = Field("auto", description=DEVICE)
    seed: Seed = Field(0, description=SEED)
    max_rows: int = Field(0, ge=0, le=2**63 - 1, description=MAX_ROWS)
    threads: Threads = Field(1, description=THREADS)
    lease_s: LeaseSeconds = Field(5.0, description=LEASE)
    drain_s: DrainSeconds = Field(10.0, description=DRAIN)
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
    def _check_restore(self) -> Self:
        if self.restore is not None and self.checkpoint_root is None:
            raise ValueError(
                f"--restore {self.restore} needs a folder of checkpoints: name it with --checkpoint-dir, or give a --data-dir"
            )
        return self

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
