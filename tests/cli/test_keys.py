"""`mlxtp key`, and commands that find their agent by HTTPS: as a user types them."""

from __future__ import annotations

import json
import os
import pwd
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from mlxtp.admin.handlers import announced
from mlxtp.api.api_keys import FILE, USE_FILE, KeyFile
from mlxtp.api.app import create_app
from mlxtp.api.endpoint import Tls, here_and_now, make, own_tls, tls_of_files
from mlxtp.api.key_limits import ApiKey, KeyCounts, KeyUse
from mlxtp.api.server import bind
from mlxtp.settings import AUDIT_LOG

from ..api.test_admin import KEY
from .test_cluster import Admin, mlxtp, refusal, served, stranger

pytestmark = pytest.mark.slow

USED = 1_780_000_000


class Agent(Admin):
    """Says when keys were used."""

    def __init__(self) -> None:
        super().__init__()
        key = ApiKey("laptop", b"", 1)
        counts = KeyCounts(12, 1, 3000, 400, USED, day=10**6, day_tokens=1200)
        self.answers["keys"] = {"keys": [KeyUse(key, counts, 0.0).summary(0.0)]}


@contextmanager
def agent(home: Path, tls: Tls | None = None, *, announce: str | None = None) -> Iterator[Agent]:
    """An agent of `home`, which says that it shows the certificate `announce`, by default the one it has."""
    admin, sock = Agent(), bind("127.0.0.1", 0)
    scheme, context, own = ("https", tls.context, tls.certificate) if tls is not None else ("http", None, "")
    url = f"{scheme}://127.0.0.1:{sock.getsockname()[1]}"
    certificate = announce if announce is not None else own
    app = create_app(cast(Any, None), admin=admin)
    with served(app, sock, context), announced(home, url, KEY, certificate):
        yield admin


def test_a_key_is_printed_alone_and_what_to_do_with_it_beside(tmp_path: Path) -> None:
    made = mlxtp(tmp_path / "home", "key", "create", "laptop")
    assert made.exit_code == 0, made.output
    assert re.fullmatch(r"mlxtp_[\w-]{43}\n", made.stdout)
    said = " ".join(made.stderr.split())
    for words in ("the key of laptop", "shown only once", "`Authorization: Bearer KEY`", "`x-api-key: KEY`"):
        assert words in said
    assert made.stdout.strip() not in said
    assert made.stdout.strip() not in (tmp_path / "home" / FILE).read_text()
    assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700


LLAMA = "mlx-community/Llama-3.2-1B-Instruct-4bit"


def test_keys_as_json(tmp_path: Path) -> None:
    limits = ["--per-minute", "60", "--tokens-per-day", "5000", "--concurrent", "2", "--expires", "30d"]
    rights = ["--model", "org/tiny", "--model", "llama3.2:1b", "--scope", "chat", "--scope", "load"]
    rights += ["--priority", "batch"]
    made = json.loads(mlxtp(tmp_path, "key", "create", "laptop", *limits, *rights, "--json").stdout)
    assert made.pop("key").startswith("mlxtp_")
    created = made["created"]
    assert made == {
        "name": "laptop", "created": created, "expires": created + 30 * 86_400, "per_minute": 60,
        "tokens_per_minute": None, "tokens_per_day": 5000, "concurrent": 2,
        "models": ["org/tiny", LLAMA], "scopes": ["chat", "load"], "priority": "batch",
        "requests": 0, "refused": 0,
        "prompt_tokens": 0, "generated_tokens": 0, "tokens_today": 0, "open": 0, "last_used": None,
    }  # fmt: skip
    assert KeyFile(tmp_path).load()[0].models == ("org/tiny", LLAMA)
    mlxtp(tmp_path, "key", "create", "phone")
    listed = json.loads(mlxtp(tmp_path, "key", "list", "--json").stdout)["keys"]
    assert listed[0] == made
    assert [listed[1][field] for field in ("name", "per_minute", "priority")] == [
        "phone",
        None,
        "interactive",
    ]
    revoked = json.loads(mlxtp(tmp_path, "key", "revoke", "phone", "--json").stdout)
    assert revoked == {"revoked": "phone", "left": 1}


