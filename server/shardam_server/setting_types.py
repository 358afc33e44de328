"""What the fields of settings are made of: types with their checks, and texts that several commands share."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, SecretStr
from redis.connection import parse_url

from shardam_proto import channels
from shardam_proto.errors import BadToken
from shardam_proto.schema import check_name
from shardam_server.devices import check_device_name

ENV_PREFIX = "SHARDAM_"
"""Every environment name starts with it."""

LIFELINE_VARIABLE = "SHARDAM_LIFELINE"
"""Set to `stdin` by a parent that holds the other end of the child's stdin (children.py); no setting of a user."""

DEFAULT_PORT = 7070
"""Shard I listens on this port + I unless told otherwise."""

_MAX_UINT64 = 2**64 - 1


def check_cluster(name: str) -> str:
    """Returns a cluster name.

    Raises:
        ValueError: it is none.
    """
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


def check_address(address: str) -> str:
    """Returns an address HOST:PORT.

    Raises:
        ValueError: it is none.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise ValueError("not HOST:PORT; use for example shard-0.example:7070 or [::1]:7070")
    return address


def lower(value: object) -> object:
    """Returns a word in lower case."""
    return value.lower() if isinstance(value, str) else value


def read_data_dir(value: object) -> object:
    """Returns a folder, or None for `none`.

    Raises:
        ValueError: it is none.
    """
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


def check_secret(token: SecretStr) -> SecretStr:
    """Returns a token that can travel in a header.

    Raises:
        ValueError: it is none.
    """
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

DEVICE = (
    "where rows live: auto, cpu or cuda:N. auto spreads shards over the visible GPUs, else takes the CPU, and says "
    "which and why; a GPU that is named is never replaced"
)
SEED = "seed of the initial weights, kept when the cluster is created; another one is refused after that"
MAX_ROWS = "rows that one shard may hold over all tables; 0 = no limit. A push that would create more is refused"
THREADS = "threads that one shard's kernels use for one request"
LEASE = "seconds for which a shard's name in Redis outlives its last renewal"
DRAIN = "seconds that a stopping process may take to finish what it has accepted"
