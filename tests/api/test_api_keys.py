"""The keys of a home: kept as hashes, changed by several processes at once, and never an open door."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from mlxtp.api.api_keys import FILE, LOOK_S, MAX_KEYS, PREFIX, USE_FILE, KeyFile, KeyRing, keys_needed
from mlxtp.api.request_context import RequestContext, answering, current
from mlxtp.errors import Code, ConfigError, UserError

from ..live_cluster import WAIT_S

NOW = 1_780_000_000.5


def told(file: KeyFile, name: str, per_minute: int = 0) -> str:
    """A new key, as its owner is told."""
    return file.create(name, per_minute, NOW)[1]


def test_a_key_is_shown_once_and_only_its_hash_is_kept(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    made, key = file.create("laptop", 60, NOW)
    assert key.startswith(PREFIX)
    assert len(key) == len(PREFIX) + 43  # 256 bits, 6 in each letter
    kept = (tmp_path / FILE).read_text()
    assert key.removeprefix(PREFIX) not in kept
    assert hashlib.sha256(key.encode()).hexdigest() in kept
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    [found] = file.load()
    assert (found.name, found.created, found.per_minute) == ("laptop", int(NOW), 60)
    assert found == made
    assert hashlib.sha256(key.encode()).hexdigest() not in repr(found)


def test_a_home_without_keys_has_none(tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "nowhere")
    assert (file.load(), file.stamp()) == ((), None)
    assert not (tmp_path / "nowhere").exists()


def test_no_two_keys_are_alike_nor_have_one_name(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    keys = {told(file, f"key-{i}") for i in range(20)}
    assert len(keys) == 20
    with pytest.raises(UserError, match="there is a key called 'key-3'; `mlxtp key revoke key-3` ends it"):
        told(file, "key-3")
    assert [each.name for each in file.load()] == [f"key-{i}" for i in range(20)]


@pytest.mark.parametrize("name", ["", " ", "a b", "-a", ".", "a/b", "ä", "x" * 65, "a\n", "[red]", "a\x1b"])
def test_what_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="cannot be the name of a key; take up to 64 letters"):
        told(KeyFile(tmp_path), name)
    assert not (tmp_path / FILE).exists()


@pytest.mark.parametrize("per_minute", [-1, 1_000_001])
def test_what_is_no_rate(tmp_path: Path, per_minute: int) -> None:
    with pytest.raises(UserError, match="from 1 to 1000000 requests a minute"):
        told(KeyFile(tmp_path), "a", per_minute)


def test_a_key_that_is_revoked_is_gone_and_its_name_free(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    old = told(file, "laptop")
    told(file, "phone")
    assert file.revoke("laptop") == 1
    assert [each.name for each in file.load()] == ["phone"]
    assert told(file, "laptop") != old
    with pytest.raises(UserError, match="no key is called 'tablet'; there is phone, laptop"):
        file.revoke("tablet")
    with pytest.raises(UserError, match="no key is called 'x'; there is no key at all"):
        KeyFile(tmp_path / "other").revoke("x")


def test_there_is_a_limit(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    row = {"name": "", "sha256": "0" * 64, "created": 1, "per_minute": 0}
    rows = [{**row, "name": f"k{i}"} for i in range(MAX_KEYS)]
    write(tmp_path, json.dumps({"version": 1, "keys": rows}))
    with pytest.raises(UserError, match=f"there are {MAX_KEYS} keys"):
        told(file, "one-more")
    file.revoke("k0")
    told(file, "one-more")


def write(home: Path, text: str) -> None:
    (home / FILE).write_text(text)
    (home / FILE).chmod(0o600)


GOOD = {"name": "a", "sha256": "0" * 64, "created": 1, "per_minute": 0}
DAMAGED = [
    "",
    "{",
    "[]",
    "null",
    "\x00" * 100,
    '{"version": 1}',
    '{"keys": []}',
    '{"version": 2, "keys": []}',
    '{"version": 1, "keys": 5}',
    '{"version": 1, "keys": [5]}',
    "[" * 5000,
    *(
        json.dumps({"version": 1, "keys": [{**GOOD, **wrong}]})
        for wrong in (
            {"name": 5}, {"name": "a b"}, {"sha256": "0" * 62}, {"sha256": "x" * 64}, {"sha256": None},
            {"created": "1"}, {"created": True}, {"created": -1}, {"created": 10**30},
            {"per_minute": -1}, {"per_minute": 1.5}, {"per_minute": None},
            {"scopes": []}, {"scopes": ["root"]}, {"scopes": "chat"}, {"models": [5]}, {"models": [""]},
            {"priority": "high"}, {"priority": 1}, {"priority": ["batch"]},
            {"concurrent": -1}, {"tokens_per_day": True}, {"expires": "soon"}, {"expires": -1},
        )
    ),
    json.dumps({"version": 1, "keys": [{**GOOD, "a_limit_of_later": 5}]}),
    json.dumps({"version": 1, "keys": [{k: v for k, v in GOOD.items() if k != "sha256"}]}),
    json.dumps({"version": 1, "keys": [GOOD, GOOD]}),
]  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_said_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    write(tmp_path, text)
    file = KeyFile(tmp_path)
    for act in (file.load, lambda: told(file, "new"), lambda: file.revoke("a")):
        with pytest.raises(ConfigError) as refused:
            act()
        assert str(tmp_path / FILE) in refused.value.detail
        assert "is damaged" in refused.value.detail
        assert "restore it from a backup, or remove it" in refused.value.detail
    assert (tmp_path / FILE).read_text() == text


def test_a_file_that_others_can_change_counts_for_nothing(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    told(file, "a")
    (tmp_path / FILE).chmod(0o644)
    with pytest.raises(ConfigError, match="revoke its keys and make new ones; otherwise run: chmod 600"):
        file.load()


def test_a_home_that_takes_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--home .*file"):
        told(KeyFile(tmp_path / "file"), "a")


MANY = """
import sys
from pathlib import Path
from mlxtp.api.api_keys import KeyFile
file, who = KeyFile(Path(sys.argv[1])), sys.argv[2]
for i in range(8):
    file.create(f"{who}-{i}", 0, 1.0)
    if i % 2:
        file.revoke(f"{who}-{i}")
