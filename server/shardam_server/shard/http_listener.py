"""A shard's HTTP listener: /healthz, /readyz and /metrics, on a thread of its own so that no load delays them."""

from __future__ import annotations

import socketserver
import threading
import wsgiref.simple_server
from collections.abc import Callable, Iterable
from wsgiref.types import StartResponse, WSGIEnvironment

from shardam_server.shard.context import ShardContext
from shardam_server.tokens import authorization_matches


class _ThreadingServer(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    daemon_threads = True
    allow_reuse_port = False


class _QuietHandler(wsgiref.simple_server.WSGIRequestHandler):
    timeout = 10  # seconds; a silent connection must not keep a thread

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Drops the access log; metrics count requests."""


class HttpListener:
    """Serves a shard's health and metrics.

    Args:
        shard: the shard.
        host: address to bind.
        port: port to bind; 0: any free one.
        token: needed for /metrics, or None.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, shard: ShardContext, host: str, port: int, token: str | None) -> None:
        self._shard = shard
        self._token = token
        self._server = wsgiref.simple_server.make_server(host, port, self._respond, _ThreadingServer, _QuietHandler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The bound port."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Starts to answer."""
        self._thread.start()

    def close(self) -> None:
        """Stops."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _respond(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        routes: dict[str, Callable[[], tuple[str, str]]] = {
            "/healthz": self._healthz,
            "/readyz": self._readyz,
            "/metrics": self._metrics,
        }
        route = routes.get(environ.get("PATH_INFO", ""))
        headers = [("Content-Type", "text/plain; charset=utf-8")]
        if route is None:
            status, text = "404 Not Found", "a shard answers /healthz, /readyz and /metrics\n"
        elif environ.get("REQUEST_METHOD") not in ("GET", "HEAD"):
            status, text = "405 Method Not Allowed", "use GET\n"
        elif route == self._metrics and not self._allows(environ):
            status, text = "401 Unauthorized", "send the cluster's token: Authorization: Bearer TOKEN\n"
            headers.append(("WWW-Authenticate", 'Basic realm="shardam"'))
        else:
            status, text = route()
        body = text.encode()
        start_response(status, [*headers, ("Content-Length", str(len(body)))])
        return [body if environ.get("REQUEST_METHOD") != "HEAD" else b""]

    def _allows(self, environ: WSGIEnvironment) -> bool:
        return self._token is None or authorization_matches(environ.get("HTTP_AUTHORIZATION", ""), self._token)

    def _healthz(self) -> tuple[str, str]:
        return "200 OK", "live\n"

    def _readyz(self) -> tuple[str, str]:
        if self._shard.is_serving:
            return "200 OK", "ready\n"
        return "503 Service Unavailable", f"not ready: waits for {self._shard.waiting_for or 'its end'}\n"

    def _metrics(self) -> tuple[str, str]:
        return "200 OK", self._shard.metrics.text()
