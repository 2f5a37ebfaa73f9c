"""Pages of another origin, in a real browser: it asks first, and keeps from a page what it was not given."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..api.conftest import FakeBackend, byte_level, save, says
from ..api.test_server_access import BODY, Door, door
from ..live_cluster import WAIT_S
from .conftest import ARGUMENTS, CHROMIUM

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

ASK = """async ([url, headers, body]) => {
  try {
    const how = body ? { method: "POST", body: JSON.stringify(body) } : {};
    const answer = await fetch(url, { headers, ...how });
    const text = await answer.text();
    return { status: answer.status, text, again: answer.headers.get("retry-after") };
  } catch (error) {
    return { status: 0, text: String(error), again: null };
  }
}"""
OPEN: Any = {"model": "default", "messages": BODY["messages"], "stream": True}


class Handler(http.server.BaseHTTPRequestHandler):
    """An empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>another page</title>")

    def log_message(self, *_: object) -> None:
        """Not on the terminal."""


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that has nothing to do with mlxtp, from a server of its own on this machine."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        context = browser.new_context()
        context.set_default_timeout(WAIT_S / 4 * 1000)
        opened = context.new_page()
        opened.goto(f"http://localhost:{server.server_address[1]}/")
        yield opened
        context.close()
        server.shutdown()
        thread.join(WAIT_S)


@pytest.fixture
def backend(tmp_path: Path) -> FakeBackend:
    return FakeBackend(
        Text(LocalRenderer.load(save(byte_level(), tmp_path / "tokenizer"))), says([60, 61, 62])
    )


def ask(page: Page, server: Door, key: str, path: str = "/v1/chat/completions", body: Any = OPEN) -> Any:
    headers = {"content-type": "application/json", "x-stainless-lang": "js"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    return page.evaluate(ASK, [server.url + path, headers, body])


def origin(page: Page) -> str:
    return str(page.evaluate("location.origin"))


@pytest.mark.parametrize("anybody", [False, True])
def test_a_page_on_the_list_streams_and_reads_refusals(
    backend: FakeBackend, tmp_path: Path, page: Page, anybody: bool
) -> None:
    with door(backend, tmp_path, origins=("*" if anybody else origin(page),)) as server:
        key = server.key(per_minute=1)
        answered = ask(page, server, key)
        assert answered["status"] == 200
        assert answered["text"].rstrip().endswith("data: [DONE]")
        often = ask(page, server, key)
        assert (often["status"], often["again"]) == (429, "60")
        without = ask(page, server, "")
        assert without["status"] == 401
        assert "this server requires an API key" in without["text"]
        assert ask(page, server, key, "/admin/status", None)["status"] == 0


def test_a_page_that_is_not_on_the_list_gets_nothing(
    backend: FakeBackend, tmp_path: Path, page: Page
) -> None:
    with door(backend, tmp_path, origins=("http://localhost:1",)) as server:
        refused = ask(page, server, server.key())
        assert (refused["status"], refused["text"]) == (0, "TypeError: Failed to fetch")
        assert ask(page, server, "", "/v1/models", None)["status"] == 0
    assert backend.requests == []


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_page_that_is_not_of_this_mac_cannot_ask_blindly_and_one_that_is_may_ask(
    backend: FakeBackend, tmp_path: Path, page: Page, host: str
) -> None:
    """Such a request asks nothing beforehand, and its answer stays hidden from the page."""
    blind = """async ([url, body]) => {
      const how = body ? { method: "POST", headers: { "content-type": "text/plain" }, body } : {};
      return (await fetch(url, { mode: "no-cors", ...how })).type;
    }"""
    with door(backend, tmp_path, rule="never") as server:
        assert ask(page, server, "")["status"] == 200
        backend.requests.clear()
        page.goto(origin(page).replace("localhost", "foreign.localhost"))
        url = f"http://{host}:{server.port}"
        body = json.dumps({"model": "default", "messages": BODY["messages"]})
        assert page.evaluate(blind, [f"{url}/v1/chat/completions", body]) == "opaque"
        assert page.evaluate(blind, [f"{url}/v1/models", None]) == "opaque"
        with page.expect_navigation():
            page.evaluate("url => { location.href = url }", f"{url}/health")
        assert "may not use this server" in page.content()
    assert backend.requests == []


@pytest.mark.parametrize("app", [False, True])
def test_a_file_that_a_user_opens_gets_nothing_and_an_app_of_files_may_ask(
    backend: FakeBackend, tmp_path: Path, browser: Browser, app: bool
) -> None:
    """A file's origin is `null`, also for a WebSocket, unless the program lets files read each other."""
    opens = """url => new Promise(done => {
      const socket = new WebSocket(url);
      socket.onopen = () => done(true);
      socket.onerror = () => done(false);
    })"""
    (file := tmp_path / "saved.html").write_text("<iframe sandbox='allow-scripts' srcdoc='x'></iframe>")
    arguments = [*ARGUMENTS, *["--allow-file-access-from-files"] * app]
    with (
        door(backend, tmp_path, rule="never") as server,
        browser.browser_type.launch(executable_path=CHROMIUM, args=arguments) as own,
    ):
        page = own.new_page()
        page.goto(file.as_uri())
        assert ask(page, server, "")["status"] == (200 if app else 0)
        for frame, may in zip(page.frames, (app, False), strict=True):
            assert frame.evaluate(opens, f"ws://127.0.0.1:{server.port}/v1/responses") is may
