"""Pictures of the page for the README: two real agents on this machine, one rank killed under an answer.

make images        (needs the extra `browser` and the system's Chromium)
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from playwright.async_api import Browser, Page, async_playwright

from mlxtp.config import Settings
from mlxtp.node.agent import Agent, running_agent

FOLDER = Path(__file__).parents[1] / "docs" / "images"
CHROMIUM = os.environ.get("MLXTP_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
MOST_BYTES = 200_000
WAIT_MS = 120_000
DESK, PHONE = (1100, 760), (360, 740)
TALL = 960
QUESTION = "Count from 1 to 60."
LAST = "#turns > li:last-child"
READY = "#state[data-state=ready]:has-text('on 2 ranks')"


def settings(folder: Path, name: str, **more: object) -> Settings:
    """Of an agent that keeps to this machine's loopback."""
    fields: dict[str, object] = {"cluster": True, "name": name, "interface": "127.0.0.1", "nodes": "2"}
    fields |= {"control_host": "127.0.0.1", "control_port": 0, "discovery": False, **more}
    return Settings(folder / name, "127.0.0.1", 0, 1, "tiny", **fields)  # type: ignore[arg-type]


async def visit(browser: Browser, url: str, size: tuple[int, int], scheme: str) -> Page:
    """The page at `url`, once the group of both serves."""
    width, height = size
    page = await browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page.set_default_timeout(WAIT_MS)
    await page.goto(url)
    await page.wait_for_selector(READY)
    return page


async def ask(page: Page, text: str) -> None:
    """Ask, and wait until the answer is complete."""
    await page.fill("#say", text)
    await page.press("#say", "Enter")
    await page.wait_for_selector(f"{LAST}.assistant .numbers:not([hidden])")


async def save(page: Page, name: str) -> None:
    """One picture, which must be small."""
    path = FOLDER / f"{name}.png"
    await page.screenshot(path=path)
    if path.stat().st_size > MOST_BYTES:
        sys.exit(f"{path} has {path.stat().st_size} bytes; {MOST_BYTES} are the most")


async def fail(agents: tuple[Agent, ...]) -> None:
    """Kill rank 0."""
    for agent in agents:
        ranks = agent.supervisor.ranks
        if ranks is not None and ranks.leader.pid is not None:
            os.kill(ranks.leader.pid, signal.SIGKILL)


async def pictures(browser: Browser, agents: tuple[Agent, ...]) -> None:
    """Chat, cluster and a recovery, from where rank 0 is."""
    await (await visit(browser, agents[0].url, DESK, "light")).close()
    leader = next(agent for agent in agents if agent.supervisor.ranks is not None)
    desk = await visit(browser, leader.url, DESK, "light")
    await ask(desk, "Repeat exactly: FALCON-MERCURY-7749")
    await ask(desk, QUESTION)
    await save(desk, "chat")
    phone = await visit(browser, f"{leader.url}/#cluster", PHONE, "dark")
    await fail(agents)
    await phone.wait_for_selector("#picture:not(:has([data-state=ready]))")
    await save(phone, "recovery")
    await desk.wait_for_selector(READY)
    await desk.click("nav a[href='#cluster']")
    await desk.wait_for_selector("#history li:nth-child(2)")
    await desk.wait_for_selector("#ranks:not(:has-text('not known'))")
    await desk.wait_for_selector("#figures:not(:has-text('not known'))")
    await desk.set_viewport_size({"width": DESK[0], "height": TALL})
    await save(desk, "cluster")


async def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running_agent(settings(folder, "left")) as first:
            assert first.cluster is not None
            token = await first.cluster.issuing.token()
            more = {"join": token, "peers": first.cluster.addresses}
            async with (
                running_agent(settings(folder, "right", **more)) as second,
                async_playwright() as started,
            ):
                browser = await started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
                await pictures(browser, (first, second))
                await browser.close()


asyncio.run(main())