"""


LIMITS: dict[str, Any] = {
    "expires": int(NOW) + 60, "tokens_per_minute": 1000, "tokens_per_day": 5000, "concurrent": 2,
    "models": ("org/tiny", "größer"), "scopes": ("chat", "load"), "priority": "batch",
}  # fmt: skip


def test_limits_are_kept_and_only_those_that_a_key_has(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    told(file, "plain")
    [row] = json.loads((tmp_path / FILE).read_text())["keys"]
    assert row.keys() == {"name", "sha256", "created", "per_minute"}
    made, _ = file.create("guest", 0, NOW, **LIMITS)
    plain, found = file.load()
    assert found == made
    assert {name: getattr(found, name) for name in LIMITS} == LIMITS
    assert plain.scopes == ("chat", "on-request", "metrics")


def test_a_file_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    file, models = KeyFile(tmp_path), tuple(f"{number}{'ä' * 490}" for number in range(64))
    for number in range(5):
        file.create(f"k{number}", 0, NOW, models=models)
    with pytest.raises(UserError, match="name fewer models"):
        file.create("k5", 0, NOW, models=models)
    assert len(file.load()) == 5


def test_processes_that_change_it_at_once_lose_nothing(tmp_path: Path) -> None:
    running = [subprocess.Popen([sys.executable, "-c", MANY, str(tmp_path), who]) for who in "abc"]
    assert [process.wait(WAIT_S) for process in running] == [0, 0, 0]
    names = {each.name for each in KeyFile(tmp_path).load()}
    assert names == {f"{who}-{i}" for who in "abc" for i in range(0, 8, 2)}


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("exist", [False, True])
def test_when_a_key_is_needed(beyond: bool, exist: bool) -> None:
    needed = {"auto": beyond or exist, "always": True, "never": False}
    assert {rule: keys_needed(rule, beyond=beyond, exist=exist) for rule in needed} == needed


class Ring:
    """A ring with a clock of its own."""

    def __init__(self, home: Path, rule: str = "auto", *, beyond: bool = False) -> None:
        self.now = 1000.0
        self.file = KeyFile(home)
        self.ring = KeyRing(self.file, rule, beyond=beyond, clock=lambda: self.now, now=lambda: NOW)

    def used(self, field: str) -> dict[str, int]:
        """This count of each key."""
        return {row["name"]: row[field] for row in self.ring.reports()}

    def ask(self, *keys: str, later_s: float = LOOK_S) -> tuple[int, str]:
        """Status and words of the answer to a request with these keys, some time later; 200 for any."""
        self.now += later_s
        refusal = self.ring.refusal(keys)
        return (200, "") if refusal is None else (refusal.status, refusal.message)


def test_on_this_mac_no_client_needs_a_key_until_there_is_one(tmp_path: Path) -> None:
    agent = Ring(tmp_path)
    assert agent.ask() == (200, "")
    assert agent.ask("whatever") == (200, "")
    key = told(agent.file, "laptop")
    assert agent.ask()[0] == 401
    assert agent.ask(key) == (200, "")
    agent.file.revoke("laptop")
    assert agent.ask() == (200, "")


def test_beyond_this_mac_no_client_is_answered_until_there_is_a_key(tmp_path: Path) -> None:
    agent = Ring(tmp_path, beyond=True)
    for keys in ((), ("mlxtp_x",)):
        status, words = agent.ask(*keys)
        assert status == 401
        assert "there is none yet" in words
        assert "`mlxtp key create NAME`" in words
    key = told(agent.file, "laptop")
    assert agent.ask(key) == (200, "")
    agent.file.revoke("laptop")
    assert agent.ask(key)[0] == 401


def test_refusals_of_clients_without_a_good_key(tmp_path: Path) -> None:
    agent = Ring(tmp_path, "always")
    key = told(agent.file, "laptop")
    refused = agent.ask()
    assert "`Authorization: Bearer KEY` or `x-api-key: KEY`" in refused[1]
    digest = hashlib.sha256(key.encode())  # all that a reader of the file has
    hashes = digest.hexdigest(), digest.digest().decode("latin-1")
    for wrong in (key[:-1], key + "x", key.upper(), key.removeprefix(PREFIX), "", "ké", key[::-1], *hashes):
        status, words = agent.ask(wrong)
        assert status == 401
        assert "not known here, or was revoked" in words
        assert key not in words
    missing, unknown = agent.ring.refusal(()), agent.ring.refusal(("x",))
    assert missing is not None
    assert unknown is not None
    assert missing.code is unknown.code is Code.KEY_INVALID
    assert missing.headers == {"www-authenticate": 'Bearer realm="mlxtp"'}
    assert unknown.headers["www-authenticate"].endswith(', error="invalid_token"')


def test_one_of_two_keys_is_enough(tmp_path: Path) -> None:
    """Some client libraries always send one of their own."""
    agent = Ring(tmp_path, "always")
    first, last = told(agent.file, "first"), told(agent.file, "last")
    assert agent.ask("none", last)[0] == 200
    assert agent.ask(first, "none")[0] == 200
    assert agent.ask("none", "nothing")[0] == 401


def test_a_change_counts_within_a_second_and_the_file_is_not_asked_more_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Ring(tmp_path, "always")
    looks = []
    stamp = KeyFile.stamp
    monkeypatch.setattr(KeyFile, "stamp", lambda file: looks.append(agent.now) or stamp(file))
    key = told(agent.file, "laptop")
    assert agent.ask(key, later_s=LOOK_S * 0.9)[0] == 401
    assert looks == []
    assert agent.ask(key, later_s=LOOK_S * 0.2)[0] == 200
    for _ in range(50):
        agent.ask(key, later_s=0.001)
    assert len(looks) == 1


def test_the_commands_of_this_mac_always_get_in(tmp_path: Path) -> None:
    agent = Ring(tmp_path, beyond=True)
    agent.ring.own_key = "own"
    assert agent.ask("own") == (200, "")
    assert agent.ask("", "other")[0] == 401
    write(tmp_path, "damaged")
    assert agent.ask("own") == (200, "")
    assert Ring(tmp_path / "none", beyond=True).ask("")[0] == 401  # no own key is no key


def test_a_key_is_used_as_often_as_it_may_be_and_others_go_on(tmp_path: Path) -> None:
    agent = Ring(tmp_path)
    slow, fast = told(agent.file, "slow", 2), told(agent.file, "fast")
    assert [agent.ask(slow, later_s=LOOK_S)[0], agent.ask(slow, later_s=0)[0]] == [200, 200]
    status, words = agent.ask(slow, later_s=0)
    assert (status, words) == (429, "the key slow allows 2 requests a minute; retry in 30 s")
    assert agent.ask(fast, later_s=0)[0] == 200
    refusal = agent.ring.refusal((slow,))
    assert refusal is not None
    assert (refusal.code, dict(refusal.headers)) == (Code.RATE_LIMITED, {"retry-after": "30"})
    told(agent.file, "another")  # a changed file fills no bucket
    assert agent.ask(slow, later_s=28.5)[1].endswith("retry in 2 s")
    assert agent.ask(slow, later_s=1.5)[0] == 200


def test_when_a_key_was_last_used(tmp_path: Path) -> None:
    agent = Ring(tmp_path)
    one, _ = told(agent.file, "one"), told(agent.file, "other")
    agent.ask(one)
    agent.ask("wrong")
    assert agent.used("last_used") == {"one": int(NOW), "other": 0}
    agent.file.revoke("one")
    agent.ask("wrong")
    assert agent.used("last_used") == {"other": 0}


@pytest.mark.parametrize("how", ["damaged", "gone", "open to others", "a folder"])
@pytest.mark.parametrize("beyond", [True, False])
def test_a_broken_file_lets_no_client_in_until_it_is_mended(
    tmp_path: Path, how: str, beyond: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Also on loopback, where no client would need a key without one."""
    agent = Ring(tmp_path, beyond=beyond)
    key, path = told(agent.file, "laptop"), tmp_path / FILE
    assert agent.ask(key)[0] == 200
    good = path.read_bytes()
    with caplog.at_level(logging.ERROR):
        if how == "damaged":
            path.write_text("{")
        elif how == "open to others":
            path.chmod(0o666)
        else:
            path.unlink()
            if how == "a folder":
                path.mkdir()
        for keys in ((key,), (), ("wrong",)):
            status, words = agent.ask(*keys)
            assert status == 503
            assert str(tmp_path) not in words  # that is for the log
    assert len([record for record in caplog.records if str(path) in record.getMessage()]) == 1
    if how == "a folder":
        path.rmdir()
    path.write_bytes(good)
    path.chmod(0o600)
    assert agent.ask(key) == (200, "")
    assert agent.ask()[0] == 401


