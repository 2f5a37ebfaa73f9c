"""Chat templates and tokenizers that never end, take all memory or break fail their own request alone."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from mlxtp.errors import Code, ModelError, RequestError
from mlxtp.text import renderer
from mlxtp.text.conversation import ChatMessage, Conversation
from mlxtp.text.json_limits import SHORT
from mlxtp.text.renderer import LocalRenderer, SandboxedRenderer
from mlxtp.text.tokenizer import Text

from ..api.conftest import TEMPLATE, WAIT_S, FakeBackend, Loaded, byte_level, save, says, serving
from ..reference import chat_ids, conversation_ids

pytestmark = [pytest.mark.slow, pytest.mark.fault]

HOSTILE = {
    "endless": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
        "{% endfor %}{% endfor %}"
    ),
    "large": "{% set x = 'a' * (messages | length * 20000000000) %}",
    "growing": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "zero": "{{ 1 // 0 }}",
    "deep": "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
}


def hostile(*kinds: str) -> str:
    """A template that does harm where the last message is called by one of `kinds`."""
    harm = (f"{{% if messages[-1].content == {kind!r} %}}{HOSTILE[kind]}{{% endif %}}" for kind in kinds)
    return f"{''.join(harm)}{TEMPLATE}"


def saying(words: str) -> Conversation:
    return Conversation((ChatMessage("user", words),))


def children() -> list[psutil.Process]:
    gc.collect()  # what failed in another test
    return [each for each in psutil.Process().children() if "mlxtp.text.renderer" in each.cmdline()]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "ROOM_BYTES", 64 << 20)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Text:
    """One model for all hostile requests, each of which must leave it to the others."""
    folder = save(byte_level(), tmp_path_factory.mktemp("attacked"), hostile(*HOSTILE))
    return Text(SandboxedRenderer(folder))


@pytest.mark.parametrize(
    ("name", "longest"),
    [
        ("byte_level", 100_000),
        *(pytest.param(name, 1_000, marks=pytest.mark.chaos) for name in ("byte_fallback", "metaspace")),
        *(pytest.param(name, 100_000, marks=pytest.mark.chaos) for name in ("byte_fallback", "metaspace")),
    ],
)
def test_it_writes_what_the_same_code_writes_in_this_process(
    loaded: dict[str, Loaded], name: str, longest: int
) -> None:
    each = loaded[name]
    text = Text(SandboxedRenderer(each.folder))
    for words in ("hello wide world", "日本語 😀", "x" * longest, 'quotes " and \\ and \u2028'):
        assert conversation_ids(text, saying(words)) == conversation_ids(each.text, saying(words))
        assert text.encoded(words, special=True) == each.text.encoded(words, special=True)
    assert text.eos == each.text.eos
    with pytest.raises(RequestError, match="half a character"):
        text.encoded("\ud800", special=True)
    with pytest.raises(RequestError, match="no mood is known"):
        chat_ids(text, [{"role": "user", "content": "I"}], template_options={"mood": 1})


@pytest.mark.parametrize(
    ("kind", "status", "words"),
    [
        ("endless", 504, "it takes more than 3 s for these messages"),
        pytest.param("large", 422, "memory", marks=pytest.mark.chaos),
        ("growing", 422, "memory"),
        ("zero", 400, "refuses these messages: integer (division|modulo)"),
        ("deep", 400, "refuses these messages: maximum recursion depth"),
    ],
)
@pytest.mark.usefixtures("quick")
def test_a_hostile_template_fails_the_request_alone(
    attacked: Text, caplog: pytest.LogCaptureFixture, kind: str, status: int, words: str
) -> None:
    usual = conversation_ids(attacked, saying("hello"))
    with pytest.raises(RequestError, match=words) as caught:
        conversation_ids(attacked, saying(kind))
    assert caught.value.status == status
    assert conversation_ids(attacked, saying("hello")) == usual
    assert not caplog.records


def change_tokenizer(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "tokenizer.json"
    found = json.loads(path.read_text())
    change(found)
    path.write_text(json.dumps(found))
    return folder


def test_a_panic_while_encoding_is_an_error_of_the_request(tmp_path: Path) -> None:
    folder = change_tokenizer(
        save(byte_level(), tmp_path), lambda found: found["post_processor"].update(special_tokens={})
    )
    text = Text(SandboxedRenderer(folder))
    for _ in range(2):
        with pytest.raises(RequestError, match="PanicException: no entry found for key") as caught:
            text.encoded("hello", special=True)
        assert (caught.value.status, caught.value.code) == (422, Code.MODEL_INVALID)
    assert conversation_ids(text, saying("hello"))


def test_a_tokenizer_that_never_works_is_a_broken_model(tmp_path: Path) -> None:
    empty = {"type": "FixedLength", "length": 0}
    folder = change_tokenizer(save(byte_level(), tmp_path), lambda found: found.update(pre_tokenizer=empty))
    with pytest.raises(ModelError, match="PanicException: chunk size must be non-zero"):
        Text(SandboxedRenderer(folder))


def test_a_panic_while_reading_is_a_broken_model(tmp_path: Path) -> None:
    folder = change_tokenizer(
        save(byte_level(), tmp_path), lambda found: found["model"].update(continuing_subword_prefix="z" * 40)
    )
    for load in (LocalRenderer.load, SandboxedRenderer):
        with pytest.raises(ModelError, match="cannot be read"):
            load(folder)


def test_a_tokenizer_that_takes_too_long_to_read_is_refused(
    loaded: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "START_BYTES", 1)
    before = children()
    with pytest.raises(ModelError, match="memory"):
        SandboxedRenderer(loaded["byte_level"].folder)
    assert children() == before


@pytest.mark.parametrize("kind", [b"i", b"f", b"x", b""])
def test_a_reply_of_another_kind_is_none(kind: bytes) -> None:
    with pytest.raises(RequestError, match="its reply cannot be read"):
        renderer.read_reply(b"t", kind, b"\1\0\0\0")
    assert renderer.read_reply(b"t", b"t", b"\xc3\xa9") == "é"
    assert renderer.read_reply(b"i", b"i", b"\1\0\0\0") == (1,)


def test_an_empty_request_ends_the_process_in_order(loaded: dict[str, Loaded]) -> None:
    process = renderer._Process(loaded["byte_level"].folder)
    process.greeting()
    process._socket.sendall(bytes(4))
    assert process._popen.wait(30) == 0
    process.close()


def test_after_its_end_the_next_request_gets_another_process(loaded: dict[str, Loaded]) -> None:
    usual = loaded["byte_level"]
    before = children()
    text = Text(SandboxedRenderer(usual.folder))
    [process] = [each for each in children() if each not in before]
    process.kill()
    process.wait()
    assert conversation_ids(text, saying("hello")) == conversation_ids(
        loaded["byte_level"].text, saying("hello")
    )


def test_a_stopped_process_is_ended_and_its_request_gets_504(
    loaded: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renderer, "STILL_S", 0.3)
    usual = loaded["byte_level"]
    before = children()
    text = Text(SandboxedRenderer(usual.folder))
    for words in ("hello", "x" * 500_000):  # one that fits into the socket's buffer, and one that does not
        text.encoded(words, special=True)
        for process in [each for each in children() if each not in before]:
            process.suspend()
        with pytest.raises(RequestError, match=r"its process stood still for 0\.3 s") as caught:
            text.encoded(words, special=True)
        assert (caught.value.status, caught.value.code) == (504, Code.DEADLINE)
        assert text.encoded(words, special=True) == usual.text.encoded(words, special=True)


def test_only_a_process_that_neither_works_nor_waits_for_a_core_stands_still() -> None:
    looks = round(renderer.STILL_S / renderer.TICK_S) + 2

    def error(*looked: tuple[float, str]) -> RequestError | None:
        watch = renderer.Watch(1, "late")
        return [watch.look(0, *looked[i % len(looked)]) for i in range(looks)][-1]

    for status in ("stopped", "sleeping"):
        found = error((1.0, status))
        assert found is not None
        assert "stood still for 10 s" in found.detail
        assert error((1.0, status), (1.01, status)) is None
    for status in ("running", "disk-sleep"):
        assert error((1.0, status)) is None
        assert error(*[(1.0, "sleeping")] * (looks // 2), (1.0, status)) is None


def test_a_process_that_was_killed_leaves_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(SandboxedRenderer(save(byte_level(), tmp_path, hostile("endless"))))

    def kill() -> None:
        [process] = [each for each in children() if str(tmp_path) in each.cmdline()]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its status is left for the agent

    usual = conversation_ids(text, saying("hello"))
    kill()  # between two requests
    assert conversation_ids(text, saying("hello")) == usual
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "was ended by signal 9; the next request for this model starts a new one" in caplog.text
    assert str(tmp_path) in caplog.text

    caplog.clear()
    receive = renderer._Process._receive

    def killed(process: renderer._Process, *rest: Any) -> Any:
        kill()
        return receive(process, *rest)

    with monkeypatch.context() as patched:  # in the middle of one
        patched.setattr(renderer._Process, "_receive", killed)
        with pytest.raises(RequestError, match="was ended by signal 9") as caught:
            conversation_ids(text, saying("endless"))
    assert caught.value.status == 422
    assert caplog.text.count("was ended by signal 9") == len(caplog.records) == 1


def test_short_texts_pass_long_ones_and_both_processes_end_with_the_text(loaded: dict[str, Loaded]) -> None:
    before = children()
    text = Text(SandboxedRenderer(loaded["byte_level"].folder))
    text.encoded("x" * 100_000, special=True)
    assert len(children()) == len(before) + 2
    del text
    assert children() == before


def test_a_closed_text_has_no_process_but_for_a_request_that_comes_late(loaded: dict[str, Loaded]) -> None:
    before = children()
    text = Text(SandboxedRenderer(loaded["byte_level"].folder))
    tokens = [text.encoded(short, special=True) for short in ("hello", "x" * 100_000)]
    text.close()
    for size in (1, 100_000):
        text.line(size).run_blocking(lambda: None)
    assert children() == before
    assert [text.encoded(short, special=True) for short in ("hello", "x" * 100_000)] == tokens
    assert children() == before


def test_short_texts_pass_the_long_text_that_a_template_makes_of_a_short_body(tmp_path: Path) -> None:
    wide = "{% if messages[-1].content == 'wide' %}{{ 'x' * 100000 }}{% endif %}" + TEMPLATE
    begun, waits, go_on = threading.Event(), threading.Event(), threading.Event()

    class Watched(SandboxedRenderer):
        def line(self, size: int) -> renderer._Lane:
            if size > SHORT:
                waits.set()
            return super().line(size)

    def long() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    tokenizer = byte_level()
    writer = Watched(save(tokenizer, tmp_path, wide))

    async def story(url: str) -> list[int]:
        first = asyncio.create_task(writer.line(SHORT + 1).run(long))
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        waits.clear()
        async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:

            async def count(words: str) -> int:
                body = {"model": "tiny", "messages": [{"role": "user", "content": words}]}
                reply = await client.post("/v1/messages/count_tokens", json=body)
                return int(reply.json()["input_tokens"])

            expanded = asyncio.create_task(count("wide"))
            assert await asyncio.to_thread(waits.wait, WAIT_S)
            found = [await count("hello")]
            assert not expanded.done()
            go_on.set()
            assert await first
            return [*found, await expanded]

    with serving(FakeBackend(Text(writer), says([])), tokenizer) as server:
        short, expanded = asyncio.run(story(server.url))
    assert short < SHORT < expanded


def test_a_reply_that_was_not_read_is_never_the_next_request_s(
    loaded: dict[str, Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = loaded["byte_level"]
    text = Text(SandboxedRenderer(usual.folder))
    receive = renderer._Process._receive

    def interrupted(*_arguments: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(renderer._Process, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        conversation_ids(text, saying("secret"))
    monkeypatch.setattr(renderer._Process, "_receive", receive)
    assert conversation_ids(text, saying("hello")) == conversation_ids(usual.text, saying("hello"))


def test_a_template_that_writes_far_more_than_it_reads_is_refused(tmp_path: Path) -> None:
    wide = "{% if messages[-1].content == 'wide' %}{{ 'x' * 30000000 }}{% endif %}" + TEMPLATE
    text = Text(SandboxedRenderer(save(byte_level(), tmp_path, wide)))
    with pytest.raises(RequestError, match="memory"):
        conversation_ids(text, saying("wide"))
    assert conversation_ids(text, saying("hello"))


def test_work_that_has_not_begun_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer, "MOST_WAIT_S", 0.05)
    begun, go_on = threading.Event(), threading.Event()

    def long() -> bool:
        begun.set()
        return go_on.wait(WAIT_S)

    async def story() -> None:
        queue = renderer.WorkerQueue()
        first = asyncio.create_task(queue.run(long))
        await asyncio.to_thread(begun.wait, WAIT_S)
        with pytest.raises(RequestError, match="kept the tokenizer busy") as caught:
            await queue.run(lambda: None)
        assert caught.value.status == 503
        go_on.set()
        assert await first

    asyncio.run(story())
