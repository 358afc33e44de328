"""What the demo reads from the admin API, as any program would: over HTTP, JSON."""

from __future__ import annotations

import dataclasses
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from shardam_server.command_errors import CommandError

TIMEOUT_S = 10.0
"""The admin API of this machine answers in milliseconds; a shard that drains may take seconds."""


POLL_S = 0.1
"""A tenth of the time in which the admin API looks again."""


@dataclasses.dataclass(frozen=True)
class RowState:
    """A row with its optimizer state; values are float32, the step is the table's at the row's last update."""

    weight: list[float]
    exp_avg: list[float]
    exp_avg_sq: list[float]
    step: int


def row_url(admin_url: str, table: str, row_id: str) -> str:
    """Returns the URL of a row."""
    return f"{admin_url}/v1/tables/{urllib.parse.quote(table)}/rows/{row_id}"


def read_row(url: str) -> RowState:
    """Reads a row that exists.

    Raises:
        CommandError: the admin API does not answer, or has no such row.
    """
    row = _read_json(url)
    optimizer = row["optimizer"]
    return RowState(row["weight"], optimizer["exp_avg"], optimizer["exp_avg_sq"], optimizer["step"])


def devices_of(admin_url: str) -> list[str]:
    """Returns the device of each shard, e.g. ["cpu", "cpu"].

    The admin API looks at the registry once a second, so shards that have just registered may not be shown yet.

    Raises:
        CommandError: the admin API does not answer, or does not show all shards in time.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        shards = _read_json(f"{admin_url}/v1/shards")["shards"]
        missing = [str(shard["index"]) for shard in shards if shard["device"] is None]
        if not missing:
            return [shard["device"] for shard in shards]
        if time.monotonic() > deadline:
            raise CommandError(f"the admin API {admin_url} does not show shard {', '.join(missing)} after {TIMEOUT_S:g} s")
        time.sleep(POLL_S)


def _read_json(url: str) -> dict[str, Any]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the URL is of this machine
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response:
            content: dict[str, Any] = json.load(response)
            return content
    except urllib.error.HTTPError as error:
        with error:
            raise CommandError(f"GET {url} answered {error.code}: {error.read().decode(errors='replace')}") from None
    except OSError as error:
        raise CommandError(f"GET {url} failed: {error}") from None
