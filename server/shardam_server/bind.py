"""Where a process may listen: the rule of bind and token, and what is said of a port that cannot be had."""

from __future__ import annotations

import errno
import ipaddress
import socket

from shardam_server.command_errors import PortInUse, UsageError

_WILDCARDS = frozenset({"0.0.0.0", "::"})


def check_bind(host: str, *, has_token: bool, insecure: bool) -> None:
    """Refuses to listen beyond this machine without a token.

    Args:
        host: address or name to bind.
        has_token: True: every RPC and route but health asks for a token.
        insecure: the user's `--insecure`.

    Raises:
        UsageError: the host is not loopback, there is no token and `--insecure` was not given; or the host is unknown.
    """
    if is_loopback(host) or has_token or insecure:
        return
    raise UsageError(
        f"--host {host} can be reached from other machines and there is no token: set SHARDAM_TOKEN or --token-file, "
        "or pass --insecure to serve everyone"
    )


def is_loopback(host: str) -> bool:
    """Returns whether every address of the host is loopback.

    Raises:
        UsageError: the name cannot be resolved.
    """
    return all(ipaddress.ip_address(address).is_loopback for _, address in _addresses(host))


def check_port_free(host: str, port: int, flag: str) -> None:
    """Refuses a port that another process holds.

    Between this check and the real bind another process may still take the port; the real bind reports that by
    `port_refused`, too.

    Args:
        host: address or name to bind.
        port: port; 0 is always free.
        flag: flag that chooses the port, e.g. `--admin-port`.

    Raises:
        PortInUse: it is taken, or may not be bound by this user.
        UsageError: the host is unknown or not an address of this machine.
    """
    for family, address in _addresses(host):
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            # As the servers do: a port whose last connections still wait to expire can be bound again.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((address, port))
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:
                    raise UsageError(f"--host {host} is no address of this machine; use 127.0.0.1 or 0.0.0.0") from error
                raise port_refused(port, flag, error) from error


def port_refused(port: int, flag: str, error: OSError | None = None) -> PortInUse:
    """Returns the error for a port that could not be bound.

    Args:
        port: the port.
        flag: flag that chooses it, e.g. `--port`.
        error: what the system said; None: the port is known to be taken.
    """
    if error is None or error.errno == errno.EADDRINUSE:
        return PortInUse(f"port {port} is in use: choose another with {flag}")
    return PortInUse(f"port {port} cannot be bound ({error.strerror}): choose another with {flag}")


def free_port(host: str) -> int:
    """Returns a port of the host that no one listens on now."""
    family, address = _addresses(host)[0]
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        port: int = listener.getsockname()[1]
        return port


def local_host(host: str) -> str:
    """Returns the address by which this machine reaches a server bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def reachable_host(host: str) -> str:
    """Returns the name to register for a server bound to `host` when none is advertised: a wildcard is this host's name."""
    return socket.gethostname() if host in _WILDCARDS else host


def join_address(host: str, port: int) -> str:
    """Returns HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise UsageError(f"--host {host} is unknown ({error.strerror}); use an address such as 127.0.0.1 or 0.0.0.0") from error
    return [(family, str(address[0]).partition("%")[0]) for family, _, _, _, address in found]
