"""The desk of two real agents: what one page does, the other one shows."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ..agents.agents import Agent
from ..agents.test_one_machine import pair
from ..live_cluster import START_S, rank_processes
from .conftest import DESK

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.group
__all__ = ["pair"]

COUNT = "Count from 1 to 60."


@pytest.fixture
def pages(browser: Browser, pair: tuple[Agent, Agent]) -> Iterator[tuple[Page, Page]]:
    """The desk of the first agent, with its key, and that of the second one, without."""
    opened = []
    for agent, with_key in zip(pair, (True, False), strict=True):
        page = browser.new_page(viewport=DESK)
        page.set_default_timeout(START_S * 1000)
        printed = re.search(r"http://\S+", agent.command("page").stdout)
        assert printed is not None
        page.goto(printed[0] if with_key else printed[0].split("#")[0])
        page.wait_for_selector("#state[data-state=ready]")
        page.click("header nav a[href='#desk']")
        opened.append(page)
    yield opened[0], opened[1]
    for page in opened:
        page.context.close()


@pytest.mark.chaos
def test_a_model_is_asked_unloaded_and_loaded_on_one_page_and_both_show_it(pages: tuple[Page, Page]) -> None:
    here, there = pages
    for page in pages:
        page.wait_for_selector("#picture .band[data-how='tensor parallel']:has-text('tiny')")
        assert sorted(page.locator("#picture .mac .name").all_text_contents()) == ["anna", "ben"]
        assert page.locator("#picture .cable.used").count() == 1
    assert there.locator("#deployments button").count() == 0
    here.fill("#say", COUNT)
    here.press("#say", "Enter")
    here.wait_for_selector("#requests li:has-text('Writing')")
    here.wait_for_selector("#picture .token", state="attached")
    there.wait_for_selector("#headline:has-text('1 writing')")
    here.wait_for_selector("#requests-more:has-text('None is open.')")
    here.wait_for_selector("#picture .token", state="detached")
    here.click("#deployments button[aria-label='Unload tiny']")
    here.click("#asking-yes")
    here.wait_for_selector("#said:has-text('tiny is unloaded.')")
    for page in pages:
        page.wait_for_selector("#deployments:has-text('No model is loaded.')")
        page.wait_for_selector("#picture .band", state="detached")
        page.wait_for_selector("#history li:first-child:has-text('tiny ended')")
    ends = [page.inner_text("#history li:first-child") for page in pages]
    assert any("tiny was unloaded" in end for end in ends), "the Mac of rank 0 knows why"
    here.click("#load-link")
    here.click("#disk button[aria-label='Load tiny']")
    here.wait_for_selector("#said:has-text('tiny is added.')")
    here.click("header nav a[href='#desk']")
    for page in pages:
        page.wait_for_selector("#picture .band[data-state=ready]")
        page.wait_for_selector("#deployments .state:has-text('Ready')")
        # The Mac that does not know why it ended tells of the load as what was done about that.
        page.wait_for_selector(
            "#history li:first-child:is(:has-text('tiny was loaded'), :has-text('erved again'))"
        )


@pytest.mark.chaos
def test_a_replica_more_is_a_band_more_and_a_rank_that_dies_is_told_of(
    pages: tuple[Page, Page], pair: tuple[Agent, Agent]
) -> None:
    here = pages[0]
    serve = pair[0].command("serve", "tiny", "--nodes", "1")
    assert serve.returncode == 0, serve.stderr
    here.wait_for_selector("#picture .band[data-how=''][data-state=ready]")
    here.click("#deployments button[aria-label='One more replica of tiny']")
    for page in pages:
        page.wait_for_selector("#picture .band[data-state=ready] >> nth=1")
        page.wait_for_selector("#deployments:has-text('2 of 2 replicas ready')")
    os.kill(rank_processes(pair[0].home)[0], signal.SIGKILL)
    for page in pages:
        page.wait_for_selector("#history li[data-kind=failed]:has-text('signal 9')")
        page.wait_for_selector("#history li[data-kind=failed]:has-text('Served again after')")
    here.click("#deployments button[aria-label='One replica of tiny less']")
    for page in pages:
        page.wait_for_selector("#picture .band >> nth=1", state="detached")
