"""The console shows workers with their groups, who has arrived, and for whom a group waits, also on a phone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from shardam_testing.admin import running_admin
from shardam_testing.fake_shards import FakeCluster, running_fake_shards
from shardam_testing.listed_workers import SYNC, bounded_workers, client_id, member, sync_workers
from shardam_testing.processes import running_valkey

from shardam_proto.v1 import shard_pb2

UNKNOWN = "\N{EN DASH}"


@dataclasses.dataclass
class Stage:
    """Two shards, whose home lists the workers that a test tells it, and a phone that looks at them."""

    shards: FakeCluster
    page: Page

    def tell(self, workers: shard_pb2.ListWorkersResponse | None) -> None:
        """Sets what home lists; None: it is of a version that does not."""
        self.shards.shards[0].workers = workers

    def cells(self, row: int) -> list[str]:
        return self.page.locator("#workers tbody tr").nth(row).locator("td").all_text_contents()

    def fits(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.fixture(scope="module")
def stage_of_module(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with running_valkey() as valkey, running_fake_shards(2) as shards, contextlib.closing(valkey.client()) as connection:
        shards.register(connection)
        with running_admin(valkey.url, tmp_path_factory.mktemp("workers")) as admin:
            context = browser.new_context(viewport={"width": 360, "height": 740})
            page = context.new_page()
            page.goto(admin.url)
            yield Stage(shards, page)
            context.close()


@pytest.fixture
def stage(stage_of_module: Stage) -> Stage:
    """The stage without workers, as the page shows it."""
    stage_of_module.tell(shard_pb2.ListWorkersResponse())
    page = stage_of_module.page
    expect(page.locator("#workers-empty")).to_be_visible()
    for place in ("workers-table", "workers-problem", "workers-waiting", "workers-pager"):
        expect(page.locator(f"#{place}")).to_be_hidden()
    return stage_of_module


def test_workers_are_shown_with_group_rank_and_step(stage: Stage) -> None:
    stage.tell(sync_workers())
    page = stage.page
    expect(page.locator("#workers tbody tr")).to_have_count(3)
    expect(page.locator("#workers-empty")).to_be_hidden()
    assert stage.cells(1) == ["000000000000", "syncarrived", "trainers", "2 of 3", "1", "17", UNKNOWN, "20", "0 s ago"]
    assert stage.cells(2) == ["000000000000", "async", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, "5", "1 s ago"]
    expect(page.locator("#workers .pill.good")).to_have_text(["arrived", "arrived"])
    expect(page.locator("#workers tbody td.mono").nth(1)).to_have_attribute("title", client_id(2).hex())
    expect(page.locator("#workers-waiting")).to_be_hidden()  # it has waited for less than a refresh takes
    assert stage.fits()


def test_a_group_that_waits_for_long_is_said_with_the_rank(stage: Stage) -> None:
    workers = sync_workers()
    workers.waiting[0].waited_s = 12.5
    stage.tell(workers)
    expect(stage.page.locator("#workers-waiting strong")).to_have_text("WAITING")
    expect(stage.page.locator("#workers-waiting")).to_contain_text("waits for rank 1 before step 18, for 12.5 s now")
    assert stage.fits()
    workers.workers[1].arrived = False
    del workers.waiting[:]
    stage.tell(workers)
    expect(stage.page.locator("#workers .pill.good")).to_have_count(1)
    expect(stage.page.locator("#workers-waiting")).to_be_hidden()


def test_a_bounded_group_shows_its_bound_and_who_is_behind(stage: Stage) -> None:
    stage.tell(bounded_workers())
    expect(stage.page.locator("#workers .pill")).to_have_text(["bounded:4", "bounded:4"])
    assert stage.cells(1)[5:7] == ["9", "3"]


def test_many_workers_are_browsed_page_by_page(stage: Stage) -> None:
    stage.tell(shard_pb2.ListWorkersResponse(workers=[member("a", SYNC, rank) for rank in range(70)]))
    rows = stage.page.locator("#workers tbody tr")
    expect(rows).to_have_count(50)
    pager = stage.page.locator("#workers-pager")
    pager.get_by_role("button", name="Next page").click()
    expect(rows).to_have_count(20)
    expect(pager.get_by_role("button", name="Next page")).to_be_disabled()
    pager.get_by_role("button", name="First page").click()
    expect(rows).to_have_count(50)


def test_an_old_home_is_said_in_place(stage: Stage) -> None:
    stage.tell(None)
    expect(stage.page.locator("#workers-problem strong")).to_have_text("VERSION_MISMATCH")
    expect(stage.page.locator("#health")).to_have_text("ready")
    assert stage.fits()
