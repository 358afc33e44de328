"""A bound on request bodies, so that no request fills the memory before any route sees it."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware that ends a request whose body is too large, whatever its Content-Length says.

    Args:
        app: the wrapped application.
        max_bytes: largest body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts the bytes that the application reads; the error reaches the app's own handler, which answers a problem."""
        received = 0

        async def receive_counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, f"the body has more than {self._max_bytes} bytes; split it into several requests")
            return message

        await self._app(scope, receive_counted, send)
