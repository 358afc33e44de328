"""`/`, the console page, and /docs: both work offline, under a policy that lets the browser load nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, FastAPI
from starlette.datastructures import MutableHeaders
from starlette.responses import FileResponse
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

PAGE_DIR = Path(__file__).parent.parent / "page"

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
DOCS_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; worker-src blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""FastAPI's pages start their scripts inline."""

_POLICIES = {"/": PAGE_POLICY, "/docs": DOCS_POLICY, "/redoc": DOCS_POLICY}

router = APIRouter(include_in_schema=False)


@router.get("/")
async def get_page() -> FileResponse:
    """Shows the console."""
    return FileResponse(PAGE_DIR / "index.html", media_type="text/html; charset=utf-8")


class PagePolicy:
    """ASGI middleware that gives pages and their files their own policy, and lets browsers revalidate them.

    Args:
        app: the wrapped application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Adds the headers."""
        path = scope.get("path", "")

        async def send_with_policy(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if path in _POLICIES:
                    headers["Content-Security-Policy"] = _POLICIES[path]
                if path in _POLICIES or path.startswith(("/page/", "/static-offline-docs/")):
                    headers["Cache-Control"] = "no-cache"
            await send(message)

        await self._app(scope, receive, send_with_policy)


def install(app: FastAPI) -> None:
    """Adds the page and its files."""
    app.include_router(router)
    app.mount("/page", StaticFiles(directory=PAGE_DIR), name="page")
