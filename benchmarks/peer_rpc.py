"""torch.distributed.rpc, forced to TCP as between two machines, before an nn.Embedding with torch.optim.SparseAdam."""

from __future__ import annotations

import collections
import socket
import threading
import warnings

import numpy as np
import torch
from batches import Float32s, Int64s
from torch.distributed import rpc

SERVER, CLIENT = "server", "client"

_lock = threading.Lock()
_tables: list[tuple[torch.nn.Embedding, torch.optim.SparseAdam]] = []
"""The server's; calls find it here, since rpc calls functions by name."""


def join(name: str, rank: int, port: int) -> None:
    """Makes this process one of the two."""
    warnings.filterwarnings("ignore", category=UserWarning)  # of torch, about its own internals
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}",
        _transports=["uv"],  # libuv's TCP; shared memory otherwise, which two machines have not
        _channels=["basic"],
    )
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def serve(num_rows: int, dim: int) -> None:
    """Serves one client, for ever."""
    embedding = torch.nn.Embedding.from_pretrained(torch.full((num_rows, dim), 0.1), freeze=False, sparse=True)
    _tables.append((embedding, torch.optim.SparseAdam(embedding.parameters())))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    print(port, flush=True)
    join(SERVER, 0, port)


def pull(row_ids: torch.Tensor) -> torch.Tensor:
    """Called on the server."""
    embedding, _ = _tables[0]
    return embedding.weight.detach().index_select(0, row_ids)


def push(row_ids: torch.Tensor, gradients: torch.Tensor) -> None:
    """Called on the server."""
    embedding, optimizer = _tables[0]
    shape = embedding.weight.shape
    gradient = torch.sparse_coo_tensor(row_ids[None], gradients, shape, check_invariants=False)
    with _lock:
        embedding.weight.grad = gradient
        optimizer.step()


class RpcLane:
    """The client's side of it; one in a process."""

    def __init__(self, port: int) -> None:
        join(CLIENT, 1, port)
        self._answers: collections.deque[torch.futures.Future[object]] = collections.deque()

    def send_pull(self, row_ids: Int64s) -> None:
        self._answers.append(rpc.rpc_async(SERVER, pull, (torch.from_numpy(row_ids),)))

    def take_pull(self) -> object:
        return self._answers.popleft().wait()

    def send_push(self, row_ids: Int64s, gradients: Float32s) -> None:
        arguments = (torch.from_numpy(row_ids), torch.from_numpy(np.asarray(gradients[: row_ids.size])))
        self._answers.append(rpc.rpc_async(SERVER, push, arguments))

    take_push = take_pull

    def close(self) -> None:
        rpc.shutdown(graceful=False)
