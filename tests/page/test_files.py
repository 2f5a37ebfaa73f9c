"""The files of the page: how they are served, and that they need no other server."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from mlxtp.api.admin import FOLDER

from ..live_cluster import WAIT_S
from .conftest import Site

FILES = sorted(FOLDER.iterdir())
OUTSIDE = re.compile(r"""(?:https?:|wss?:|^|["'(\s=])//[\w.-]+\.\w+""", re.MULTILINE)
NAMESPACE = "http://www.w3.org/2000/svg"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def address(path: Path) -> str:
    return "/" if path.name == "index.html" else f"/page/{path.name}"


def test_there_are_files_of_each_kind() -> None:
    assert {path.suffix for path in FILES} == set(TYPES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_served_as_it_is(site: Site, path: Path) -> None:
    response = httpx.get(site.url + address(path))
    assert response.status_code == 200
    assert response.content == path.read_bytes()
    assert response.headers["content-type"].startswith(TYPES[path.suffix])
    assert response.headers["cache-control"] == "no-cache"
    again = httpx.get(site.url + address(path), headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == response.headers["etag"]
    other = httpx.get(site.url + address(path), headers={"if-none-match": '"of another version"'})
    assert other.status_code == 200


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_browser_is_told_to_run_nothing_else(site: Site, path: Path) -> None:
    headers = httpx.get(site.url + address(path)).headers
    rules = dict(rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";"))
    assert rules["default-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert "script-src" not in rules
    for name in ("object-src", "base-uri", "form-action", "frame-ancestors"):
        assert rules[name] == "'none'"
    assert rules["require-trusted-types-for"] == "'script'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_comes_from_elsewhere(path: Path) -> None:
    text = path.read_text().replace(NAMESPACE, "")
    assert OUTSIDE.findall(text) == []


@pytest.mark.parametrize(
    "bad",
    [
        '<script src="https://cdn.example.com/x.js">',
        '<img src="//example.com/a.png">',
        "@import url(http://fonts.example.org/a.css)",
        "fetch('//example.com')",
        "new WebSocket(`wss://example.com`)",
    ],
)
def test_what_comes_from_elsewhere_is_found(bad: str) -> None:
    assert OUTSIDE.search(bad)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_text_is_ever_read_as_html_and_no_script_stands_in_the_page(path: Path) -> None:
    text = path.read_text()
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
        assert word not in text
    assert not re.search(r"\son\w+\s*=\s*[\"']", text)
    assert not re.search(r"\sstyle\s*=", text)
    assert re.findall(r"<script(?![^>]*\ssrc=)", text) == []


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".js"], ids=lambda path: path.name)
def test_each_module_imports_what_is_there(path: Path) -> None:
    names = {each.name for each in FILES}
    imported = re.findall(r'from "\./([^"]+)"', path.read_text())
    assert set(imported) <= names


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py", "/index.html"]
)
def test_nothing_else_is_served(site: Site, path: str) -> None:
    assert httpx.get(site.url + path).status_code == 404


def test_the_page_only_reads(site: Site) -> None:
    for path in ("/", "/page/main.js", "/cluster", "/cluster/events"):
        assert httpx.post(site.url + path).status_code == 405


def test_head_asks_for_headers_alone(site: Site) -> None:
    with httpx.Client(timeout=WAIT_S / 4) as client:  # one connection: each waits for the end of the last
        for path in ("/", "/cluster/events", "/cluster"):
            assert client.head(site.url + path).status_code == 200


def test_pages_from_elsewhere_may_not_look(site: Site) -> None:
    for path in ("/", "/cluster", "/cluster/events"):
        assert httpx.get(site.url + path, headers={"origin": "https://example.com"}).status_code == 403
        assert httpx.get(site.url + path, headers={"host": "example.com"}).status_code == 421


def test_it_is_packaged() -> None:
    """The files that setuptools takes along are all of them."""
    listed = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert '"api/page/*"' in listed
    assert all(path.is_file() for path in FILES)
