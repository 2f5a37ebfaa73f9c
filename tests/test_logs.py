"""Lines of the log: each one JSON object, with any content."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import re
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtp import audit, logs
from mlxtp.api.request_context import RequestContext, answering
from mlxtp.cli.main import _log
from mlxtp.errors import ConfigError
from mlxtp.logs import FOREIGN_PER_MINUTE, AuditLog, RotatingLog, keep_audit, log_formatter
from mlxtp.settings import AUDIT_LOG

from .live_cluster import until


class Log(logging.Logger):
    """A logger of its own, and what it wrote."""

    def __init__(self, name: str) -> None:
        super().__init__("mlxtp.test")
        self.stream = io.StringIO()
        handler = logging.StreamHandler(self.stream)
        handler.setFormatter(log_formatter(name))
        self.addHandler(handler)

    @property
    def line(self) -> dict[str, object]:
        """The one line, as JSON."""
        text = self.stream.getvalue()
        assert text.count("\n") == 1
        assert text.endswith("\n")
        found: dict[str, object] = json.loads(text)
        return found


@pytest.fixture
def json_log() -> Log:
    return Log("json")


def test_a_line_says_when_who_and_what_for_which_request_and_fields_replace_none_of_these(
    json_log: Log,
) -> None:
    account = RequestContext("abc", 0.0)
    account.key = "laptop"
    more = {"epoch": 3, "rank": 0, "fields": {"status": 200, "message": "forged"}}
    with answering(account):
        json_log.warning("epoch %d ended: %s", 3, "rank 1 is gone", extra=more)
    line = json_log.line
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("time")))
    assert line == {
        **{"level": "warning", "logger": "mlxtp.test", "message": "epoch 3 ended: rank 1 is gone"},
        **{"request_id": "abc", "key": "laptop", "epoch": 3, "rank": 0, "status": 200},
    }


def test_times_are_utc_with_milliseconds(json_log: Log) -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "hello", (), None)
    record.created = 1767225599.0004
    assert '"time": "2025-12-31T23:59:59.000Z"' in log_formatter("json").format(record)


@pytest.mark.parametrize("text", ['two\nlines "quoted"', "\x1b[31m", "日本 😀", "\u2028\udc80", "%s %d {}"])
def test_any_text_is_one_line(json_log: Log, text: str) -> None:
    json_log.info("%s", text)
    assert json_log.line["message"] == text


def test_an_exception_is_in_its_line(json_log: Log) -> None:
    try:
        raise ValueError("why")
    except ValueError:
        json_log.exception("epoch %d", 3)
    assert "Traceback" in str(json_log.line["exception"])
    assert "ValueError: why" in str(json_log.line["exception"])


def test_what_is_no_json_is_written_as_text(json_log: Log) -> None:
    json_log.info("x", extra={"epoch": object()})
    assert "object object" in str(json_log.line["epoch"])


def test_people_see_the_requests_id_at_the_end_of_a_line() -> None:
    text = Log("text")
    text.warning("no agent replies")
    with answering(RequestContext("abc", 0.0)):
        text.warning("a request failed")
    first, second = text.stream.getvalue().splitlines()
    assert first.endswith("WARNING no agent replies")
    assert second.endswith("WARNING a request failed [abc]")


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger; afterwards it is what it was."""
    root, mlxtp = logging.getLogger(), logging.getLogger("mlxtp")
    handlers, level, own = root.handlers[:], root.level, mlxtp.level
    yield root
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    mlxtp.setLevel(own)


def begin_log(*how: str) -> None:
    """As a process begins."""
    logging.getLogger().handlers[:] = []
    _log(*how)


def test_all_that_a_json_agent_logs_is_json(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    begin_log("json")
    logging.getLogger("mlxtp.node").info("hello")
    logging.getLogger("asyncio").error("another program")
    logging.getLogger("asyncio").info("not said")
    warnings.warn("a library's", stacklevel=1)
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["logger"] for line in lines] == ["mlxtp.node", "asyncio", "py.warnings"]


