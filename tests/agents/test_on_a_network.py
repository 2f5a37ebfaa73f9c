"""An agent that other machines reach: a real `mlxtp node` on one host, and clients on another one."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from ..hosts import Host, Hosts, requires_namespaces
from ..live_cluster import WAIT_S, until
from .agents import PROMPT, SECRET, Agent, wait

pytestmark = [pytest.mark.slow, requires_namespaces]

PORT = 52415
ASK = {
    "model": "default",
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 64,
    "temperature": 0,
}


@dataclass(frozen=True)
class Lan:
    """The agent, and the host from which clients ask."""

    agent: Agent
    other: Host
    scheme: str

    def ask(self, path: str = "/v1/models", method: str = "GET", **options: Any) -> httpx.Response:
        """From the other host."""
        url = f"{self.scheme}://{self.agent.address}:{PORT}{path}"
        options = {"timeout": WAIT_S, "trust_env": False} | options
        return self.other.inside(lambda: httpx.request(method, url, **options))

    @property
    def trust(self) -> ssl.SSLContext | bool:
        """Return the trust of a client that was given the certificate."""
        if self.scheme == "http":
            return True
        return ssl.create_default_context(cafile=str(self.agent.home / "https-cert.pem"))


@pytest.fixture(scope="module", params=[pytest.param("http", marks=pytest.mark.chaos), "https"])
def lan(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lan]:
    folder = tmp_path_factory.mktemp(request.param)
    flags = ("--http-tls",) if request.param == "https" else ()
    with Hosts(2) as net:
        here, other = net.hosts
        agent = Agent(folder, "studio", here, "--alone", "--http", f"0.0.0.0:{PORT}", *flags)
        agent.start()
        wait(lambda: agent.status().get("state") == "ready", "the agent is ready", agent)
        yield Lan(agent, other, request.param)
        agent.stop()


def test_without_a_key_no_client_is_answered_and_the_words_say_how_to_make_one(lan: Lan) -> None:
    for headers in ({}, {"x-api-key": "guessed"}):
        refused = lan.ask(verify=lan.trust, headers=headers)
        assert refused.status_code == 401
        assert "there is none yet" in refused.json()["error"]["message"]
        assert "`mlxtp key create NAME`" in refused.json()["error"]["message"]
    assert lan.ask("/health", verify=lan.trust).status_code == 200
    assert lan.agent.said("requires an API key of other machines, and there is none yet")
    assert lan.agent.said("is plain HTTP") is (lan.scheme == "http")


def test_a_key_that_is_made_while_it_runs_opens_it(lan: Lan) -> None:
    made = lan.agent.command("key", "create", "laptop")
    assert made.returncode == 0, made.stderr
    headers = {"authorization": f"Bearer {made.stdout.strip()}"}
    until(lambda: lan.ask(verify=lan.trust, headers=headers).status_code == 200, "the key counts")
    answer = lan.ask("/v1/chat/completions", "POST", json=ASK, headers=headers, verify=lan.trust)
    assert answer.json()["choices"][0]["message"]["content"] == SECRET
    listed = json.loads(lan.agent.command("key", "list", "--json").stdout)["keys"]
    assert [(key["name"], key["last_used"] is None) for key in listed] == [("laptop", False)]
    assert lan.agent.command("key", "revoke", "laptop").returncode == 0
    until(lambda: lan.ask(verify=lan.trust, headers=headers).status_code == 401, "the key is revoked")


def test_it_answers_to_its_own_names_and_addresses_only(lan: Lan) -> None:
    label = socket.gethostname().lower().partition(".")[0]
    for host in (f"{label}.local:{PORT}", label, lan.agent.address):
        assert lan.ask("/health", headers={"host": host}, verify=lan.trust).status_code == 200
    for host in ("evil.example", "10.87.0.99", f"{label}.evil.example"):
        assert lan.ask("/health", headers={"host": host}, verify=lan.trust).status_code == 421
        evil = {"origin": f"{lan.scheme}://{host}"}
        assert lan.ask("/health", headers=evil, verify=lan.trust).status_code == 403


def test_the_administration_is_for_this_mac_even_with_its_key(lan: Lan) -> None:
    found = json.loads((lan.agent.home / "agent.json").read_text())
    assert found["url"] == f"{lan.scheme}://127.0.0.1:{PORT}"
    headers = {"authorization": f"Bearer {found['key']}"}
    assert lan.ask("/admin/status", headers=headers, verify=lan.trust).status_code == 403
    assert lan.agent.command("status").stdout.startswith("ready tiny on this Mac")


def test_by_https_only_who_trusts_the_certificate_asks(lan: Lan) -> None:
    if lan.scheme == "http":
        assert found_certificate(lan) == ""
        return
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        lan.ask("/health")
    assert "PRIVATE" not in (lan.agent.home / "https-cert.pem").read_text()
    assert found_certificate(lan) == (lan.agent.home / "https-cert.pem").read_text()
    assert lan.agent.said("with a certificate whose SHA-256 is ")


def found_certificate(lan: Lan) -> str:
    return str(json.loads((lan.agent.home / "agent.json").read_text())["certificate"])