def test_keys_as_a_table(tmp_path: Path) -> None:
    assert mlxtp(tmp_path, "key", "list").stdout.startswith("there are no API keys; `mlxtp key create NAME`")
    file = KeyFile(tmp_path)
    file.create("laptop", 60, USED - 86_400)
    file.create("phone", 0, USED - 86_400, models=("org/tiny",), priority="batch")
    file.create("old", 1, USED - 86_400, expires=USED - 86_000)
    shown = mlxtp(tmp_path, "key", "list").stdout
    rows = [line.split() for line in shown.splitlines()]
    assert rows[0] == ["name", "permits", "used", "ends", "last", "used"]
    assert [row[0] for row in rows if row and row[-2:] == ["never", "-"]] == ["laptop", "phone"]
    shown = " ".join(shown.split())
    assert "60 requests" in shown
    assert shown.count("batch") == 1
    assert "0 requests, 0" in shown
    assert "org/tiny" in shown
    assert "1 request a minute" in shown
    assert "expired" in shown


def test_a_running_agent_knows_when_keys_were_used(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    file.create("laptop", 0, USED - 86_400)
    file.create("phone", 0, USED - 86_400)
    with agent(tmp_path) as asked:
        listed = json.loads(mlxtp(tmp_path, "key", "list", "--json").stdout)["keys"]
        assert [row["last_used"] for row in listed] == [USED, None]
        assert [row["requests"] for row in listed] == [12, 0]
        shown = mlxtp(tmp_path, "key", "list").stdout
    assert asked.asked == [("keys",)] * 2
    assert "3,400 tokens" in " ".join(shown.split())
    assert datetime.fromtimestamp(USED).astimezone().strftime("%Y-%m-%d") in shown


def test_without_an_agent_the_use_is_what_the_last_one_kept(tmp_path: Path) -> None:
    key, _ = KeyFile(tmp_path).create("laptop", 0, USED - 86_400)
    kept = {"version": 1, "keys": {key.digest.hex(): asdict(KeyCounts(12, last_used=USED))}}
    (tmp_path / USE_FILE).write_text(json.dumps(kept))
    (tmp_path / USE_FILE).chmod(0o600)
    [row] = json.loads(mlxtp(tmp_path, "key", "list", "--json").stdout)["keys"]
    assert (row["requests"], row["last_used"]) == (12, USED)


def test_who_made_and_revoked_keys_is_recorded_and_no_key(tmp_path: Path) -> None:
    key = mlxtp(tmp_path, "key", "create", "laptop", "--tokens-per-day", "5000").stdout.strip()
    KeyFile(tmp_path).create("phone", 0, 1.0)
    assert mlxtp(tmp_path, "key", "revoke", "laptop").stdout == "the key of laptop is revoked\n"
    text = (tmp_path / AUDIT_LOG).read_text()
    made, revoked = map(json.loads, text.splitlines())
    assert (made["event"], made["name"], made["tokens_per_day"]) == ("key_created", "laptop", 5000)
    assert (revoked["event"], revoked["name"]) == ("key_revoked", "laptop")
    assert made["by"] == revoked["by"] == f"user {pwd.getpwuid(os.getuid()).pw_name}"
    assert key.removeprefix("mlxtp_") not in text
    assert (tmp_path / AUDIT_LOG).stat().st_mode & 0o777 == 0o600
    last = mlxtp(tmp_path, "key", "revoke", "phone").stdout
    assert "that was the last one: programs on this Mac need no key now" in last
    assert KeyFile(tmp_path).load() == ()


@pytest.mark.parametrize(
    ("command", "status", "words"),
    [
        ("create two,words", 2, "'two,words' cannot be the name of a key; take up to 64 letters"),
        ("create taken", 1, "there is a key called 'taken'; `mlxtp key revoke taken` ends it"),
        ("create x --per-minute 0", 2, "--per-minute 0: a key needs at least one request a minute"),
        ("create x --per-minute -5", 2, "--per-minute -5: "),
        ("create x --per-minute 2000000", 2, "--per-minute 2000000: a key has from 1 to 1000000"),
        ("create x --concurrent 0", 2, "--concurrent 0: a key needs at least one"),
        ("create x --scope root", 2, "--scope root: the scopes are chat, on-request, load"),
        ("create x --priority high", 2, "--priority high: the classes are interactive, batch"),
        ("create x --expires soon", 2, "--expires: 'soon' is not forever, or a time"),
        ("create x --expires 0", 2, "--expires 0: a key needs at least one second"),
        ("create x --expires 9999d", 2, "--expires: '9999d' is not forever, or a time up to 365"),
        ("revoke nobody", 1, "no key is called 'nobody'; there is taken"),
    ],
)
def test_a_mistake_is_said_and_changes_nothing(tmp_path: Path, command: str, status: int, words: str) -> None:
    file = KeyFile(tmp_path)
    file.create("taken", 0, 1.0)
    before = file.load()
    assert refusal(tmp_path, "key", *command.split(), status=status).startswith(f"mlxtp: {words}")
    assert file.load() == before
    (tmp_path / FILE).write_text("{}")
    assert f"{tmp_path / FILE} is damaged" in refusal(tmp_path, "key", command.split(maxsplit=1)[0], "x")
    as_json = mlxtp(tmp_path, "key", "list", "--json")
    assert json.loads(as_json.stdout)["error"]["code"] == "config_invalid"
    assert (tmp_path / FILE).read_text() == "{}"


def test_commands_find_an_agent_by_https(tmp_path: Path) -> None:
    """They know the certificate itself; what clients on other machines think of it is another matter."""
    with agent(tmp_path, own_tls(tmp_path, ("localhost",), ("127.0.0.1",), here_and_now())) as asked:
        assert mlxtp(tmp_path, "status").stdout.startswith("ready org/model on 2 Macs")
        assert mlxtp(tmp_path, "unload").stdout == "org/model unloaded; no model is deployed\n"
    assert asked.asked == [("status",), ("unload", "", "")]
    expired = make(("ai.example.com",), (), datetime.now(UTC) - timedelta(days=1000))
    with agent(tmp_path, tls_with(tmp_path, expired)):
        assert mlxtp(tmp_path, "status").stdout.startswith("ready org/model")


def tls_with(folder: Path, pem: bytes) -> Tls:
    """A certificate and its key in one file."""
    path = folder / "both.pem"
    path.write_bytes(pem)
    path.chmod(0o600)
    return tls_of_files(str(path), str(path), here_and_now())


def test_no_other_program_that_answers_there_gets_the_key(tmp_path: Path) -> None:
    """Not even with a certificate that says just the same."""
    now = here_and_now()
    mine, others = (make(("localhost",), ("127.0.0.1",), now) for _ in range(2))
    certificate = x509.load_pem_x509_certificate(mine).public_bytes(Encoding.PEM).decode()
    with agent(tmp_path, tls_with(tmp_path, others), announce=certificate) as asked:
        said = refusal(tmp_path, "status")
        assert "does not answer at https://127.0.0.1" in said
        assert "its certificate is not this agent's" in said
    assert asked.asked == []


@pytest.mark.parametrize("certificate", ["", "garbage", "-----BEGIN CERTIFICATE-----"])
def test_without_a_certificate_to_compare_with_nothing_is_asked(tmp_path: Path, certificate: str) -> None:
    tls = own_tls(tmp_path, ("localhost",), ("127.0.0.1",), here_and_now())
    with agent(tmp_path, tls, announce=certificate) as asked:
        assert "does not answer at https://127.0.0.1" in refusal(tmp_path, "status")
    assert asked.asked == []


def test_a_plain_program_at_that_port_is_no_agent(tmp_path: Path) -> None:
    certificate = own_tls(tmp_path, ("localhost",), ("127.0.0.1",), here_and_now()).certificate
    with (
        stranger(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}") as url,
        announced(tmp_path, url.replace("http:", "https:"), KEY, certificate),
    ):
        assert "does not answer at https://127.0.0.1" in refusal(tmp_path, "status")
