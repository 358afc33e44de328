"""The console says in words what is wrong with shards and their journals, and what to do, also on a phone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from shardam_testing.admin import running_admin
from shardam_testing.fake_shards import FakeCluster, running_fake_shards
from shardam_testing.processes import running_valkey

from shardam_proto.v1 import shard_pb2

FULL = "the disk of /var/lib/shardam/clusters/production/shard-1 is full: make room there"


@dataclasses.dataclass
class Stage:
    """Three shards that say of themselves what a test tells them, and a phone that looks at them."""

    shards: FakeCluster
    page: Page

    def say(self, state: shard_pb2.ServingState.ValueType, **journal: object) -> None:
        """Sets what shard 1 says."""
        self.shards.shards[1].status = shard_pb2.GetStatusResponse(
            journal_mode=shard_pb2.JOURNAL_MODE_WRITE,
            **journal,  # type: ignore[arg-type]  # fields of the message
        )
        self.shards.shards[1].state = state

    def fits(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.fixture(scope="module")
def stage_of_module(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with running_valkey() as valkey, running_fake_shards(3) as shards, contextlib.closing(valkey.client()) as connection:
        shards.register(connection)
        with running_admin(valkey.url, tmp_path_factory.mktemp("states")) as admin:
            context = browser.new_context(viewport={"width": 360, "height": 740})
            page = context.new_page()
            page.goto(admin.url)
            yield Stage(shards, page)
            context.close()


@pytest.fixture
def stage(stage_of_module: Stage) -> Stage:
    """The stage with three healthy shards, as the page shows them."""
    stage_of_module.say(shard_pb2.SERVING_STATE_SERVING, journal_state=shard_pb2.JOURNAL_STATE_OK)
    page = stage_of_module.page
    expect(page.locator("#shards .pill")).to_have_text(["serving"] * 3)
    for place in ("cluster-problem", "shards-problem", "shards-warning"):
        expect(page.locator(f"#{place}")).to_be_hidden()
    expect(page.locator("#health")).to_have_text("ready")
    return stage_of_module


def test_a_lost_shard_is_said_with_its_remedy(stage: Stage) -> None:
    stage.say(shard_pb2.SERVING_STATE_LOST)
    page = stage.page
    expect(page.locator("#shards .pill")).to_have_text(["serving", "lost", "serving"])
    expect(page.locator("#shards .pill.bad")).to_have_count(1)
    expect(page.locator("#shards-problem strong")).to_have_text("SHARD_LOST")
    expect(page.locator("#shards-problem")).to_contain_text("shard 1 is LOST: it started without the rows")
    expect(page.locator("#shards-problem")).to_contain_text("shardam forget-shard --index 1")
    expect(page.locator("#health")).to_have_text("not ready")
    expect(page.locator("#cluster-problem")).to_contain_text("1 of 3 shards does not serve, see below")
    assert stage.fits()


def test_a_shard_that_waits_for_its_name_is_said(stage: Stage) -> None:
    stage.say(shard_pb2.SERVING_STATE_SUSPENDED)
    expect(stage.page.locator("#shards .pill.warn")).to_have_text(["suspended"])
    expect(stage.page.locator("#shards-problem strong")).to_have_text("NOT_READY")
    expect(stage.page.locator("#shards-problem")).to_contain_text("waits until Redis confirms")


def test_a_degraded_journal_is_a_warning_and_the_cluster_is_ready(stage: Stage) -> None:
    stage.say(shard_pb2.SERVING_STATE_SERVING, journal_state=shard_pb2.JOURNAL_STATE_SUSPENDED, journal_problem=FULL)
    page = stage.page
    expect(page.locator("#shards .pill")).to_have_text(["serving", "serving", "degraded", "serving"])
    expect(page.locator("#shards-warning strong")).to_have_text("DEGRADED")
    expect(page.locator("#shards-warning")).to_contain_text(FULL)
    expect(page.locator("#shards-problem")).to_be_hidden()
    expect(page.locator("#health")).to_have_text("ready")
    assert stage.fits()


@pytest.mark.parametrize(
    ("state", "pill", "reason"),
    [
        (shard_pb2.JOURNAL_STATE_FULL, "journal full", "JOURNAL_FULL"),
        (shard_pb2.JOURNAL_STATE_FAILED, "journal failed", "JOURNAL_FAILED"),
    ],
)
def test_a_journal_that_stops_changes_is_a_problem(
    stage: Stage, state: shard_pb2.JournalState.ValueType, pill: str, reason: str
) -> None:
    stage.say(shard_pb2.SERVING_STATE_SERVING, journal_state=state, journal_problem=FULL)
    page = stage.page
    expect(page.locator("#shards .pill.bad")).to_have_text([pill])
    expect(page.locator("#shards-problem strong")).to_have_text(reason)
    expect(page.locator("#shards-problem")).to_contain_text("shard 1 takes no changes: ")
    expect(page.locator("#shards-problem")).to_contain_text(FULL)
    expect(page.locator("#shards-warning")).to_be_hidden()
    assert stage.fits()


def test_the_journals_mode_and_place_are_shown(stage: Stage) -> None:
    stage.say(
        shard_pb2.SERVING_STATE_SERVING,
        journal_state=shard_pb2.JOURNAL_STATE_OK,
        journal_bytes=5 * 2**20,
        data_folder="/data/shard-1",
    )
    cell = stage.page.locator("#shards tbody tr").nth(1).locator("td").nth(4)
    expect(cell).to_have_text("write")
    expect(cell).to_have_attribute("title", "5.00 MiB since its base, in /data/shard-1")
