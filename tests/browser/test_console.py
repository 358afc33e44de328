"""The console page in a real browser, against real shards."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Browser, Error, Page, expect
from shardam_testing.admin import Console, running_admin
from shardam_testing.processes import running_shards

from shardam_proto.schema import Normal, TableSpec
from shardam_proto.v1 import common_pb2

LONG_ID = 2**53 + 1
DIM = 6
NAMES = (f"items.v{number}" for number in itertools.count())


@pytest.fixture
def table(console: Console) -> common_pb2.TableInfo:
    """A table with 50 rows and one whose id no double can hold."""
    info: common_pb2.TableInfo = console.grpc.create(TableSpec(next(NAMES), DIM, init=Normal(0, 0.05)))
    push(console, info, [LONG_ID, *range(50)])
    return info


def push(console: Console, info: common_pb2.TableInfo, ids: list[int]) -> None:
    gradients = np.random.default_rng(len(ids)).standard_normal((len(ids), DIM))
    console.grpc.push(info, ids, gradients)


def test_the_page_shows_cluster_shards_and_tables(page: Page, console: Console, table: common_pb2.TableInfo) -> None:
    page.goto(console.admin.url)
    expect(page.locator("#health")).to_have_text("ready")
    expect(page.locator("#cluster-name")).to_have_text("test")
    expect(page.locator("#cluster-epoch")).to_have_text("1")
    expect(page.locator("#shards tbody tr")).to_have_count(2)
    expect(page.locator("#shards .pill")).to_have_text(["serving", "serving"])
    row = page.locator(f"#tables tr[data-key='{table.spec.name}']")
    expect(row).to_contain_text("normal(mean=0, std=0.05)")
    expect(row.locator("td").nth(1)).to_have_text("51")
    expect(row.locator("td").nth(3)).to_have_text("1")
    expect(row.locator("td").nth(5)).to_have_text("0.1")


def test_a_row_is_found_by_keyboard_alone_with_every_digit(page: Page, console: Console, table: common_pb2.TableInfo) -> None:
    page.goto(console.admin.url)
    page.get_by_role("button", name=table.spec.name, exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.locator("#rows-table")).to_have_text(table.spec.name)
    page.get_by_label("Row id").focus()
    page.keyboard.type(str(LONG_ID))
    page.keyboard.press("Enter")
    expect(page.locator("#row-id")).to_have_text(str(LONG_ID))
    expect(page.locator("#row-strips svg")).to_have_count(3)
    with console.admin.client() as client:
        response = client.get(f"/v1/tables/{table.spec.name}/rows/{LONG_ID}")
    row = response.json()
    facts = page.locator("#row-facts")
    expect(facts).to_contain_text(f"owner shard{row['shard']}")
    expect(facts).to_contain_text(f"bucket{row['bucket']}")
    expect(facts).to_contain_text("step1")
    expect(facts).to_contain_text(f"ETag{response.headers['etag']}")
    components = (("weight", row["weight"]), *((name, row["optimizer"][name]) for name in ("exp_avg", "exp_avg_sq")))
    for name, values in components:
        strip = page.locator(f".strip.{name}")
        expect(strip.locator("rect")).to_have_count(DIM)
        shown = [float(re.sub(r"^\d", "", text)) for text in strip.locator("li").all_text_contents()]
        assert shown == values
    assert page.url.endswith(f"#table={table.spec.name}&row={LONG_ID}")


def test_rows_are_browsed_page_by_page(page: Page, console: Console, table: common_pb2.TableInfo) -> None:
    page.goto(f"{console.admin.url}/#table={table.spec.name}")
    next_page = page.locator("#rows-pager").get_by_role("button", name="Next page")
    seen: list[str] = []
    first = ""
    for expected in (20, 20, 11):
        buttons = page.locator("#rows tbody button")
        expect(buttons).to_have_count(expected)
        if seen:
            expect(buttons.first).not_to_have_text(first)
        first = buttons.first.text_content() or ""
        seen += buttons.all_text_contents()
        if expected == 20:
            next_page.click()
            expect(page.locator("#rows tbody tr").filter(has_text=re.compile(f"^{re.escape(first)}$"))).to_have_count(0)
    assert sorted(seen, key=int) == [*(str(row_id) for row_id in range(50)), str(LONG_ID)]
    expect(next_page).to_be_disabled()


def test_a_wrong_id_and_an_unknown_row_are_said_in_place(page: Page, console: Console, table: common_pb2.TableInfo) -> None:
    page.goto(f"{console.admin.url}/#table={table.spec.name}")
    page.get_by_label("Row id").fill("<img src=x onerror=alert(1)>")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#row-problem strong")).to_have_text("ID_DTYPE")
    expect(page.locator("#row-id")).to_have_text("<img src=x onerror=alert(1)>")
    expect(page.locator("main img")).to_have_count(0)
    page.get_by_label("Row id").fill("-77")
    page.get_by_role("button", name="Look up").click()
    expect(page.locator("#row-problem strong")).to_have_text("UNKNOWN_ROW")
    expect(page.locator(".strip.initial_weight rect")).to_have_count(DIM)
    expect(page.locator("#row-facts")).to_contain_text("owner shard")


def test_a_push_is_seen_without_a_reload_or_new_elements(page: Page, console: Console, table: common_pb2.TableInfo) -> None:
    page.goto(f"{console.admin.url}/#table={table.spec.name}&row=7")
    expect(page.locator("#row-facts")).to_contain_text("step1")
    expect(page.locator("#rows tbody tr")).to_have_count(20)
    expect(page.locator("#shards tbody tr")).to_have_count(2)  # the three parts of the page arrive in any order
    page.evaluate("document.querySelectorAll('#rows tr, #shards tr, .strip').forEach((element) => { element.mark = 1 })")
    page.get_by_label("Row id").fill("being typed")
    before = page.locator(".strip.weight li").all_text_contents()
    push(console, table, [7])
    expect(page.locator("#row-facts")).to_contain_text("step2")
    assert page.locator(".strip.weight li").all_text_contents() != before
    unmarked = "[...document.querySelectorAll('#rows tr, #shards tr, .strip')].filter((element) => element.mark !== 1).length"
    assert page.evaluate(unmarked) == 0
    assert page.get_by_label("Row id").input_value() == "being typed"


def test_the_page_follows_the_scheme_and_fits_a_phone(browser: Browser, console: Console, table: common_pb2.TableInfo) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        context = browser.new_context(color_scheme=scheme, viewport={"width": 360, "height": 740})
        page = context.new_page()
        page.goto(f"{console.admin.url}/#table={table.spec.name}&row=7")
        expect(page.locator(".strip.weight rect")).to_have_count(DIM)
        expect(page.locator("#rows tbody tr")).to_have_count(20)
        expect(page.locator("#shards tbody tr")).to_have_count(2)
        expect(page.locator(f"#tables tr[data-key='{table.spec.name}']")).to_be_visible()
        grounds.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        context.close()
    assert grounds[0] != grounds[1]


def test_the_documentation_works_offline(page: Page, console: Console) -> None:
    page.goto(f"{console.admin.url}/docs")
    expect(page.locator(".opblock").first).to_be_visible()


def test_a_token_opens_the_page_through_the_browsers_own_prompt(browser: Browser, tmp_path: Path) -> None:
    with (
        running_shards(tmp_path, 1, token="s3cret") as shards,
        running_admin(shards.valkey.url, tmp_path, token="s3cret") as admin,
    ):
        context = browser.new_context(http_credentials={"username": "anyone", "password": "s3cret"})
        page = context.new_page()
        page.goto(admin.url)
        expect(page.locator("#health")).to_have_text("ready")
        expect(page.locator("#tables-empty")).to_be_visible()
        context.close()
        stranger = browser.new_context()
        with pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):  # nobody answers the prompt here
            stranger.new_page().goto(admin.url)
        stranger.close()


def test_a_shard_that_is_away_and_a_lost_api_are_said_in_place(browser: Browser, tmp_path: Path) -> None:
    with running_shards(tmp_path, 2) as shards, running_admin(shards.valkey.url, tmp_path) as admin:
        context = browser.new_context()
        own_page = context.new_page()
        own_page.goto(admin.url)
        expect(own_page.locator("#shards .pill")).to_have_text(["serving", "serving"])
        shards.processes[1].kill()
        expect(own_page.locator("#shards .pill").nth(1)).to_have_text(re.compile("unreachable|missing"))
        expect(own_page.locator("#cluster-problem strong")).to_have_text("NOT_READY")
        expect(own_page.locator("#cluster-problem")).to_contain_text("1 of 2 shards does not serve, see below")
        expect(own_page.locator("#shards-problem")).to_contain_text("shard 1")
        admin.process.kill()
        expect(own_page.locator("#health")).to_have_text("no answer")
        expect(own_page.locator("#shards-problem strong")).to_have_text("NO_ANSWER")
        context.close()