def test_a_file_that_is_gone_for_a_while_counts_again_and_fills_no_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Ring(tmp_path)
    key = told(agent.file, "slow", 1)
    assert agent.ask(key)[0] == 200
    with monkeypatch.context() as away:  # and comes back as it was, such as with its disk
        away.setattr(KeyFile, "stamp", lambda _: None)
        assert agent.ask(key)[0] == 503
        assert not agent.ring.admits([key])
    assert agent.ask(key)[0] == 429


def test_a_key_that_expired_closes_the_endpoint_and_does_not_open_it(tmp_path: Path) -> None:
    agent = Ring(tmp_path)
    key = agent.file.create("guest", 0, NOW, expires=int(NOW))[1]
    status, words = agent.ask(key)
    assert status == 401
    assert words.startswith("the key guest expired at 20")
    assert agent.ask()[0] == 401
    assert not agent.ring.admits([key])


def request(prompt: int, generated: int) -> RequestContext:
    """One with so many tokens."""
    found = RequestContext("id", 0.0)
    sequence = SimpleNamespace(prompt=range(prompt), generated=generated, cached=None)
    found.answers.append(cast(Any, sequence))
    return found


def test_the_use_of_a_key_outlives_the_agent(tmp_path: Path) -> None:
    agent = Ring(tmp_path)
    key = agent.file.create("guest", 0, NOW, tokens_per_day=100)[1]
    with answering(request(60, 39)):
        assert agent.ask(key)[0] == 200
        assert agent.used("tokens_today") == {"guest": 99}, "as they come"
        current_request = current()
        assert current_request is not None
        agent.ring.end(current_request)
    assert (agent.used("open"), agent.used("tokens_today")) == ({"guest": 0}, {"guest": 99})

    async def ends(ring: KeyRing) -> None:
        keeping = asyncio.create_task(ring.keep())
        await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.wait({keeping})

    asyncio.run(ends(agent.ring))
    assert (tmp_path / USE_FILE).stat().st_mode & 0o777 == 0o600
    again = Ring(tmp_path)
    with answering(request(1, 0)):
        assert again.ask(key)[0] == 200
        again.ring.end(cast(RequestContext, current()))
    assert again.ask(key)[0] == 429
    assert (again.used("requests"), again.used("refused")) == ({"guest": 2}, {"guest": 1})


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"keys": 5}', '{"keys": {"a": {"requests": -1}}}', '{"keys": {"a": {"b": 1}}}']
)
def test_counts_that_are_damaged_begin_again(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    told(KeyFile(tmp_path), "guest")
    (tmp_path / USE_FILE).write_text(text)
    (tmp_path / USE_FILE).chmod(0o600)
    assert Ring(tmp_path).used("requests") == {"guest": 0}
    assert "the use of API keys begins again" in caplog.text
