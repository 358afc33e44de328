"""A shard process that counts the calls it receives: `shardam shard`, with a file for the counts in front.

Usage: python benchmarks/counted_shard.py FILE FLAG ...   (FLAG ...: those of `shardam shard`)

At its end it writes {"/shardam.v1.ShardService/UpdateGroup": 12, ...} to FILE. A stream counts once; the worker counts what
goes through it (step_worker.py).
"""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from shardam_server.__main__ import main

Counts = collections.Counter[str]


class CountingInterceptor(grpc.aio.ServerInterceptor):
    def __init__(self) -> None:
        self.counts: Counts = collections.Counter()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        self.counts[handler_call_details.method] += 1
        return await continuation(handler_call_details)


def count_calls() -> Counts:
    """Makes every server of this process count; returns what it counts."""
    make_server, interceptor = grpc.aio.server, CountingInterceptor()

    def counting_server(*, interceptors: list[Any], options: Sequence[tuple[str, int]]) -> grpc.aio.Server:
        return make_server(interceptors=[interceptor, *interceptors], options=options)

    grpc.aio.server = counting_server  # type: ignore[assignment]  # as the shard calls it
    return interceptor.counts


if __name__ == "__main__":
    path, *flags = sys.argv[1:]
    counts = count_calls()
    try:
        sys.exit(main(["shard", *flags]))
    finally:
        Path(path).write_text(json.dumps(counts), encoding="utf-8")
