"""Access, decided from what stands in a request; no server, no clock."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Scope

from mlxtp.api.api_keys import KeyFile, KeyRing, digest_of
from mlxtp.api.app import adapters
from mlxtp.api.guard import (
    ADMITTED,
    Access,
    KeyGuard,
    address_of,
    is_admin,
    is_public,
    is_stranger,
    keys_in,
    misdirected,
    scope_of,
    uses_models,
)
from mlxtp.errors import Code, RequestError

HERE = ("192.168.1.5", 52415)
THERE = ("192.168.1.9", 40000)


def judged(
    access: Access,
    path: str = "/v1/models",
    method: str = "GET",
    server: Any = HERE,
    client: Any = THERE,
    scheme: str = "http",
    **headers: str,
) -> Code | None:
    """The code of the refusal of a request with these headers; None for one that passes."""
    given = {"host": "192.168.1.5:52415"} | {name.replace("_", "-"): value for name, value in headers.items()}
    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "scheme": scheme,
        "server": server,
        "client": client,
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    refusal = misdirected(access, scope)
    return None if refusal is None else refusal.code


PLAIN = Access()
NAMED = Access(hosts=("studio.local", "ai.example.com"))
LISTED = Access(origins=("http://localhost:3000", "https://chat.example.com"))


@pytest.mark.parametrize("host", ["192.168.1.5", "192.168.1.5:52415", "localhost:1", "127.0.0.1", "[::1]:80"])
def test_the_address_that_was_connected_to_and_loopback_are_this_mac(host: str) -> None:
    assert judged(PLAIN, host=host) is None


@pytest.mark.parametrize(
    "host",
    ["192.168.1.6", "studio.local", "evil.example", "192.168.1.5.evil.example", "0.0.0.0", "", "a@localhost"],
)
def test_no_other_name_or_address_is(host: str) -> None:
    assert judged(PLAIN, host=host) is Code.HOST_NOT_ALLOWED


def test_names_that_were_given_are_this_mac_in_any_case() -> None:
    assert judged(NAMED, host="Studio.Local:52415") is None
    assert judged(NAMED, host="ai.example.com") is None
    assert judged(NAMED, host="other.example.com") is Code.HOST_NOT_ALLOWED


def test_with_any_host_pages_have_to_be_of_the_same_one() -> None:
    access = Access(hosts=("*",))
    assert judged(access, host="whatever.example") is None
    assert judged(access, host="whatever.example", origin="http://whatever.example") is None
    assert judged(access, host="whatever.example", origin="https://whatever.example") is not None
    assert judged(access, host="whatever.example", origin="https://evil.example") is Code.ORIGIN_NOT_ALLOWED
    assert judged(access, host="whatever.example", origin="null") is Code.ORIGIN_NOT_ALLOWED


def test_with_any_host_a_page_is_of_the_one_that_the_request_names_everywhere() -> None:
    headers = [(b"host", b"one.example"), (b"host", b"two.example"), (b"origin", b"http://two.example")]
    asked = {"path": "/", "method": "GET", "server": HERE, "client": THERE, "headers": headers}
    refusal = misdirected(Access(hosts=("*",)), {"type": "http", **asked})
    assert refusal is not None
    assert refusal.code is Code.ORIGIN_NOT_ALLOWED


@pytest.mark.parametrize(
    ("end", "address"),
    [
        (None, ""),
        (("127.0.0.1", 5), "127.0.0.1"),
        (("::ffff:192.168.1.5", 5), "192.168.1.5"),
        (("fe80::1%en0", 5, 0, 4), "fe80::1"),
        (("2001:0DB8::0001", 5), "2001:db8::1"),
        (("testserver", 5), "testserver"),
    ],
)
def test_the_address_of_one_end(end: Any, address: str) -> None:
    assert address_of(end) == address


def test_an_end_that_is_not_known_is_no_name() -> None:
    assert judged(PLAIN, server=None, client=None, host="") is Code.HOST_NOT_ALLOWED
    assert judged(PLAIN, server=None, client=None, host="localhost") is None
    assert judged(PLAIN, path="/admin/status", client=None, host="localhost") is not None


@pytest.mark.parametrize(
    ("scheme", "host", "origin"),
    [
        ("http", "192.168.1.5:52415", "http://192.168.1.5:52415"),
        ("https", "192.168.1.5:52415", "https://192.168.1.5:52415"),
        ("http", "localhost:9000", "http://localhost:9000"),  # through a tunnel
        ("http", "LOCALHOST", "http://localhost:80"),
        ("https", "localhost:443", "https://localhost"),
        ("http", "[::1]:52415", "http://[::1]:52415"),
    ],
)
def test_this_servers_own_pages_may_ask(scheme: str, host: str, origin: str) -> None:
    assert judged(PLAIN, method="POST", host=host, scheme=scheme, origin=origin) is None


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost:52415", "http://localhost:8080"),
        ("localhost:52415", "http://localhost"),
        ("localhost:52415", "https://localhost:52415"),
        ("localhost:52415", "http://127.0.0.1:52415"),
        ("localhost:80", "https://localhost"),
        ("localhost", "https://localhost"),
        ("localhost", "ftp://localhost"),
        ("127.0.0.1:52415", "http://127.0.0.1:9"),
    ],
)
def test_pages_of_other_programs_on_this_mac_may_not(host: str, origin: str) -> None:
    for extra in ({}, {"sec_fetch_site": "same-origin"}):
        refused = judged(PLAIN, method="POST", host=host, origin=origin, **extra)
        assert refused is Code.ORIGIN_NOT_ALLOWED


def test_behind_a_proxy_that_speaks_https_the_browser_tells_the_own_page() -> None:
    named: dict[str, str] = {"host": "ai.example.com", "origin": "https://ai.example.com"}
    proxied = named | {"x_forwarded_proto": "https"}
    assert judged(NAMED, **proxied, sec_fetch_site="same-origin") is None
    assert judged(NAMED, **proxied, sec_fetch_site="same-site") is Code.ORIGIN_NOT_ALLOWED
    assert judged(NAMED, **proxied) is Code.ORIGIN_NOT_ALLOWED
    assert judged(NAMED, **named, sec_fetch_site="same-origin") is Code.ORIGIN_NOT_ALLOWED
    other = proxied | {"origin": "https://evil.example"}
    assert judged(NAMED, **other, sec_fetch_site="same-origin") is Code.ORIGIN_NOT_ALLOWED
    assert judged(Access(NAMED.hosts, ("https://ai.example.com",)), **named) is None


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/cluster", "/page/main.js", "/"])
@pytest.mark.parametrize(
    ("site", "code"),
    [
        ("none", None),
        ("same-origin", None),
        ("same-site", Code.ORIGIN_NOT_ALLOWED),
        ("cross-site", Code.ORIGIN_NOT_ALLOWED),
        ("else", Code.ORIGIN_NOT_ALLOWED),
    ],
)
def test_a_browser_says_that_a_page_of_another_origin_asks(path: str, site: str, code: Code | None) -> None:
    assert judged(PLAIN, path, sec_fetch_site=site) is code
    assert judged(LISTED, path, sec_fetch_site=site) is code  # no origin that could be on the list
    assert judged(LISTED, path, origin="http://localhost:3000", sec_fetch_site=site) is None
    assert judged(Access(origins=("*",)), path, sec_fetch_site=site) is None


def test_a_link_elsewhere_leads_to_the_page_alone() -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert judged(PLAIN, "/", **link) is None
    for path, changed in (
        ("/health", {}),
        ("/", {"sec_fetch_dest": "iframe"}),
        ("/", {"sec_fetch_mode": "no-cors"}),
        ("/", {"method": "POST"}),
        ("/", {"origin": "https://evil.example"}),
    ):
        assert judged(PLAIN, path, **link | changed) is Code.ORIGIN_NOT_ALLOWED


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "https://localhost.evil.example", "http://192.168.1.6", "x", "file://"],
)
@pytest.mark.parametrize("access", [PLAIN, NAMED, LISTED])
def test_other_pages_may_not(access: Access, origin: str) -> None:
    assert judged(access, method="POST", origin=origin) is Code.ORIGIN_NOT_ALLOWED


def test_pages_on_the_list_may_and_only_just_these() -> None:
    assert judged(LISTED, origin="https://chat.example.com") is None
    for origin in (
        "http://chat.example.com",
        "https://chat.example.com:8443",
        "https://chat.example.com.evil.example",
        "https://evil.example/https://chat.example.com",
        "https://CHAT.example.com.",
    ):
        assert judged(LISTED, origin=origin) is Code.ORIGIN_NOT_ALLOWED


@pytest.mark.parametrize(
    ("access", "origin", "code"),
    [
        (LISTED, "http://localhost:3000", None),
        (LISTED, "http://localhost:4000", Code.ORIGIN_NOT_ALLOWED),  # a program of this Mac, but not listed
        (PLAIN, "http://localhost:3000", Code.ORIGIN_NOT_ALLOWED),
        (Access(origins=("*",)), "http://evil.example", None),
        (Access(origins=("*",)), "null", None),
    ],
)
def test_only_the_list_counts_for_what_a_browser_asks_first(
    access: Access, origin: str, code: Code | None
) -> None:
    asked = {"origin": origin, "access_control_request_method": "POST"}
    assert judged(access, method="OPTIONS", **asked) is code


APPS = (
    "app://obsidian.md", "app://-", "file://", "tauri://localhost", "vscode-webview://0a1b", "http://localhost",
    "http://localhost:5173", "https://localhost:5173", "http://127.0.0.1:8080", "http://[::1]:3000",
)  # fmt: skip
NO_APPS = (
    "null", "http://evil.example", "http://localhost.evil.example", "http://localhost:1.evil.example",
    "http://127.0.0.1.evil.example", "http://evil.example#app://x", "http://192.168.1.5:52415",
    "https://evil.example/app://x", "chrome-extension://abc", "x-app://x", "http://localhost:3000/app://x",
)  # fmt: skip
OVER_LOOPBACK: Any = {"server": ("127.0.0.1", 52415), "client": ("127.0.0.1", 1), "host": "localhost:52415"}
KEYED = Access(keys=cast(Any, SimpleNamespace(needed=True)))


@pytest.mark.parametrize(
    "how", [{"method": "POST"}, {"method": "OPTIONS", "access_control_request_method": "X"}]
)
def test_apps_of_this_mac_use_its_models_over_loopback(how: Any) -> None:
    for site in ("none", "same-site", "cross-site"):
        asked = OVER_LOOPBACK | how | {"sec_fetch_site": site}
        for origin in APPS:
            assert judged(PLAIN, origin=origin, **asked) is None, origin
            assert judged(PLAIN, "/", origin=origin, **asked) is None
            for path in (
                "/admin/status",
                "/cluster",
                "/cluster/events",
                "/metrics",
                "/openapi.json",
                "/page/x",
            ):
                assert judged(PLAIN, path, origin=origin, **asked) is Code.ORIGIN_NOT_ALLOWED
            assert judged(KEYED, origin=origin, **asked) is Code.ORIGIN_NOT_ALLOWED
            rebound = asked | {"host": "evil.example"}
            assert judged(PLAIN, origin=origin, **rebound) is Code.HOST_NOT_ALLOWED
            assert judged(PLAIN, origin=origin, **asked, via="1.1 x") is Code.ORIGIN_NOT_ALLOWED
            for end in (HERE, THERE):
                assert judged(PLAIN, origin=origin, **asked | {"client": end}) is Code.ORIGIN_NOT_ALLOWED
        for origin in NO_APPS:
            assert judged(PLAIN, origin=origin, **asked) is Code.ORIGIN_NOT_ALLOWED, origin


def test_a_page_without_an_origin_is_no_app() -> None:
    assert (
        judged(PLAIN, method="POST", sec_fetch_site="same-site", **OVER_LOOPBACK) is Code.ORIGIN_NOT_ALLOWED
    )


def test_models_are_used_at_the_paths_of_the_dialects_alone() -> None:
    used = [each.path for adapter in adapters() for each in adapter.endpoints if not each.always]
    assert [path for path in used if not uses_models(path) or not uses_models(path.removeprefix("/v1"))] == []
    watched = (
        "/cluster",
        "/cluster/events",
        "/metrics",
        "/health",
        "/admin/serve",
        "/openapi.json",
        "*",
        "//v1",
    )
    assert [path for path in watched if uses_models(path)] == []


@pytest.mark.parametrize(
    "client", [("127.0.0.1", 1), ("192.168.1.5", 1), ("::1", 1), ("::ffff:127.0.0.1", 1)]
)
def test_commands_of_this_mac_reach_the_administration(client: Any) -> None:
    assert judged(PLAIN, "/admin/status", client=client) is None


@pytest.mark.parametrize(
    "header", ["forwarded", "x_forwarded_for", "x_forwarded_proto", "x_forwarded_user", "via", "x_real_ip"]
)
def test_what_a_proxy_on_this_mac_passes_on_does_not_reach_it(header: str) -> None:
    forwarded = {header: "for=1.2.3.4"}
    assert judged(PLAIN, "/admin/status", client=("127.0.0.1", 1), **forwarded) is Code.BAD_REQUEST
    assert judged(PLAIN, client=("127.0.0.1", 1), **forwarded) is None


@pytest.mark.parametrize(
    ("client", "header", "stranger"),
    [
        (("127.0.0.1", 1), "x-request-id", False),
        (HERE, "x-request-id", False),
        (THERE, "x-request-id", True),
        (("127.0.0.1", 1), "via", True),
        (None, "x-request-id", True),
    ],
)
def test_where_no_key_is_ever_needed_a_client_beyond_this_mac_is_a_stranger(
    client: Any, header: str, stranger: bool
) -> None:
    scope = {"server": HERE, "client": client, "headers": [(header.encode(), b"x")]}
    assert is_stranger(Access(), scope) is stranger


@pytest.mark.parametrize("path", ["/admin", "/admin/", "/admin/serve"])
def test_other_macs_do_not(path: str) -> None:
    assert judged(Access(hosts=("*",), origins=("*",)), path) is Code.BAD_REQUEST


@pytest.mark.parametrize(
    ("path", "open_"), [("serve", True), ("models", True), ("token", False), ("remove", False)]
)
def test_with_keys_other_macs_reach_what_a_key_may_do(path: str, open_: bool) -> None:
    keys = cast(Any, SimpleNamespace(needed=True))
    judgement = judged(Access(hosts=("*",), keys=keys), f"/admin/{path}")
    assert judgement is (None if open_ else Code.BAD_REQUEST)


@pytest.mark.parametrize(
    ("method", "path", "scope"),
    [
        ("GET", "/", None), ("GET", "/health", None), ("POST", "/admin/token", None),
        ("GET", "/admin/keys", "metrics"), ("POST", "/admin/serve", "load"), ("GET", "/metrics", "metrics"),
        ("GET", "/v1/models", ""), ("GET", "/cluster/events", ""), ("POST", "/v1/chat/completions", "chat"),
        ("POST", "/api/show", "chat"), ("DELETE", "/api/delete", "chat"), ("POST", "/metrics", "metrics"),
    ],
)  # fmt: skip
def test_which_scope_a_path_needs(method: str, path: str, scope: str | None) -> None:
    assert scope_of(method, path) == scope


def test_no_list_lets_another_page_into_the_administration() -> None:
    access, client = Access(origins=("*", "https://chat.example.com")), ("127.0.0.1", 1)
    for method in ("GET", "OPTIONS"):
        asked = {"origin": "https://chat.example.com", "access_control_request_method": "POST"}
        refused = judged(access, "/admin/status", method, client=client, **asked)
        assert refused is Code.ORIGIN_NOT_ALLOWED
    assert judged(access, "/admin/status", client=client, host="evil.example") is Code.HOST_NOT_ALLOWED


@pytest.mark.parametrize(
    ("public", "admin", "paths"),
    [
        (True, False, "/ /health /page/app.js"),
        (False, True, "/admin /admin/status"),
        (False, False, "/page /pages /health/ /healthy // /v1/models /administrator /v1/admin/status"),
    ],
)
def test_what_needs_no_key_and_what_one_of_its_own(public: bool, admin: bool, paths: str) -> None:
    assert {(is_public(path), is_admin(path)) for path in paths.split()} == {(public, admin)}


@pytest.mark.parametrize(
    ("headers", "keys"),
    [
        ({}, []),
        ({"authorization": "Bearer abc"}, ["abc"]),
        ({"authorization": "bearer  abc "}, ["abc"]),
        ({"x-api-key": "abc"}, ["abc"]),
        ({"authorization": "Bearer one", "x-api-key": "two"}, ["one", "two"]),
        ({"authorization": "Basic abc"}, []),
        ({"authorization": "abc"}, []),
        ({"authorization": "Bearer "}, []),
        ({"x-api-key": " "}, []),
        ({"cookie": "key=abc", "api-key": "abc"}, []),
    ],
)
def test_where_a_key_may_stand(headers: dict[str, str], keys: list[str]) -> None:
    assert keys_in(Headers(headers)) == keys


@pytest.mark.parametrize("crowded", [True, False])
async def test_a_connection_that_refuses_a_key_keeps_its_request_from_the_app(
    tmp_path: Path, crowded: bool
) -> None:
    file = KeyFile(tmp_path)
    _, key = file.create("laptop", 0, 0.0)
    refused: list[tuple[int, str]] = []
    reached: list[Scope] = []

    def answer(_scope: Scope, error: RequestError, _headers: Mapping[str, str]) -> Response:
        refused.append((error.status, error.detail))
        return Response()

    async def app(scope: Scope, *_: Any) -> None:
        reached.append(scope)

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(_message: Message) -> None:
        pass

    admitted = {ADMITTED: lambda key_hash: f"{key_hash} has too many" if crowded else ""}
    headers = [(b"x-api-key", key.encode())]
    scope = {"type": "http", "path": "/v1/models", "method": "GET", "server": HERE, "client": THERE}
    guard = KeyGuard(app, KeyRing(file, "always", beyond=False), answer)
    await guard(scope | {"headers": headers, "state": admitted}, receive, send)
    assert refused == [(503, f"{digest_of(key).hex()} has too many")] * crowded
    assert len(reached) == (not crowded)
