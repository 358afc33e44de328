"""A bound on request bodies, so that no request fills the memory before any route sees it."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

IMPORT_SUFFIX = ":import"
"""What the path of a request ends with whose body is a table's file: it goes to disk, not into memory."""


class BodyLimit:
    """ASGI middleware that ends a request whose body is too large, whatever its Content-Length says.

    Args:
        app: the wrapped application.
        max_bytes: largest body.
        max_import_bytes: largest body that is a table's file.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, max_import_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_import_bytes = max_import_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts the bytes that the application reads; the error reaches the app's own handler, which answers a problem."""
        received = 0
        is_import = scope.get("path", "").endswith(IMPORT_SUFFIX)
        limit = self._max_import_bytes if is_import else self._max_bytes
        remedy = "raise --max-import-mib, or use `shardam table import`" if is_import else "split it into several requests"

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > limit:
                raise HTTPException(413, f"the body has more than {limit} bytes; {remedy}")
            return message

        await self._app(scope, receive_counted, send)
