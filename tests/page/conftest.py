"""A real server with the page on it, whose backend and cluster are played, and the system's Chromium."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urljoin

import pytest

from mlxtp.api.app import create_app
from mlxtp.api.backend import StreamEnd, TokenEvent, Tokens
from mlxtp.api.guard import Access
from mlxtp.api.server import bind, serve
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text
from mlxtp.verbs import KeyUses, Verb

from ..api.conftest import FakeBackend, byte_level, save
from ..api.test_admin import FakeAdmin
from ..live_cluster import WAIT_S

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = os.environ.get("MLXTP_CHROMIUM") or shutil.which("chromium") or "/usr/bin/chromium"
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip
PHONE, SMALL = {"width": 360, "height": 740}, {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 860}
NO_BROWSER = (
    "tests of the page need a browser: EXTRAS=dev,browser make setup, "
    f"and Chromium at {CHROMIUM} or where MLXTP_CHROMIUM says"
)

RANK = {
    "node": "a" * 32,
    "phase": "idle",
    "memory_bytes": 14_200_000,
    "weight_bytes": 4_000_000,
    "kv_bytes": 100_000,
    "step_us": 1500,
    "wait_us": 800,
    "collective_us": 60,
    "in_flight": 0,
    "stage_busy_us": 0,
    "stage_waiting_us": 0,
}
NODE = {
    "node_id": "a" * 32,
    "name": "studio",
    "state": "alive",
    "self": True,
    "coordinator": True,
    "draining": False,
    "address": None,
    "chip": "Apple M3 Ultra",
    "memory_bytes": 512 * 10**9,
    "free_bytes": 300 * 10**9,
    "held_bytes": 150 * 10**9,
    "notes": [],
    "model_problem": None,
    "works_for": [],
}
GROUP = {
    "id": "org/tiny#0", "backend": "jaccl", "kind": "JACCL mesh", "split": [], "owner": "a" * 32,
    "owner_name": "studio",
    "members": [{"node_id": "a" * 32, "name": "studio"}, {"node_id": "b" * 32, "name": "mini"}],
    "state": "ready", "why": None, "epoch": 3, "requests": {"running": 0, "waiting": 0},
    "tokens_per_second": None, "cached_tokens": None, "exposed": None, "faster": None,
    "loaded_percent": None,
}  # fmt: skip
DEPLOYMENT = {
    "name": "org/tiny", "model": "org/tiny", "state": "ready", "replicas": {"ready": 1, "wanted": 1},
    "why": None, "groups": [GROUP],
}  # fmt: skip
MOMENT: dict[str, Any] = {
    "versions": ["mlxtp=0"],
    "self": "a" * 32,
    "state": "ready",
    "ready": True,
    "reason": None,
    "waiting": None,
    "problem": None,
    "epoch": 3,
    "model": "org/tiny",
    "model_bytes": 8_000_000,
    "context": 4096,
    "cluster": "c" * 16,
    "coordinator": "a" * 32,
    "group": {
        "world_size": 2,
        "backend": "jaccl",
        "kind": "JACCL mesh",
        "pairs": [[0, 1]],
        "fabric": {"collective_us": 195, "by": "bench", "at": 1_780_000_000},
    },
    "ranks": [RANK | {"rank": 0}, RANK | {"rank": 1, "node": "b" * 32, "memory_bytes": None}],
    "nodes": [NODE, NODE | {"node_id": "b" * 32, "name": "mini", "self": False, "coordinator": False,
                            "chip": None, "memory_bytes": None, "free_bytes": None, "held_bytes": 0,
                            "notes": ["RDMA is disabled"]}],
    "links": [{"a": "a" * 32, "b": "b" * 32, "network": "thunderbolt", "rdma": True, "mbps": None,
               "trip_us": 412}],
    "tokens_per_second": {"value": None, "of": "group"},
    "requests": {"open": 0, "generating": 0, "first_token": 0, "group": 0, "held_back": 0},
    "deployments": [DEPLOYMENT],
    "shown": "org/tiny#0",
    "running": [],
    "transfers": [],
    "history": [
        {"group": "org/tiny#0", "epoch": 3, "began": 1_780_000_100.0,
         "here": True, "world_size": 2, "backend": "jaccl",
         "kind": "JACCL mesh", "model": "org/tiny", "stages": [["spawned", 0.4]], "ready_s": 2.5,
         "lasted_s": None, "code": None, "reason": None},
        {"group": "org/tiny#0", "epoch": 2, "began": 1_780_000_000.0,
         "here": True, "world_size": 2, "backend": "jaccl",
         "kind": "JACCL mesh", "model": "org/tiny", "stages": [], "ready_s": 2.4, "lasted_s": 33.0,
         "code": "rank_lost", "reason": "rank 1 was ended by signal 9"},
        {"group": "org/tiny#0", "epoch": 1, "began": 1_779_999_000.0,
         "here": False, "world_size": 1, "backend": "none",
         "kind": "", "model": None, "stages": [], "ready_s": None, "lasted_s": 1.0, "code": None,
         "reason": None},
    ],
}  # fmt: skip
FORMING = {
    "state": "forming",
    "ready": False,
    "reason": "epoch 3 lost mini",
    "epoch": 4,
    "model": None,
    "history": [
        MOMENT["history"][0] | {"epoch": 4, "ready_s": None},
        MOMENT["history"][0] | {"lasted_s": 60.0, "code": "rank_lost", "reason": "epoch 3 lost mini"},
        *MOMENT["history"][1:],
    ],
}


class FakeObserved:
    """Shows what the test says."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.shown: Mapping[str, Any] = MOMENT
        self.looks = 0

    def snapshot(self) -> Mapping[str, Any]:
        self.looks += 1
        return self.shown


