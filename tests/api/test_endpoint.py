"""The endpoint of an agent: what it is open to by its settings, and what it says about that."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from mlxtp.api import endpoint as module
from mlxtp.api.api_keys import FILE, KeyFile
from mlxtp.api.endpoint import VALID, Endpoint, here_and_now, make, names_here, open_endpoint
from mlxtp.config import Settings
from mlxtp.errors import ConfigError

from ..live_cluster import WAIT_S

LAN = ("192.168.1.5", "10.0.0.5")


@pytest.fixture(autouse=True)
def a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a name, and addresses that this machine need not have."""
    monkeypatch.setattr(module, "addresses_here", lambda: LAN)
    monkeypatch.setattr(socket, "gethostname", lambda: "Studio.lan")


def opened(home: Path, host: str = "127.0.0.1", **settings: Any) -> Endpoint:
    """The endpoint while it is open."""
    plain = Settings(home=home, http_host=host, http_port=0, ranks=1, model="tiny")
    with open_endpoint(replace(plain, **settings)) as found:
        assert found.sock.getsockname()[1] > 0
    return found


def warnings(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING)


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("Studio.local", ("studio.local", "studio")),
        ("studio", ("studio", "studio.local")),
        ("studio.lan.", ("studio.lan", "studio", "studio.local")),
        ("", ()),
        ("two words", ()),
    ],
)
def test_the_names_of_a_mac(name: str, names: tuple[str, ...]) -> None:
    assert names_here(name) == names


def test_on_loopback_it_is_for_this_mac_and_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = opened(tmp_path)
    port = found.url.rpartition(":")[2]
    assert found.url == found.summary == f"http://127.0.0.1:{port}"
    assert found.hosts == ()
    assert found.keys is not None
    assert not found.keys.needed
    assert caplog.records == []


@pytest.mark.parametrize(("host", "local"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]")])
def test_beyond_loopback_it_has_names_and_asks_for_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, local: str
) -> None:
    found = opened(tmp_path, host)
    port = found.url.rpartition(":")[2]
    assert found.url == f"http://{local}:{port}"  # a command's Host is a name of loopback
    assert found.summary == f"http://192.168.1.5:{port}"
    assert found.hosts == ("studio.lan", "studio", "studio.local")
    assert found.keys is not None
    assert found.keys.needed
    said = warnings(caplog)
    assert f"{found.summary} requires an API key of other machines, and there is none yet" in said
    assert f"`mlxtp key create NAME --home '{tmp_path}'` makes one" in said
    assert "is plain HTTP: anyone on the network can read prompts, answers and keys" in said


def test_with_a_key_only_the_network_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    KeyFile(tmp_path).create("laptop", 0, 1.0)
    opened(tmp_path, "0.0.0.0")
    assert "no API key" not in warnings(caplog)
    caplog.clear()
    assert opened(tmp_path, "0.0.0.0", http_tls=True).url.startswith("https://127.0.0.1:")
    assert warnings(caplog) == ""


def test_never_a_key_beyond_loopback_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = opened(tmp_path, "0.0.0.0", api_keys="never")
    assert found.keys is None
    assert f"anyone who reaches {found.summary} can use it" in warnings(caplog)
    caplog.clear()
    assert opened(tmp_path, api_keys="never").keys is None
    assert caplog.records == []


