"""A browser and a cluster that it looks at."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from shardam_testing.admin import Console, raw_cluster, running_admin
from shardam_testing.processes import running_shards

expect.set_options(timeout=20_000)  # a guard against hanging: the parts of the page arrive in any order, on a busy machine late

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = (
    "--no-sandbox",  # as root, and in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip("chromium is missing")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def console(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    folder = tmp_path_factory.mktemp("console")
    with (
        running_shards(folder, 2) as shards,
        running_admin(shards.valkey.url, folder) as admin,
        raw_cluster(shards.view()) as grpc,
    ):
        yield Console(shards, admin, grpc)


@pytest.fixture
def page(browser: Browser, console: Console) -> Iterator[Page]:
    """A page that fails the test if a script of it throws or it asks another host for anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(f"script error: {error}"))
    page.on("console", lambda message: faults.append(message.text) if "Content Security Policy" in message.text else None)
    page.on("request", lambda request: None if request.url.startswith(console.admin.url) else faults.append(request.url))
    yield page
    context.close()
    assert faults == []