class Admin(FakeAdmin):
    """Has two models on its disk."""

    used: Sequence[Mapping[str, Any]] = ()
    senders: Sequence[Mapping[str, Any]] = ()

    async def carry_out(self, verb: Verb) -> Any:
        """About the use of keys the page asks again and again."""
        if isinstance(verb, KeyUses):
            return {"keys": self.used, "requests": self.senders}
        return await super().carry_out(verb)

    def _do(self, *what: str) -> dict[str, object]:
        super()._do(*what)
        models = [
            {"name": "tiny", "source": "embedded", "size_bytes": 2_000_000, "complete": True},
            {"name": "org/big", "source": "hub", "size_bytes": 40 * 10**9, "complete": False},
        ]
        return {"models": models, "model": what[1] if len(what) > 1 else ""}


@dataclass
class Site:
    """The running server, what it plays, and how its script goes on."""

    url: str
    backend: FakeBackend
    observed: FakeObserved
    admin: Admin
    ids: Any
    go_on: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        self.backend.__init__(self.backend.loaded_text)  # type: ignore[misc]
        self.observed.shown, self.observed.looks = MOMENT, 0
        self.admin.asked.clear()
        self.admin.error, self.admin.used, self.admin.senders = None, (), ()
        self.go_on.clear()

    def show(self, /, **changes: Any) -> None:
        """From now on the cluster is like this."""
        self.observed.shown = MOMENT | changes

    def says(self, *parts: str, step: int = 4, error: Exception | None = None) -> None:
        """The next answers: after each part but the last they wait for `go_on`. At the end stands `error`."""

        async def script() -> AsyncIterator[TokenEvent]:
            count = 0
            for number, part in enumerate(parts):
                while number and not self.go_on.is_set():  # noqa: ASYNC110 - a test's thread sets it
                    await asyncio.sleep(0.01)
                tokens = self.ids(part)
                count += len(tokens)
                for i in range(0, len(tokens), step):
                    yield Tokens(tuple(tokens[i : i + step]))
            if error is not None:
                raise error
            yield StreamEnd("stop", count, cached=3)

        self.backend.script = script


