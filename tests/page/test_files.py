"""The files of the page: how they are served, and that they need no other server."""

from __future__ import annotations

import hashlib
import re
import tomllib
from pathlib import Path

import httpx
import pytest

from mlxtp.api.admin import FOLDER

from ..live_cluster import WAIT_S
from .conftest import Site

FILES = sorted(path for path in FOLDER.iterdir() if path.is_file())
VENDOR = FOLDER / "vendor"
LIBRARIES = sorted(path for path in VENDOR.iterdir() if path.is_dir())
OUTSIDE = re.compile(r"""(?:https?:|wss?:|^|["'(\s=])//[\w.-]+\.\w+""", re.MULTILINE)
NAMESPACE = "http://www.w3.org/2000/svg"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


HTML = {"accept": "text/html,*/*;q=0.8"}


def address(path: Path) -> str:
    return "/" if path.name == "index.html" else f"/page/{path.name}"


def test_there_are_files_of_each_kind() -> None:
    assert {path.suffix for path in FILES} == set(TYPES)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_each_file_is_served_as_it_is(site: Site, path: Path) -> None:
    response = httpx.get(site.url + address(path), headers=HTML)
    assert response.status_code == 200
    assert response.content == path.read_bytes()
    assert response.headers["content-type"].startswith(TYPES[path.suffix])
    assert response.headers["cache-control"] == "no-cache"
    again = httpx.get(site.url + address(path), headers=HTML | {"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["etag"] == response.headers["etag"]
    other = httpx.get(site.url + address(path), headers=HTML | {"if-none-match": '"of another version"'})
    assert other.status_code == 200


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_browser_is_told_to_run_nothing_else(site: Site, path: Path) -> None:
    headers = httpx.get(site.url + address(path), headers=HTML).headers
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
    imported = re.findall(r'(?:from|import\() ?"\./([^"]+)"', path.read_text())
    assert {name for name in imported if not name.startswith("vendor/")} <= names
    assert [name for name in imported if not (FOLDER / name).is_file()] == []


def test_libraries_are_unchanged_and_none_is_unlisted() -> None:
    lines = (VENDOR / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    there = {path.relative_to(VENDOR).as_posix(): path for path in VENDOR.glob("*/*")}
    assert {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in there.items()} == listed


@pytest.mark.parametrize("folder", LIBRARIES, ids=lambda path: path.name)
def test_each_library_has_its_version_source_and_licence(folder: Path) -> None:
    rows = [line.split("|") for line in (VENDOR / "README.md").read_text().splitlines()]
    row = next(row for row in rows if len(row) > 4 and f"`{folder.name}`" in row[1])
    assert re.fullmatch(r"\d+\.\d+\.\d+", row[2].strip())
    assert re.search(r"\b(MIT|BSD-3-Clause)\b", row[3])
    assert "https://github.com/" in row[4]
    for path in folder.glob("LICENSE*"):
        assert re.search(r"Permission is hereby granted|Redistribution and use", path.read_text())
    assert (folder / "LICENSE").is_file()


def test_libraries_are_served_without_their_papers(site: Site) -> None:
    kinds = {".mjs": "text/javascript", ".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2"}
    with httpx.Client(base_url=site.url) as client:
        for path in (VENDOR / "README.md", VENDOR / "SHA256SUMS", *VENDOR.glob("*/*")):
            response = client.get(f"/page/{path.relative_to(FOLDER).as_posix()}")
            served = not path.name.startswith("LICENSE") and path.suffix in kinds
            assert response.status_code == (200 if served else 404), path
            if served:
                assert response.headers["content-type"].startswith(kinds[path.suffix])
                assert response.content == path.read_bytes()
                assert "script-src" not in response.headers["content-security-policy"]


@pytest.mark.parametrize(
    "path", ["/page/", "/page/none.js", "/page/../app.py", "/page/%2e%2e/app.py", "/index.html"]
)
def test_nothing_else_is_served(site: Site, path: str) -> None:
    assert httpx.get(site.url + path).status_code == 404


def test_the_page_only_reads(site: Site) -> None:
    for path in ("/", "/page/main.js", "/cluster", "/cluster/events"):
        assert httpx.post(site.url + path).status_code == 405


def test_a_client_of_ollama_that_looks_for_no_page_gets_its_words(site: Site) -> None:
    for accept in ({}, {"accept": "application/json"}):
        found = httpx.get(site.url, headers=accept)
        assert (found.status_code, found.text) == (200, "Ollama is running")
        assert "accept" in found.headers["vary"]
        assert found.headers["content-type"].startswith("text/plain")
    assert "accept" in httpx.get(site.url, headers=HTML).headers["vary"]
    assert httpx.head(site.url).headers["content-type"].startswith("text/html")


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
    root = Path(__file__).parents[2]
    setup = tomllib.loads((root / "pyproject.toml").read_text())
    patterns = setup["tool"]["setuptools"]["package-data"]["mlxtp"]
    taken = {path for pattern in patterns for path in (root / "mlxtp").glob(pattern)}
    assert {path for path in FOLDER.rglob("*") if path.is_file()} <= taken
    licences = {path for pattern in setup["project"]["license-files"] for path in root.glob(pattern)}
    assert set(VENDOR.glob("*/LICENSE*")) <= licences
