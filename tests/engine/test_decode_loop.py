"""The loop of rank 0 in the test's own process: a group of one, whose agent is the test."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxtp.engine import decode_loop, grammar, requests
from mlxtp.engine.decode_loop import DecodeLoop, Followers
from mlxtp.engine.draft_model import DraftModel
from mlxtp.engine.executor import RankExecutor, Result, RunningForward
from mlxtp.engine.group import CollectiveCounter
from mlxtp.engine.logit_shaping import RequestShaping
from mlxtp.engine.mailbox import AGENT, DISK, Mailbox, Terminated
from mlxtp.engine.requests import Emitter
from mlxtp.engine.sampler import Chooser
from mlxtp.engine.steps import Policy
from mlxtp.engine.telemetry import RankTelemetry
from mlxtp.errors import Code, GroupError, ModelError
from mlxtp.wire.messages import (
    Accepted,
    Bootstrap,
    Cancel,
    Delta,
    Error,
    Finished,
    Forward,
    Generate,
    Loaded,
    LoadShard,
    Message,
    Prefilled,
    Shaping,
    Shutdown,
)

from ..reference import spoken
from .families import FAMILIES
from .small_models import write_model

ALONE = Bootstrap(0, 1, "none", (), "", bytes(32), 5.0, 5.0, 1, repeatable=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@dataclass(frozen=True)
class Arrived:
    """A message handed over by a reader thread."""

    message: Message


class Story:
    """The agent's words, each said when the one before it is through, and what rank 0 answers."""

    def __init__(self, tmp_path: Path, *orders: Message, **bootstrap: Any) -> None:
        self.said: list[Message] = []
        self.phases: list[str] = []
        """The phase in which it said each."""
        self.hears: Callable[[Message], None] = lambda _message: None
        self.status = RankTelemetry()
        self._orders = [*orders, Shutdown()]
        self.mail = Mailbox()
        desk = RequestShaping()
        how: Any = {"shaping": desk, "exchange": None, "post": partial(self.mail.post, DISK)}
        alone = replace(ALONE, **bootstrap)
        self.rank = RankExecutor(alone, 1, tmp_path, self.status, CollectiveCounter(), **how)
        pipe: Any = self
        self.followers = Followers({}, self.mail)
        self._loop = DecodeLoop(self.rank, self.mail, pipe, self.followers, desk)

    def play(self) -> list[Message]:
        """All that rank 0 said about requests and loads, in order."""
        self._order()
        self._loop.run()
        return self.said

    def send(self, message: Message) -> None:
        """As rank 0's pipe."""
        self.said.append(message)
        if isinstance(message, Prefilled):
            assert self.status.in_flight == 1, "what came before the chunk that runs is computed"
        self.phases.append(self.status.phase)
        self.hears(message)
        if isinstance(message, Loaded | Finished | Error):
            self._order()

    def _order(self) -> None:
        self.mail.post(AGENT, Arrived(self._orders.pop(0)))


class Crossing(Mailbox):
    """A mailbox in which what the agent says arrives while the loop asks for what was read from disk."""

    def __init__(self) -> None:
        super().__init__()
        self._coming: list[Any] = []

    def post(self, sender: int, received: Any) -> None:
        if sender == AGENT:
            self._coming.append(received)
        else:
            super().post(sender, received)

    def take(self, sender: int) -> Any:
        if sender == DISK and self._coming:
            super().post(AGENT, self._coming.pop(0))
        return super().take(sender)

    def wait(self, timeout_s: float | None = None, of: Iterable[int] = ()) -> bool:
        assert super().wait(1.0 if timeout_s is None else timeout_s, of), "it sleeps beside a message"
        return True


def load_of(folder: Path, **more: Any) -> LoadShard:
    return LoadShard(str(folder), 512, (), **more)