def test_keys_that_cannot_be_read_keep_it_from_opening(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    (tmp_path / FILE).chmod(0o600)
    for rule in ("auto", "always"):
        with pytest.raises(ConfigError, match="is damaged"):
            opened(tmp_path, api_keys=rule)
    assert opened(tmp_path, api_keys="never").keys is None


def test_what_is_allowed_reaches_the_guard(tmp_path: Path) -> None:
    found = opened(tmp_path, allowed_hosts=("ai.example.com",), allowed_origins=("http://localhost:3000",))
    access = found.access("own key")
    assert (access.hosts, access.origins) == (("ai.example.com",), ("http://localhost:3000",))
    assert found.keys is access.keys is not None
    assert found.keys.own_key == "own key"


@pytest.mark.parametrize(
    ("host", "names", "addresses"),
    [
        ("127.0.0.1", ["localhost", "ai.example.com"], {"127.0.0.1", "::1", "10.9.9.9"}),
        (
            "0.0.0.0",
            ["studio.lan", "studio", "studio.local", "localhost", "ai.example.com"],
            {"127.0.0.1", "::1", "10.9.9.9", *LAN},
        ),
    ],
)
def test_its_own_certificate_is_for_all_it_is_called(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str, names: list[str], addresses: set[str]
) -> None:
    allowed = ("ai.example.com", "10.9.9.9", "*")
    with caplog.at_level(logging.INFO, logger="mlxtp"):
        found = opened(tmp_path, host, http_tls=True, allowed_hosts=allowed)
    assert found.tls is not None
    certificate = x509.load_pem_x509_certificate(found.certificate.encode())
    stands = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert stands.get_values_for_type(x509.DNSName) == names
    assert set(map(str, stands.get_values_for_type(x509.IPAddress))) == addresses
    said = caplog.text
    assert f"HTTPS at {found.summary}, with a certificate whose SHA-256 is {found.tls.fingerprint}" in said
    assert f"clients have to trust {tmp_path / 'https-cert.pem'}" in said


def test_its_certificate_stays_where_the_network_calls_it_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else users would have to trust it again after each new lease."""
    caplog.set_level(logging.INFO, logger="mlxtp")
    first = opened(tmp_path, "0.0.0.0", http_tls=True)
    assert first.summary.startswith("https://192.168.1.5:")
    monkeypatch.setattr(module, "addresses_here", lambda: ("192.168.1.7",))
    monkeypatch.setattr(socket, "gethostname", lambda: "Studio.office.example")
    moved = opened(tmp_path, "0.0.0.0", http_tls=True)
    assert moved.certificate == first.certificate
    assert moved.summary.startswith("https://studio.local:")  # for which the certificate is
    assert "it is not for 192.168.1.7, studio.office.example, as which this Mac is known now" in caplog.text

    named = opened(tmp_path, "0.0.0.0", http_tls=True, allowed_hosts=("192.168.1.7",))
    assert named.certificate == (tmp_path / "https-cert.pem").read_text() != first.certificate
    assert named.summary.startswith("https://192.168.1.7:")
    keys = [x509.load_pem_x509_certificate(each.certificate.encode()).public_key() for each in (first, named)]
    assert keys[0] == keys[1]
    assert opened(tmp_path, "0.0.0.0", http_tls=True).certificate == named.certificate


def test_its_certificate_is_looked_after_while_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may run for longer than its certificate holds."""
    found = opened(tmp_path, http_tls=True)
    now, first = here_and_now(), found.certificate
    times = iter([now, now + VALID * 0.95, now + VALID * 0.95, now + 2 * VALID])
    monkeypatch.setattr(module, "RENEWAL_S", 0.001)
    monkeypatch.setattr(module, "here_and_now", lambda: next(times, now + 2 * VALID))

    async def story() -> None:
        told, failed = asyncio.Queue[str](), asyncio.Queue[tuple[str, ...]]()
        monkeypatch.setattr(module.log, "error", lambda *words: failed.put_nowait(words))
        keeping = asyncio.create_task(found.keep_certificate(told.put_nowait))
        async with asyncio.timeout(WAIT_S):
            certificates = [await told.get(), await told.get()]
            (tmp_path / "https.pem").chmod(0o666)
            for _ in range(2):  # what fails once is tried again
                assert "is not renewed" in (await failed.get())[0]
        keeping.cancel()
        assert len({first, *certificates}) == 3
        assert found.certificate == certificates[-1] == (tmp_path / "https-cert.pem").read_text()

    asyncio.run(story())


@pytest.mark.parametrize("settings", [{}, {"http_cert": "both.pem", "http_key": "both.pem"}])
def test_what_it_did_not_make_it_does_not_renew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "both.pem").write_bytes(make(("localhost",), (), here_and_now() - 2 * VALID))
    (tmp_path / "both.pem").chmod(0o600)
    found = opened(tmp_path, **settings)
    assert not found.renew(here_and_now())
    asyncio.run(found.keep_certificate(pytest.fail))


def test_files_that_were_named_come_before_a_certificate_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--http-cert /no/such: No such file"):
        opened(tmp_path, http_cert="/no/such", http_key="/no/such", http_tls=True)
    assert not (tmp_path / "https.pem").exists()


def test_this_machines_addresses_are_those_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    import psutil

    class Row:
        def __init__(self, family: int, address: str) -> None:
            self.family, self.address = family, address

    rows = {
        "lo0": [Row(socket.AF_INET, "127.0.0.1"), Row(socket.AF_INET6, "::1")],
        "en0": [Row(socket.AF_INET, "192.168.1.5"), Row(socket.AF_INET6, "fe80::1%en0"), Row(-1, "aa:bb")],
        "en5": [Row(socket.AF_INET, "169.254.3.4")],
    }
    monkeypatch.undo()
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: rows)
    assert module.addresses_here() == ("192.168.1.5",)