def test_a_log_file_starts_over_and_keeps_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtp.logs.MAX_LOG_BYTES", 1000)
    monkeypatch.setattr("mlxtp.logs.KEPT_LOGS", 2)
    handler = RotatingLog(str(tmp_path / "logs" / "agent.log"))
    log = logging.Logger("mlxtp.test")
    log.addHandler(handler)
    for number in range(50):
        log.info("%03d %s \udc80", number, "x" * 90)
    handler.close()
    files = {path.name: path.read_text().splitlines() for path in (tmp_path / "logs").iterdir()}
    assert files.keys() == {"agent.log", "agent.log.1", "agent.log.2"}
    kept = [int(line[:3]) for name in sorted(files, reverse=True) for line in files[name]]
    assert kept == list(range(kept[0], 50))
    assert all(path.stat().st_size <= 1000 for path in (tmp_path / "logs").iterdir())


def test_a_log_file_is_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtp.logs.MAX_LOG_BYTES", 100)
    handler = RotatingLog(str(tmp_path / "log"))
    for _ in range(3):
        handler.emit(logging.makeLogRecord({"msg": "x" * 90}))
    handler.close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    (tmp_path / "own").touch(0o640)
    RotatingLog(str(tmp_path / "own")).close()
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o640  # which a user has chosen