def test_a_message_that_arrives_while_another_sender_is_asked_is_not_slept_over(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Mailbox", Crossing)
    *_, finished = Story(tmp_path, load_of(folder), Generate(1, (7, 8, 9), 4)).play()
    assert isinstance(finished, Finished)


@pytest.mark.parametrize(("large", "chunks"), [(False, [240]), (True, [64, 64, 64, 48])])
def test_large_command_buffers_take_small_chunks_of_prompts(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, large: bool, chunks: list[int]
) -> None:
    monkeypatch.setattr("mlxtp.chunks.BUFFERED", 64)
    asked = Generate(1, (7, 8, 9, 10) * 60, 2)
    story = Story(tmp_path, load_of(folder), asked, large_buffers=large)
    frames = list[Message]()
    monkeypatch.setattr(story.followers, "send", lambda message: frames.append(message) or len(frames))
    story.play()
    assert [len(each.tokens) for each in frames if isinstance(each, Forward) and each.prompts] == chunks


def test_a_request_that_waits_too_long_for_room_is_refused(tmp_path: Path, folder: Path) -> None:
    *_, accepted, refused = Story(tmp_path, load_of(folder), Generate(1, (7, 8, 9), 4), queue_s=0.0).play()
    assert accepted == Accepted(1)
    assert isinstance(refused, Error)
    assert (refused.uid, refused.code) == (1, Code.OVERLOADED)
    assert "no room for this request within" in refused.detail


PROMPT = tuple(range(5, 25))


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_each_chunk_of_a_prompt_reports_what_is_computed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, run_ahead: int
) -> None:
    monkeypatch.setattr(requests, "PROGRESS_S", 0.0)
    load = LoadShard(str(folder), 8, ())
    again = Generate(2, (*PROMPT, *PROMPT), 1)
    said = Story(tmp_path, load, Generate(1, PROMPT, 1), again, run_ahead=run_ahead).play()
    reports = [(each.uid, each.computed, each.cached) for each in said if isinstance(each, Prefilled)]
    assert reports == [(1, 0, 0), (1, 8, 0), (1, 16, 0), (2, 20, 20), (2, 28, 20), (2, 36, 20)]


