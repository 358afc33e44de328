"""The console lists checkpoints, makes, verifies, restores and deletes them, asks before it does harm, and fits a phone."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect
from shardam_testing.admin import running_admin
from shardam_testing.fake_shards import FakeCluster, running_fake_shards
from shardam_testing.processes import running_valkey
from shardam_testing.scripted_checkpoints import ScriptedCheckpoints, broken_checkpoint, checkpoint, fail, finish

from shardam_proto.errors import BadOption
from shardam_proto.v1 import job_pb2


@dataclasses.dataclass
class Stage:
    """Shards whose home knows what a test tells it, and a phone that looks at them."""

    shards: FakeCluster
    page: Page

    @property
    def home(self) -> ScriptedCheckpoints:
        return self.shards.shards[0].checkpoints

    def press(self, label: str) -> None:
        self.page.get_by_role("button", name=label, exact=True).click()

    def fits(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@pytest.fixture(scope="module")
def stage_of_module(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with running_valkey() as valkey, running_fake_shards(2) as shards, contextlib.closing(valkey.client()) as connection:
        shards.register(connection)
        with running_admin(valkey.url, tmp_path_factory.mktemp("checkpoints")) as admin:
            context = browser.new_context(viewport={"width": 360, "height": 740})
            page = context.new_page()
            page.goto(admin.url)
            yield Stage(shards, page)
            context.close()


@pytest.fixture
def stage(stage_of_module: Stage) -> Stage:
    """The stage with two checkpoints and a broken one, as the page shows them."""
    home = stage_of_module.home
    home.infos[:] = [broken_checkpoint("torn"), checkpoint("new"), checkpoint("old")]
    for known in (home.jobs, home.created, home.restored, home.deleted):
        known.clear()
    home.fail_with = None
    expect(stage_of_module.page.locator("#checkpoints tbody tr")).to_have_count(3)
    expect(stage_of_module.page.locator("#jobs li")).to_have_count(0)
    return stage_of_module


def test_checkpoints_are_listed_and_a_broken_one_cannot_be_restored(stage: Stage) -> None:
    page = stage.page
    expect(page.locator("#checkpoints .pill")).to_have_text(["not complete", "complete", "complete"])
    expect(page.locator("#checkpoints tbody td[title='manifest.json is missing']")).to_have_count(1)
    expect(page.get_by_role("button", name="Restore torn")).to_be_disabled()
    expect(page.get_by_role("button", name="Restore new")).to_be_enabled()
    assert stage.fits()


def test_one_is_made_with_its_name_and_its_progress_is_shown(stage: Stage) -> None:
    page = stage.page
    page.get_by_label("Name").fill("mine")
    stage.press("Make a checkpoint")
    expect(page.locator("#jobs .pill")).to_have_text(["running"])
    expect(page.locator("#jobs li")).to_contain_text("1.00 MiB of 4.00 MiB")
    expect(page.locator("#jobs progress")).to_have_attribute("value", str(2**20))
    assert [request.name for request in stage.home.created] == ["mine"]
    finish(stage.home.jobs[0])
    expect(page.locator("#jobs .pill.good")).to_have_text(["done"])
    assert stage.fits()


def test_a_failed_one_is_said_with_its_reason(stage: Stage) -> None:
    fail(stage.home.begin(job_pb2.JOB_KIND_CREATE, "mine"), "CHECKPOINT_FAILED", "no space left in /srv/checkpoints")
    expect(stage.page.locator("#checkpoints-failed strong")).to_have_text("CHECKPOINT_FAILED")
    expect(stage.page.locator("#checkpoints-failed")).to_contain_text("no space left in /srv/checkpoints")
    expect(stage.page.locator("#health")).to_have_text("ready")
    assert stage.fits()


def test_a_restore_asks_first_and_sends_the_exceptions_that_were_chosen(stage: Stage) -> None:
    page = stage.page
    stage.press("Restore new")
    expect(page.get_by_role("dialog")).to_contain_text("The state of all shards is replaced")
    stage.press("Cancel")
    expect(page.get_by_role("dialog")).to_be_hidden()
    assert stage.home.restored == []
    stage.press("Restore new")
    page.get_by_label("weights only").check()
    assert stage.fits()
    stage.press("Replace the state")
    expect(page.locator("#jobs li")).to_contain_text("restore new")
    (request,) = stage.home.restored
    assert (request.name, request.options.weights_only, request.options.read_only) == ("new", True, False)
    table = job_pb2.TableReport(table="items", outcome=job_pb2.TABLE_OUTCOME_LOADED, num_rows=12, moments_reset=True)
    stage.home.jobs[0].report.tables.append(table)
    finish(stage.home.jobs[0])
    expect(page.locator("#jobs li")).to_contain_text("items loaded, 12 rows, moments begin anew")


def test_a_delete_asks_first(stage: Stage) -> None:
    stage.press("Delete old")
    expect(stage.page.get_by_role("dialog")).to_contain_text("Delete old?")
    expect(stage.page.locator("#restore-options")).to_be_hidden()
    stage.page.keyboard.press("Escape")
    assert stage.home.deleted == []
    stage.press("Delete old")
    stage.press("Delete")
    expect(stage.page.locator("#checkpoints tbody tr")).to_have_count(2)
    assert stage.home.deleted == ["old"]


def test_what_home_refuses_is_said_in_place(stage: Stage) -> None:
    stage.home.fail_with = BadOption("shard 0 has no folder for checkpoints: start it with --checkpoint-dir")
    expect(stage.page.locator("#checkpoints-problem.mild")).to_contain_text("start it with --checkpoint-dir")
    expect(stage.page.locator("#create-checkpoint")).to_be_hidden()
    expect(stage.page.locator("#health")).to_have_text("ready")
    assert stage.fits()
