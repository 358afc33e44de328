"""SIGTERM and SIGINT for a worker: a request to stop between two steps, with everything pushed."""

from __future__ import annotations

import os
import signal
import socket
import threading

import torch
import torch.distributed as dist

_AT_ONCE = 128 + signal.SIGINT
"""Exit status of a worker that is told twice, as shells count."""


class StopRequest:
    """Turns the two signals into a request that the training loop sees.

    Before training starts, nothing was pushed and there is nothing to finish; but the process may wait for Redis, for shards
    or, inside torch, for other workers, where no Python code runs. So a thread of its own is told of signals (by the wake-up
    descriptor, which the system's own handler writes to) and ends the process there at once, with status 0. A second signal
    ends it at once anywhere.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._training = False
        self._requested = False

    def install(self) -> None:
        """Takes over both signals; call it in the main thread, once.

        As a container's first process, one without handlers would never see SIGTERM: the system drops it.
        """
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.detach())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=self._watch, args=(reader,), name="stop-request", daemon=True).start()

    def start_training(self) -> None:
        """Says that pushes begin: from now on a signal is a request."""
        with self._lock:
            self._training = True

    def finish(self) -> None:
        """Says that all work is done: a signal that comes now, while the process ends, must not change its exit status."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    def request(self) -> None:
        """Asks as a signal would, from elsewhere; before training starts it is kept until then."""
        with self._lock:
            self._requested = True

    def of_any_rank(self) -> bool:
        """Asks all workers, so that they stop after the same step: one that stopped alone would leave others in DDP's sum."""
        requested = torch.tensor(int(self.requested))
        dist.all_reduce(requested, dist.ReduceOp.MAX)
        return bool(requested)

    @property
    def requested(self) -> bool:
        """Whether a signal has come."""
        return self._requested

    def _watch(self, reader: socket.socket) -> None:
        while number := reader.recv(1):
            if number[0] not in (signal.SIGTERM, signal.SIGINT):
                continue
            with self._lock:
                if not self._training:
                    os._exit(0)
                if self._requested:
                    os._exit(_AT_ONCE)
                self._requested = True
