"""The page over two real ranks, one of which is killed while an answer comes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ..chaos.answers import COUNT
from ..chaos.harness import FaultyCluster, kill
from ..chaos.orders import Order
from ..live_cluster import START_S
from .conftest import DESK

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytestmark = [pytest.mark.group, pytest.mark.chaos]

ROOT = Path(__file__).parents[2]
LAST = "#turns > li:last-child"
LISTEN = """() => {
    window.heard = [];
    const state = document.getElementById('state');
    const watch = new MutationObserver(() => heard.push(`${state.dataset.state}: ${state.textContent}`));
    watch.observe(state, { childList: true, subtree: true });
}"""
"""Keeps what a screen reader is told about the state."""


@pytest.fixture
def cluster(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyCluster]:
    """Asks for the browser first: without one nothing is started."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    with FaultyCluster(tmp_path) as started:
        yield started


def test_a_rank_is_killed_and_the_answer_goes_on(browser: Browser, cluster: FaultyCluster) -> None:
    right = cluster.content(COUNT, max_tokens=400)
    cluster.book.give(
        Order("hold", 1, 1, on="decode", times=0, seconds=0.03),  # slow enough to be killed in mid-answer
        # The page calls it a wait when a snapshot (each 0.5 s) says so and no token has come for 0.7 s.
        Order("hold", 1, 2, on="load", seconds=2.0),
    )
    page = browser.new_page(viewport=DESK)
    page.set_default_timeout(START_S * 1000)
    page.goto(cluster.url)
    page.wait_for_selector("#state[data-state=ready]")
    page.evaluate(LISTEN)
    page.click("#parameters summary")
    page.fill("#temperature", "0")
    page.fill("#max_tokens", "400")
    page.fill("#say", COUNT)
    page.press("#say", "Enter")
    page.wait_for_selector(f"{LAST} > .said:has-text('5')")
    kill(cluster.pids()[1])
    page.wait_for_selector(f"{LAST} .waits:has-text('Waiting for the model to start again')")
    assert page.inner_text(f"{LAST} > .said") != right
    page.wait_for_selector(f"{LAST} .end:not([hidden])")
    assert page.inner_text(f"{LAST} > .said") == right
    assert not page.is_visible(f"{LAST} .problem")
    assert "for a restart" in page.inner_text(f"{LAST} .numbers")
    page.wait_for_selector("#state[data-state=ready]")
    heard = page.evaluate("heard")
    assert any(line.startswith(("restarting: ", "starting: ")) and "rank 1" in line for line in heard), heard
    assert heard[-1] == "ready: Ready: tiny in 2 processes"
    page.click("header nav a[href='#desk']")
    page.wait_for_selector("#history li[data-kind=failed]")
    failed = page.inner_text("#history li[data-kind=failed]")
    assert "rank 1 was ended by signal 9" in failed
    assert "rank_lost" in failed
    assert re.search(r"Served again after .*; it had run for ", failed)
    page.wait_for_selector("#picture .mac .told:has-text('idle')")
    page.wait_for_selector("#nodes:has-text('2 processes, ')", state="attached")
    page.context.close()
