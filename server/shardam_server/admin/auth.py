"""Who may call: the token, the Host header against DNS rebinding, pages of other sites, and paths that would be decoded into
other paths.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shardam_proto.errors import BadOption, BadToken
from shardam_server.admin.problems import HTTP_ONLY_REASONS, Problem, problem_of
from shardam_server.bind import is_loopback
from shardam_server.tokens import authorization_matches

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
"""Paths that need neither a token nor a known host: an orchestrator probes them by address."""

_CHALLENGES = ('Basic realm="shardam", charset="UTF-8"', 'Bearer realm="shardam"')
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})


class Gate:
    """ASGI middleware that refuses a request before any route sees it.

    Args:
        app: the wrapped application.
        token: the token that every path but OPEN_PATHS needs; None: no token.
        host: the host that the server is bound to.
    """

    def __init__(self, app: ASGIApp, token: str | None, host: str) -> None:
        self._app = app
        self._token = token
        # Bound to loopback, a page of another site could reach us only through a name that it makes resolve to 127.0.0.1.
        self._hosts = _LOOPBACK_HOSTS | {host.strip("[]").lower()} if is_loopback(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with a problem, or passes the request on."""
        problem = self._check(scope) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        response = problem.to_response(scope["state"]["request_id"])
        if problem.status == 401:
            for challenge in _CHALLENGES:
                response.headers.append("WWW-Authenticate", challenge)
        await response(scope, receive, send)

    def _check(self, scope: Scope) -> Problem | None:
        if scope["path"] in OPEN_PATHS:
            return None
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if self._hosts is not None and _host_name(host) not in self._hosts:
            detail = f"Host {host[:80]!r} is not this server's; call it as localhost, 127.0.0.1 or the host of --host"
            return Problem(HTTP_ONLY_REASONS["BAD_HOST"], "BAD_HOST", detail)
        if scope["method"] not in _SAFE_METHODS and _comes_from_another_site(headers):
            # A browser sends a form of any page here, with the password that it knows.
            origin = headers.get("origin", "")
            detail = f"a page of another origin ({origin[:80]!r}) may not send {scope['method']}; call from this server's pages"
            return Problem(HTTP_ONLY_REASONS["BAD_ORIGIN"], "BAD_ORIGIN", detail)
        if self._token is not None and not authorization_matches(headers.get("authorization", ""), self._token):
            detail = "the token is missing or wrong; send Authorization: Bearer TOKEN, or Basic with the token as the password"
            return problem_of(BadToken(detail))
        if b"%2f" in scope.get("raw_path", b"").split(b"?")[0].lower():
            # Decoded before routing, "a%2Frows" would read the rows of table "a".
            return problem_of(BadOption("the path holds an encoded slash (%2F), which no name has; remove it"))
        return None


def _comes_from_another_site(headers: Headers) -> bool:
    """True: a browser says that the request comes from a page that this server has not sent; others say nothing."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site not in ("same-origin", "none")
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host")


def _host_name(host: str) -> str:
    """Returns the name of a Host header without its port and brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
