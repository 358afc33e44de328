"""What happens around every request: its id, one log line, its metrics, and the answer to an error nobody foresaw."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time

import xxhash
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardam_server.admin.metrics import RestMetrics
from shardam_server.admin.problems import ending_problem, internal_problem
from shardam_server.logs import log_request

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "X-Request-Id"
"""Taken from the request if it is 1 to 128 visible ASCII characters, else made; repeated in the response."""

_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}", re.ASCII)
_MAX_UINT64 = 2**64 - 1
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}


def request_number(request_id: str) -> int:
    """Returns the uint64 by which shards know a request: the id itself if it is one, else its xxh3."""
    if request_id.isdecimal() and request_id.isascii() and len(request_id) <= 20 and 0 < int(request_id) <= _MAX_UINT64:
        return int(request_id)
    return xxhash.xxh3_64_intdigest(request_id.encode()) or 1  # 0 means "none" on the wire


class AccessLog:
    """ASGI middleware, the outermost one.

    Args:
        app: the wrapped application.
        metrics: counts requests.
    """

    def __init__(self, app: ASGIApp, metrics: RestMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = given if _SANE_ID.fullmatch(given) else str(secrets.randbits(63) + 1)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        state["request_number"] = request_number(request_id)
        status = 0
        started = time.perf_counter()

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers[REQUEST_ID_HEADER] = request_id
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        with log_request(request_id):
            try:
                await self._app(scope, receive, send_with_headers)
            except asyncio.CancelledError:
                # Only the server cancels a request: at its end, one that is still being sent or read.
                logger.warning("%s %s was cut off: the admin API ends", scope["method"], scope["path"])
                if not status:
                    await ending_problem().to_response(request_id)(scope, receive, send_with_headers)
            except Exception:
                logger.exception("%s %s failed", scope["method"], scope["path"])
                if status:
                    raise  # part of the answer is out; the server closes the connection
                await internal_problem(request_id).to_response(request_id)(scope, receive, send_with_headers)
            finally:
                elapsed_s = time.perf_counter() - started
                route = getattr(scope.get("route"), "path", "unmatched")
                self._metrics.observe(route, scope["method"], status, elapsed_s)
                logger.debug("%s %s %d %.1f ms", scope["method"], scope["path"], status, elapsed_s * 1000)
