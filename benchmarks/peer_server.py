"""A peer's server process: prints its port, and ends with its stdin.

Usage: python benchmarks/peer_server.py peer_tcp|peer_grpc|peer_rpc NUM_ROWS DIM
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import traceback


def serve(module: str, num_rows: int, dim: int) -> None:
    """Serves until the process ends; a problem ends it."""
    try:
        importlib.import_module(module).serve(num_rows, dim)
    except Exception:  # noqa: BLE001  # the thread's edge
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=serve, args=(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])), daemon=True).start()
    sys.stdin.read()
    os._exit(0)  # its threads wait for clients, and there is nothing to keep
