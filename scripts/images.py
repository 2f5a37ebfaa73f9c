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

from playwright.async_api import Browser, Page, StorageState, async_playwright

from mlxtp.agent import Agent, running_agent
from mlxtp.config import Settings

FOLDER = Path(__file__).parents[1] / "docs" / "images"
CHROMIUM = os.environ.get("MLXTP_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
MOST_BYTES = 200_000
WAIT_MS = 120_000
SIZES = {"": (1280, 800), "-390": (390, 844), "-360": (360, 740)}  # by what the name of a picture ends with
SCHEMES = {"": "light", "-dark": "dark"}
DESK, PHONE = SIZES[""], SIZES["-360"]
QUESTIONS = ("What can you do?", "Count from 1 to 60.")
LAST = "#turns > li:last-child"
READY = "#state[data-state=ready]:has-text('on 2 Macs')"


def settings(folder: Path, name: str, **more: object) -> Settings:
    """Of an agent that keeps to this machine's loopback."""
    fields: dict[str, object] = {"cluster": True, "name": name, "nodes": "2"}
    fields |= {"control_host": "127.0.0.1", "control_port": 0, "discovery": False, **more}
    return Settings(folder / name, "127.0.0.1", 0, 1, "tiny", **fields)  # type: ignore[arg-type]


async def visit(
    browser: Browser, url: str, size: tuple[int, int], scheme: str, kept: StorageState | None = None
) -> Page:
    """The page at `url`, once the group of both serves, with the conversations of `kept`."""
    width, height = size
    phone = width < DESK[0]
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,  # type: ignore[arg-type]
        has_touch=phone,
        is_mobile=phone,
        storage_state=kept,
    )
    page = await context.new_page()
    page.set_default_timeout(WAIT_MS)
    await page.goto(url)
    await page.wait_for_selector(READY)
    return page


async def ask(page: Page, text: str) -> None:
    """Ask, and wait until the answer is complete."""
    await page.fill("#say", text)
    await page.press("#say", "Enter")
    await page.wait_for_selector(f"{LAST}.assistant .end:not([hidden])")


async def save(page: Page, name: str) -> None:
    """One picture, which must be small."""
    path = FOLDER / f"{name}.png"
    await page.screenshot(path=path)
    if path.stat().st_size > MOST_BYTES:
        sys.exit(f"{path} has {path.stat().st_size} bytes; {MOST_BYTES} are the most")


async def fail(agents: tuple[Agent, ...]) -> None:
    """Kill rank 0."""
    for agent in agents:
        ranks = agent.parts.groups.shown.supervisor.status.ranks
        if ranks is not None and ranks.leader.pid is not None:
            os.kill(ranks.leader.pid, signal.SIGKILL)


async def pictures(browser: Browser, agents: tuple[Agent, ...]) -> None:
    """Every view in every size and both colour schemes, and a recovery, from the agent of rank 0."""
    await (await visit(browser, agents[0].url, DESK, "light")).close()
    leader = next(agent for agent in agents if agent.parts.groups.shown.supervisor.status.ranks is not None)
    desk = await visit(browser, leader.url, DESK, "light")
    for question in QUESTIONS:
        await ask(desk, question)
    kept = await desk.context.storage_state()
    phone = await visit(browser, f"{leader.url}/#desk", PHONE, "dark")
    await fail(agents)
    await phone.wait_for_selector("#picture:not(:has([data-state=ready]))")
    await save(phone, "recovery")
    await desk.wait_for_selector(READY)
    for size, pixels in SIZES.items():
        for scheme, colours in SCHEMES.items():
            page = await visit(browser, leader.url, pixels, colours, kept)
            await views(page, f"{size}{scheme}")
            await page.context.close()


async def views(page: Page, ending: str) -> None:
    """Chat, a new conversation, and the desk."""
    await page.click("nav a[href='#chat']")
    await page.hover(LAST)
    await save(page, f"chat{ending}")
    await page.click("#new-conversation")
    await save(page, f"start{ending}")
    await page.click("nav a[href='#desk']")
    await page.wait_for_selector("#history li:nth-child(2)")
    await page.wait_for_selector("#picture .mac >> nth=1")
    await save(page, f"cluster{ending}")


async def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with running_agent(settings(folder, "left")) as first:
            token = await first.parts.tokens.token()
            more = {"join": token, "peers": first.parts.node.introduction.addresses()}
            async with (
                running_agent(settings(folder, "right", **more)) as second,
                async_playwright() as started,
            ):
                browser = await started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
                await pictures(browser, (first, second))
                await browser.close()


asyncio.run(main())
