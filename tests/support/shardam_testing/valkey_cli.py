"""Stands in for `valkey-cli -e -p PORT ping`, which the image of the Redis service has and this machine may not have."""

from __future__ import annotations

import argparse
import socket
import sys


def main() -> int:
    """Returns 0 if the server answers PONG; with -e an error that it answers is a failure, too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-e", action="store_true", required=True)
    parser.add_argument("-p", type=int, required=True)
    parser.add_argument("command", choices=["ping"])
    port: int = parser.parse_args().p
    with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
        connection.sendall(b"PING\r\n")
        return 0 if connection.recv(64) == b"+PONG\r\n" else 1


if __name__ == "__main__":
    sys.exit(main())
