"""Ports for processes that come back: not those that the kernel gives to connections while such a process is away."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

LOWEST = 10_000
"""Below, well-known services have theirs."""

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_DEFAULT_FIRST = 32_768
"""First port of connections where the kernel does not say; Linux's default."""


def lasting_ports(count: int) -> list[int]:
    """Returns ports of the loopback address that no one listens on, and no outgoing connection will take."""
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _DEFAULT_FIRST
    candidates = random.sample(range(LOWEST, first), first - LOWEST)
    found: list[int] = []
    for port in candidates:
        if len(found) == count:
            return found
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            found.append(port)
    raise AssertionError(f"no {count} free ports from {LOWEST} to {first}")