def test_what_the_others_got_is_run_here_too_when_they_disagree(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it their forward would never end, nor their memory be given back."""
    story = Story(tmp_path, LoadShard(str(folder), 8, ()), Generate(1, PROMPT, 9))
    sent, launched = [], []
    send, launch = story.followers.send, story.rank.launch

    def disagree(_result: Any) -> bool:
        between = len(sent) > len(launched)
        if between and len(sent) > 4:
            raise GroupError("rank 1 reports another digest", Code.DESYNC)
        return between

    def note(message: Message) -> int:
        if isinstance(message, Forward):
            sent.append(message)
        return send(message)

    monkeypatch.setattr(story.followers, "send", note)
    monkeypatch.setattr(story.followers, "acknowledged", disagree)
    monkeypatch.setattr(story.rank, "launch", lambda *args: (launched.append(args[1]), launch(*args))[1])
    with pytest.raises(GroupError, match="another digest"):
        story.play()
    assert launched == sent


def test_a_token_leaves_before_the_next_forward_is_queued_when_its_last_ack_is_there(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Acks for a forward arrive while the frame after it is sent, once rank 0 has settled it."""
    orders = load_of(folder), Generate(1, PROMPT, 6, ignore_eos=True)
    story = Story(tmp_path, *orders, speculation="off")
    settled, acknowledged, left = list[int](), set[int](), list[int]()
    send, settle, launch, wait = (story.followers.send, story.rank.settle, story.rank.launch, story.mail.wait)

    def note(result: Result) -> Result:
        settled.append(result.step)
        return result

    def arrive(then: Any) -> Any:
        acknowledged.update(settled)
        return then

    def queue(*args: Any) -> RunningForward:
        left.append(sum(len(each.tokens) for each in story.said if isinstance(each, Delta)))
        return launch(*args)

    monkeypatch.setattr(story.rank, "settle", lambda forward: note(settle(forward)))
    monkeypatch.setattr(story.rank, "launch", queue)
    monkeypatch.setattr(story.followers, "send", lambda message: arrive(send(message)))
    monkeypatch.setattr(story.followers, "acknowledged", lambda result: result.step in acknowledged)

    def waits(timeout_s: float | None = None, of: Iterable[int] = ()) -> Any:
        return arrive(wait(0, of) if settled else wait(timeout_s, of))

    monkeypatch.setattr(story.mail, "wait", waits)
    story.play()
    assert left == [0, 0, 1, 2, 3, 4]


def test_a_first_token_leaves_before_the_next_prompt_is_queued_and_no_step_waits_for_it(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asks(uid: int) -> Generate:
        return Generate(uid, (uid, *PROMPT, *PROMPT), 3, ignore_eos=True)  # too long to be computed together

    story = Story(tmp_path, load_of(folder), asks(1), *[Shutdown()] * 2, speculation="off")
    events, launch = list[str](), story.rank.launch

    def hears(message: Message) -> None:
        if message == Accepted(1):
            story.mail.post(AGENT, Arrived(asks(2)))
            story.mail.post(AGENT, Arrived(asks(3)))
        if isinstance(message, Delta):
            events.append("".join(map(str, message.uids)))

    def queue(step: int, frame: Any, *args: Any) -> RunningForward:
        events.append("prompt" if frame.prompts else "step")
        return launch(step, frame, *args)

    monkeypatch.setattr(story.rank, "launch", queue)
    story.hears = hears
    story.play()
    assert events[:8] == ["prompt", "1", "prompt", "2", "prompt", "step", "3", "step"]


class Pair(Story):
    """A guided request, and one without a grammar that still runs when the first one ends."""

    def __init__(self, tmp_path: Path, folder: Path) -> None:
        shaping = Shaping(grammar_kind="regex", grammar="[ab]{6}")
        guided = Generate(1, PROMPT, 9, shaping=shaping)
        super().__init__(tmp_path, load_of(folder), guided, Shutdown())

    def send(self, message: Message) -> None:
        super().send(message)
        if message == Accepted(1):
            self.mail.post(AGENT, Arrived(Generate(2, PROMPT[::-1], 60, ignore_eos=True)))


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "Policy", lambda **fields: Policy(**{**fields, "late": True}))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_guided_step_is_queued_before_the_token_before_it_is_known(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Pair(tmp_path, folder)
    events = list[str]()
    send, settle = story.followers.send, story.rank.settle

    def sent(message: Message) -> int:
        if isinstance(message, Forward):
            events.append("send")
        return send(message)

    def known(forward: RunningForward) -> Result:
        events.append("settle")
        return settle(forward)

    monkeypatch.setattr(story.followers, "send", sent)
    monkeypatch.setattr(story.rank, "settle", known)
    story.play()
    # The first prompt alone, then step after step, each before the one before it is settled.
    assert " ".join(events).startswith("send settle send send settle send settle send settle")
    deltas = [each for each in story.said if isinstance(each, Delta)]
    said = [pair for each in deltas for pair in zip(each.uids, each.tokens, strict=True)]
    tokens = tuple([token for uid, token in said if uid == 1])
    assert re.fullmatch("[ab]{6}", spoken(tokens))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_step_whose_wait_fails_chooses_all_the_same(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks wait in its last sum for what rank 0 chooses."""
    story = Pair(tmp_path, folder)
    settle, chose, settled = story.rank.settle, Chooser.choose, list[int]()
    chosen = list[int]()

    def fail(forward: Forward) -> Result:
        settled.append(forward.step)
        if len(settled) == 3:
            raise Terminated
        return settle(forward)

    def note(chooser: Chooser, *args: Any, **named: Any) -> Any:
        chosen.append(len(settled))
        return chose(chooser, *args, **named)

    monkeypatch.setattr(story.rank, "settle", fail)
    monkeypatch.setattr(Chooser, "choose", note)
    with pytest.raises(Terminated):
        story.play()
    assert chosen == [0, 1, 3]


def test_the_grammars_tokenizer_is_read_before_the_model_is_reported_loaded(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[int]()
    story = Story(tmp_path, load_of(folder))
    read = grammar.read_tokenizer

    def note(*args: Any) -> Any:
        said.append(len(story.said))
        return read(*args)

    monkeypatch.setattr(grammar, "read_tokenizer", note)
    [reply] = story.play()
    assert isinstance(reply, Loaded)
    assert said == [0]


def test_a_request_has_one_last_result() -> None:
    said = list[Message]()
    pipe: Any = SimpleNamespace(send=said.append)
    voice = Emitter(pipe, RankTelemetry())
    voice.admit(1)
    voice.admit(2)
    failed, ended = Error(Code.GRAMMAR_STUCK, "no token can come", 1), Finished(2, "stop", 3, 4)
    voice.emit((failed, ended, Finished(1, "stop", 3, 4)))
    voice.emit((Error(Code.INTERNAL, "", 2), Finished(3, "stop", 1, 1)))
    assert said == [failed, ended]


def test_progress_is_reported_now_and_then_and_of_open_requests_alone(tmp_path: Path) -> None:
    now, said = [5.0], list[Message]()
    pipe: Any = SimpleNamespace(send=said.append)
    voice = Emitter(pipe, RankTelemetry(), lambda: now[0])
    voice.admit(1)
    for computed in range(10):
        voice.prefilled(1, computed, 0)
        voice.prefilled(2, computed, 0)
        now[0] += requests.PROGRESS_S / 4
    voice.send_error(1, Code.INTERNAL, "")
    now[0] += 1
    voice.prefilled(1, 10, 0)
    assert said[:-1] == [Prefilled(1, computed, 0) for computed in (0, 4, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_a_disk_that_hangs_under_the_draft_model_is_noticed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The watch judges a load by its phase, and by its reports of progress."""
    story = Story(tmp_path, LoadShard(str(folder), 512, (), draft_path=str(folder)))
    phases, progress = [], []

    class Watched(DraftModel):
        def __init__(self, *arguments: Any) -> None:
            phases.append(story.status.phase)
            monkeypatch.setattr(story.status, "_since", 0.0)
            super().__init__(*arguments)
            progress.append(story.status._since)
            if fails:
                raise ModelError("it cannot draft")

    monkeypatch.setattr(decode_loop, "DraftModel", Watched)
    [reply] = story.play()
    assert isinstance(reply, Error if fails else Loaded)
    assert (phases, story.phases) == (["loading"], ["idle"])
    assert progress > [0.0]


def test_an_answer_that_has_begun_elsewhere_waits_for_room_as_long_as_it_takes(
    tmp_path: Path, folder: Path
) -> None:
    """Half of it was said by a group that failed."""
    load = load_of(folder)
    again = Generate(1, (7, 8, 9, 10), 4, ignore_eos=True, answered=1)
    *_, finished = Story(tmp_path, load, again, queue_s=0.0).play()
    assert isinstance(finished, Finished)
    assert (finished.uid, finished.reason) == (1, "length")


def test_what_ends_with_its_model_goes_to_disk(tmp_path: Path) -> None:
    """Shutdown comes before the move that ends the sequence, whose cache is kept whole."""
    changes = FAMILIES["gpt_oss"] | {"max_position_embeddings": 2048}
    load = LoadShard(str(write_model(tmp_path / "model", model_type="gpt_oss", **changes)), 512, ())
    wanted, disk = Generate(1, tuple(range(5, 505)) * 3, 100, ignore_eos=True), tmp_path / "disk"
    story = Story(tmp_path, load, wanted, disk_folder=str(disk), disk_bytes=1 << 30)

    def said(message: Message) -> None:
        if isinstance(message, Delta) and 50 in message.indices:
            story.mail.post(AGENT, Arrived(Cancel(1)))

    story.hears = said
    *_, finished = story.play()
    story.rank.give_back()
    assert isinstance(finished, Finished)
    assert finished.reason == "cancel"
    ends = [int(path.name.split("-")[1]) for path in disk.glob("*/*-*-*")]
    assert max(ends) > 1550