class Running:
    """A server in a thread of its own, until it is closed. Port 0 takes a free one."""

    def __init__(
        self,
        backend: FakeBackend | None,
        observed: FakeObserved,
        admin: Any = None,
        *,
        port: int = 0,
        access: Access | None = None,
    ) -> None:
        app = create_app(cast(Any, backend), admin=admin, observed=observed, access=access, keep_alive_s=0.1)
        sock = bind("127.0.0.1", port)
        self.port: int = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._observed = observed
        self._loop, self._stop = asyncio.new_event_loop(), asyncio.Event()
        serving = serve(app, sock, self._stop, grace_s=int(WAIT_S))
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(serving))
        self._thread.start()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """As an agent ends. Fails when it is held up. May be repeated."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._observed.over.set)
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(WAIT_S / 2)
            assert not self._thread.is_alive()
            self._loop.close()


@pytest.fixture(scope="session")
def running_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    tokenizer = byte_level()
    folder = save(tokenizer, tmp_path_factory.mktemp("tokenizer"))
    backend, observed, admin = FakeBackend(Text(LocalRenderer.load(folder))), FakeObserved(), Admin()
    running = Running(backend, observed, admin)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    yield Site(running.url, backend, observed, admin, ids)
    running.close()


@pytest.fixture
def site(running_site: Site) -> Site:
    """The running server with nothing said yet."""
    running_site.reset()
    return running_site


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give all skips for want of a browser one place, because pytest prints one line for each place."""
    report = yield
    if report.skipped and NO_BROWSER in str(report.longrepr):
        report.longrepr = (__file__, None, NO_BROWSER)  # type: ignore[assignment]
    return report


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Until the module ends, and no longer: an event loop runs in this thread meanwhile."""
    playwright = pytest.importorskip("playwright.sync_api", reason=NO_BROWSER)
    if not Path(CHROMIUM).exists():
        pytest.skip(NO_BROWSER)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS, timeout=WAIT_S * 1000)
        yield browser
        browser.close()


@dataclass
class Visit:
    """A tab with the page in it. `trouble` collects what the browser complained about."""

    page: Page
    trouble: list[str] = field(default_factory=list)
    requested: list[str] = field(default_factory=list)
    _heard: list[tuple[Any, Any]] = field(default_factory=list)

    def begin(self, url: str) -> None:
        """Open the page, and note from its first request on what is wrong."""
        self.hear("console", lambda said: self.trouble.append(said.text) if said.type == "error" else None)
        self.hear("pageerror", lambda error: self.trouble.append(str(error)))
        self.hear("request", lambda request: self.requested.append(request.url))
        self.page.goto(url)

    def hear(self, what: Any, listener: Any) -> None:
        """Call `listener` for each such event of the tab, until the visit ends."""
        self._heard.append((what, listener))
        self.page.on(what, listener)

    def end(self) -> None:
        """Leave a tab that has forgotten all and shows nothing, at the same site, which keeps its process."""
        for what, listener in self._heard:
            self.page.remove_listener(what, listener)
        self.page.unroute_all()
        if self.page.url.startswith("http"):
            self.page.goto(urljoin(self.page.url, "/health"))
            self.page.evaluate("localStorage.clear(); sessionStorage.clear()")

    def state(self, words: str) -> None:
        """Wait until the line about the state has these words."""
        self.shows(words, "#state")

    def shows(self, words: str, within: str = "#turns") -> None:
        """Wait until this element has these words. (`wait_for_function` would need `eval` in the page.)"""
        self.page.wait_for_selector(
            f"{within}:has-text({json.dumps(words, ensure_ascii=False)})", state="attached"
        )

    def send(self, text: str) -> None:
        self.page.fill("#say", text)
        self.page.press("#say", "Enter")

    def answered(self) -> None:
        """Wait until the last answer has come to its end."""
        self.page.wait_for_selector("#turns > li:last-child.assistant .end:not([hidden])")
        self.page.wait_for_selector("#send:not([hidden])")

    def open(self, view: str) -> None:
        self.page.click(f"header nav a[href='#{view}']")
        self.page.wait_for_selector(f"#{view}:not([hidden])")

    def text(self, selector: str) -> str:
        return self.page.inner_text(selector)


class Tabs:
    """Tabs of a browser, each for one visit after the other: a new one starts a process for a second."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._free: dict[str, list[Page]] = {}

    def take(self, how: Mapping[str, Any]) -> Page:
        """Return one with these options of its context, in which nothing is stored."""
        if free := self._free.get(str(how)):
            return free.pop()
        context = self._browser.new_context(**how)
        context.set_default_timeout(WAIT_S / 4 * 1000)
        return context.new_page()

    def give_back(self, page: Page, how: Mapping[str, Any]) -> None:
        """Have it used again by a visit with these options."""
        self._free.setdefault(str(how), []).append(page)


@contextlib.contextmanager
def visits_of(tabs: Tabs, site: Site) -> Iterator[Any]:
    """Call it for a new visit, with options of the context. At the end no browser must have complained."""
    visits: list[tuple[Visit, dict[str, Any]]] = []

    def visit(fragment: str = "", url: str = "", **how: Any) -> Visit:
        how = {"viewport": DESK, **how}
        made = Visit(tabs.take(how))
        visits.append((made, how))
        made.begin(f"{url or site.url}/{fragment}")
        return made

    yield visit
    for each, how in visits:
        each.end()
        tabs.give_back(each.page, how)
    expected = ("status of 4", "status of 503")  # refusals, which tests are about
    troubles = [line for each, _ in visits for line in each.trouble]
    assert [line for line in troubles if not any(each in line for each in expected)] == []
    ours = ("http://127.0.0.1:", "blob:", "about:")
    assert [url for each, _ in visits for url in each.requested if not url.startswith(ours)] == []


@pytest.fixture(scope="module")
def tabs(browser: Browser) -> Tabs:
    return Tabs(browser)


@pytest.fixture
def visiting(tabs: Tabs, site: Site) -> Iterator[Any]:
    """Call it for a new visit, see `visits_of`."""
    with visits_of(tabs, site) as visit:
        yield visit


@pytest.fixture(scope="module")
def reading(tabs: Tabs, running_site: Site) -> Iterator[Visit]:
    """One page for tests that only call its modules."""
    with visits_of(tabs, running_site) as visit:
        yield visit()


@pytest.fixture
def visit(visiting: Any) -> Visit:
    """The page on a desk, once it knows the cluster."""
    made: Visit = visiting()
    made.state("Ready: tiny on 2 Macs")
    return made