def test_a_terminal_is_told_where_the_log_goes(
    root: logging.Logger, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    begin_log("text", str(tmp_path / "log"))
    assert capsys.readouterr().err == f"mlxtp: the log goes to {tmp_path / 'log'}\n"


def test_a_log_that_cannot_be_written_is_told_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    full = RotatingLog("/dev/full")
    log = logging.Logger("mlxtp.test")
    log.addHandler(full)
    for _ in range(3):
        log.info("hello")
    said = capsys.readouterr().err
    assert said.count("the log /dev/full cannot be written") == 1
    assert "No space left" in said
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--log-file .*file/log: "):
        RotatingLog(str(tmp_path / "file" / "log"))


def test_everything_an_agent_with_a_log_file_says_is_there(
    root: logging.Logger, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    begin_log("json", str(tmp_path / "log"))
    logging.getLogger("mlxtp.node").info("hello")
    warnings.warn("a library's", stacklevel=1)
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [line["logger"] for line in lines] == ["mlxtp.node", "py.warnings"]
    assert capsys.readouterr().err == ""


def test_what_others_say_steers_no_terminal_and_makes_no_line_of_its_own() -> None:
    text = Log("text")
    text.warning("%s joined\n%s", "\x1b[2J\u202emac", "2026 CRITICAL all is lost\r\x9b1m")
    try:
        raise ValueError("\x1b[2J\nsecond\u2028line")
    except ValueError:
        text.exception("it failed")
    first, _, error = text.stream.getvalue().partition("\n")
    assert first.endswith(" WARNING ?[2J?mac joined 2026 CRITICAL all is lost ?1m")
    assert not {"\x1b", "\u2028"} & set(error)
    assert "Traceback (most recent call last):\n" in error
    assert "ValueError: ?[2J\nsecond line\n" in error


def test_on_a_terminal_it_is_the_same(monkeypatch: pytest.MonkeyPatch, root: logging.Logger) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", stream)
    begin_log("text")
    root.error("%s joined", "\x1b[2Jmac\nnext")
    shown = re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue())  # the colours of the line
    assert "?[2Jmac next joined" in shown
    assert "\x1b" not in shown


@pytest.fixture
def audited(tmp_path: Path) -> Iterator[Path]:
    """The audit log of a home, which this process writes."""
    keep_audit(tmp_path)
    yield tmp_path / AUDIT_LOG
    audit.log.handlers.clear()
    audit.log.setLevel(logging.NOTSET)


def events(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_event_says_what_happened_and_by_whom(audited: Path) -> None:
    audit.record("model_served", "tiny is to be served", {"model": "tiny"})
    client = RequestContext("abc", 0.0, "address 10.0.0.7")
    with answering(client):
        audit.record("model_served", "tiny is to be served", {"model": "tiny"})
        client.key = "page"
        audit.record("model_unloaded", "tiny is no longer to be served", {"model": "tiny"})
        audit.record("member_removed", "mini removed air", {"member": "air", "by": "mini"})
    first, second, third, last = events(audited)
    assert first.pop("time")
    assert first == {
        "event": "model_served", "message": "tiny is to be served", "model": "tiny", "by": "this agent"
    }  # fmt: skip
    assert [second["by"], third["by"], last["by"]] == ["address 10.0.0.7", "key page", "mini"]
    assert {path.stat().st_mode & 0o777 for path in audited.parent.iterdir()} == {0o600}


def test_processes_rotate_the_audit_log_and_lose_none(audited: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent keeps no file open, so that what a command rotated away gets no further lines."""
    [agent] = audit.log.handlers
    command = AuditLog(audited.parent)
    for handler in (agent, command):
        assert isinstance(handler, AuditLog)
        monkeypatch.setattr(handler, "maxBytes", 300)
    audited.chmod(0o644)  # by accident
    for number in range(8):
        record = logging.LogRecord("mlxtp.audit", logging.INFO, "", 0, "event %d", (number,), None)
        (agent, command)[number % 2].handle(record)
    files = sorted(audited.parent.glob(f"{AUDIT_LOG}*"), reverse=True)
    assert len(files) > 2
    said = [event["message"] for path in files for event in events(path)]
    assert sorted(map(str, said)) == [f"event {number}" for number in range(8)]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_strangers_do_not_fill_the_audit_log(audited: Path) -> None:
    now = 1000.0
    audit.log.handlers[:] = [AuditLog(audited.parent, lambda: now)]
    for _ in range(FOREIGN_PER_MINUTE + 25):
        audit.record("key_refused", "refused", {}, foreign=True)
        audit.record("model_served", "served", {})
    refused = [each for each in events(audited) if each["event"] == "key_refused"]
    assert len(refused) == FOREIGN_PER_MINUTE
    assert len(events(audited)) == 2 * FOREIGN_PER_MINUTE + 25
    now += 60.0
    audit.record("key_refused", "refused", {}, foreign=True)
    assert events(audited)[-1]["left_out"] == 25


def test_a_process_that_keeps_the_lock_holds_up_no_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logs, "MOST_WAITING", 3)
    monkeypatch.setattr(logs, "LAST_WAIT_S", 0.05)
    handler = logs.AuditLog(tmp_path)

    def event(number: int) -> None:
        handler.handle(logging.makeLogRecord({"msg": f"event {number}", "fields": {"event": "tried"}}))

    def written() -> list[tuple[str, int]]:
        lines = map(json.loads, (tmp_path / AUDIT_LOG).read_text().splitlines())
        return [(each["message"], each.get("left_out", 0)) for each in lines]

    with (tmp_path / "audit.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        began = time.monotonic()
        for number in range(5):
            event(number)
        assert time.monotonic() - began < 1
        assert written() == []
        handler.close()
    assert "audit lines not written: 5" in capsys.readouterr().err
    until(lambda: len(written()) == 3, "the lock is free")
    event(5)  # the thread may still have the lock
    until(lambda: len(written()) == 4, "the thread is done")
    assert written() == [("event 0", 0), ("event 1", 0), ("event 2", 0), ("event 5", 2)]


def test_the_end_of_a_process_waits_for_the_lock(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    handler = AuditLog(tmp_path)
    with (tmp_path / "audit.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for number in range(2):
            handler.handle(logging.makeLogRecord({"msg": f"event {number}", "fields": {}}))
        threading.Timer(0.2, lambda: fcntl.flock(lock, fcntl.LOCK_UN)).start()
        logging.shutdown([lambda: handler])  # type: ignore[list-item]
    assert capsys.readouterr().err == ""
    assert [event["message"] for event in events(tmp_path / AUDIT_LOG)] == ["event 0", "event 1"]


def test_a_home_that_takes_no_audit_log_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--home .*/file: audit\.jsonl cannot be written: "):
        keep_audit(tmp_path / "file")
