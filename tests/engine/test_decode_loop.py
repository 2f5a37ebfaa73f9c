"""The loop of rank 0 in the test's process: a group of one, whose agent is the test; and others' replies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

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
from mlxtp.errors import Code, GroupError, LinkError, ModelError
from mlxtp.wire.blocking import BlockingLink
from mlxtp.wire.messages import (
    Accepted,
    Ack,
    Bootstrap,
    Cancel,
    Delta,
    Done,
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
from mlxtp.wire.session import Received

from ..live_cluster import WAIT_S
from ..reference import spoken
from .families import FAMILIES
from .small_models import write_model
from .tables import refused

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


Begin = Callable[..., Story]
Before = Callable[[Any, str, Callable[..., object]], None]


@pytest.fixture
def begin(tmp_path: Path, folder: Path) -> Begin:
    """A story of a model that is loaded, and what the agent says then."""

    def story(*orders: Message, chunk: int = 512, draft_path: str = "", **bootstrap: Any) -> Story:
        load = LoadShard(str(folder), chunk, (), draft_path=draft_path)
        return Story(tmp_path, load, *orders, **bootstrap)

    return story


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Before:
    """Something is done each time that a method is called, before it is."""

    def do(owner: Any, name: str, act: Callable[..., object]) -> None:
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **more: (act(*args), call(*args, **more))[1])

    return do


def test_a_message_that_arrives_while_another_sender_is_asked_is_not_slept_over(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Mailbox", Crossing)
    assert isinstance(begin(Generate(1, (7, 8, 9), 4)).play()[-1], Finished)


@pytest.mark.parametrize(("large", "chunks"), [(False, [240]), (True, [64, 64, 64, 48])])
def test_large_command_buffers_take_small_chunks_of_prompts(
    begin: Begin, before: Before, monkeypatch: pytest.MonkeyPatch, large: bool, chunks: list[int]
) -> None:
    monkeypatch.setattr("mlxtp.chunks.BUFFERED", 64)
    story, frames = begin(Generate(1, (7, 8, 9, 10) * 60, 2), large_buffers=large), list[Message]()
    before(story.followers, "send", frames.append)
    story.play()
    assert [len(each.tokens) for each in frames if isinstance(each, Forward) and each.prompts] == chunks


def test_a_request_that_waits_too_long_for_room_is_refused_unless_its_answer_has_begun(begin: Begin) -> None:
    """Half of that was said by a group that failed."""
    *_, accepted, refused = begin(Generate(1, (7, 8, 9), 4), queue_s=0.0).play()
    assert accepted == Accepted(1)
    assert isinstance(refused, Error)
    assert (refused.uid, refused.code) == (1, Code.OVERLOADED)
    assert "no room for this request within" in refused.detail
    *_, finished = begin(Generate(1, (7, 8, 9, 10), 4, ignore_eos=True, answered=1), queue_s=0.0).play()
    assert isinstance(finished, Finished)
    assert (finished.uid, finished.reason) == (1, "length")


PROMPT = tuple(range(5, 25))


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_each_chunk_of_a_prompt_reports_what_is_computed(
    begin: Begin, monkeypatch: pytest.MonkeyPatch, run_ahead: int
) -> None:
    monkeypatch.setattr(requests, "PROGRESS_S", 0.0)
    asked = Generate(1, PROMPT, 1), Generate(2, (*PROMPT, *PROMPT), 1)
    said = begin(*asked, chunk=8, run_ahead=run_ahead).play()
    reports = [(each.uid, each.computed, each.cached) for each in said if isinstance(each, Prefilled)]
    assert reports == [(1, 0, 0), (1, 8, 0), (1, 16, 0), (2, 20, 20), (2, 28, 20), (2, 36, 20)]


def test_what_the_others_got_is_run_here_too_when_they_disagree(
    begin: Begin, before: Before, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it their forward would never end, nor their memory be given back."""
    story = begin(Generate(1, PROMPT, 9), chunk=8)
    sent, launched = [], []

    def disagree(_result: Any) -> bool:
        between = len(sent) > len(launched)
        if between and len(sent) > 4:
            raise GroupError("rank 1 reports another digest", Code.DESYNC)
        return between

    before(story.followers, "send", lambda each: sent.append(each) if isinstance(each, Forward) else None)
    before(story.rank, "launch", lambda _step, frame, *_: launched.append(frame))
    monkeypatch.setattr(story.followers, "acknowledged", disagree)
    with pytest.raises(GroupError, match="another digest"):
        story.play()
    assert launched == sent


def test_a_token_leaves_before_the_next_forward_is_queued_when_its_last_ack_is_there(
    begin: Begin, before: Before, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Acks for a forward arrive while the frame after it is sent, once rank 0 has settled it."""
    story = begin(Generate(1, PROMPT, 6, ignore_eos=True), speculation="off")
    settled, acknowledged, left = list[int](), set[int](), list[int]()
    settle, wait = story.rank.settle, story.mail.wait

    def note(result: Result) -> Result:
        settled.append(result.step)
        return result

    def waits(timeout_s: float | None = None, of: Iterable[int] = ()) -> bool:
        came = wait(0, of) if settled else wait(timeout_s, of)
        acknowledged.update(settled)
        return came

    def queue(*_: Any) -> None:
        left.append(sum(len(each.tokens) for each in story.said if isinstance(each, Delta)))

    monkeypatch.setattr(story.rank, "settle", lambda forward: note(settle(forward)))
    before(story.rank, "launch", queue)
    before(story.followers, "send", lambda _: acknowledged.update(settled))
    monkeypatch.setattr(story.followers, "acknowledged", lambda result: result.step in acknowledged)
    monkeypatch.setattr(story.mail, "wait", waits)
    story.play()
    assert left == [0, 0, 1, 2, 3, 4]


def test_a_first_token_leaves_before_the_next_prompt_is_queued_and_no_step_waits_for_it(
    begin: Begin, before: Before
) -> None:
    def asks(uid: int) -> Generate:
        return Generate(uid, (uid, *PROMPT, *PROMPT), 3, ignore_eos=True)  # too long to be computed together

    def hears(message: Message) -> None:
        if message == Accepted(1):
            story.mail.post(AGENT, Arrived(asks(2)))
            story.mail.post(AGENT, Arrived(asks(3)))
        if isinstance(message, Delta):
            events.append("".join(map(str, message.uids)))

    story, events = begin(asks(1), *[Shutdown()] * 2, speculation="off"), list[str]()
    before(story.rank, "launch", lambda _, frame, *__: events.append("prompt" if frame.prompts else "step"))
    story.hears = hears
    story.play()
    assert events[:8] == ["prompt", "1", "prompt", "2", "prompt", "step", "3", "step"]


@pytest.fixture
def pair(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> Story:
    """A guided request, and one without a grammar that still runs when the first one ends; as on a GPU."""
    monkeypatch.setattr(requests, "Policy", lambda **fields: Policy(**{**fields, "late": True}))
    shaping = Shaping(grammar_kind="regex", grammar="[ab]{6}")
    story = begin(Generate(1, PROMPT, 9, shaping=shaping), Shutdown())

    def hears(message: Message) -> None:
        if message == Accepted(1):
            story.mail.post(AGENT, Arrived(Generate(2, PROMPT[::-1], 60, ignore_eos=True)))

    story.hears = hears
    return story


def test_a_guided_step_is_queued_before_the_token_before_it_is_known(pair: Story, before: Before) -> None:
    events = list[str]()
    before(pair.followers, "send", lambda each: isinstance(each, Forward) and events.append("send"))
    before(pair.rank, "settle", lambda _: events.append("settle"))
    pair.play()
    # The first prompt alone, then step after step, each before the one before it is settled.
    assert " ".join(events).startswith("send settle send send settle send settle send settle")
    deltas = [each for each in pair.said if isinstance(each, Delta)]
    said = [each for delta in deltas for each in zip(delta.uids, delta.tokens, strict=True)]
    assert re.fullmatch("[ab]{6}", spoken([token for uid, token in said if uid == 1]))


def test_a_step_whose_wait_fails_chooses_all_the_same(pair: Story, before: Before) -> None:
    """The other ranks wait in its last sum for what rank 0 chooses."""
    settled, chosen = list[int](), list[int]()

    def fail(forward: RunningForward) -> None:
        settled.append(forward.step)
        if len(settled) == 3:
            raise Terminated

    before(pair.rank, "settle", fail)
    before(Chooser, "choose", lambda *_: chosen.append(len(settled)))
    with pytest.raises(Terminated):
        pair.play()
    assert chosen == [0, 1, 3]


def test_the_grammars_tokenizer_is_read_before_the_model_is_reported_loaded(
    begin: Begin, before: Before
) -> None:
    story, said = begin(), list[int]()
    before(grammar, "read_tokenizer", lambda *_: said.append(len(story.said)))
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


def test_progress_is_reported_now_and_then_and_of_open_requests_alone() -> None:
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
    begin: Begin, folder: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """The watch judges a load by its phase, and by its reports of progress."""
    story = begin(draft_path=str(folder))
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


DONE = Received(1, Done())


def with_followers(mail: Mailbox, ranks: int) -> Followers:
    return Followers({rank: cast(BlockingLink, None) for rank in range(1, ranks + 1)}, mail)


def test_every_reply_is_read_and_all_silent_ranks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    mail = Mailbox()
    wait = mail.wait
    monkeypatch.setattr(mail, "wait", lambda _s=None, of=(): wait(0, of))  # the time passes at once
    for rank in (2, 4):
        mail.post(rank, DONE)
    with refused(LinkError, Code.LINK_TIMEOUT, r"nothing came from rank 1 and rank 3 within 5 s"):
        with_followers(mail, 4).replies(5.0)
    assert mail.take(2) is mail.take(4) is None


def test_all_ranks_share_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waits_s = [0.0], list[float]()

    def receive(_rank: int, deadline_s: float) -> Any:
        waits_s.append(deadline_s)
        now[0] += deadline_s
        raise LinkError("silent", Code.LINK_TIMEOUT)

    mail = Mailbox()
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(mail, "receive", receive)
    with pytest.raises(LinkError):
        with_followers(mail, 3).replies(5.0)
    assert waits_s == [5.0, 0.0, 0.0]


def test_replies_that_are_there_come_in_the_order_of_ranks() -> None:
    mail = Mailbox()
    for rank in (2, 1):
        mail.post(rank, DONE)
    assert list(with_followers(mail, 2).replies(WAIT_S)) == [1, 2]


def test_a_rank_may_be_a_step_ahead_of_another_with_its_acks() -> None:
    mail = Mailbox()
    followers = with_followers(mail, 2)
    one, two = (Result(step, (), {}, step, 0, 7, 0, 0, 0.0, 0.0) for step in (1, 2))
    for step in (1, 2):
        mail.post(1, Received(step, Ack(step, step, 0, 7)))
    assert not followers.acknowledged(one)
    assert not followers.acknowledged(one), "the second Ack of rank 1 is of the next step"
    assert followers.awaited == {2}
    for step in (1, 2):
        mail.post(2, Received(step, Ack(step, step, 0, 7)))
    assert followers.acknowledged(one)
    assert followers.acknowledged(two)


@pytest.mark.parametrize("what", ["step", "forwards", "collectives", "digest"])
def test_an_ack_that_differs_in_anything_ends_the_epoch(what: str) -> None:
    mail = Mailbox()
    mail.post(1, Received(1, replace(Ack(1, 1, 4, 7), **{what: 9})))
    with refused(GroupError, Code.DESYNC, rf"rank 1 reports {what} 9, rank 0 has \d"):
        with_followers(mail, 1).acknowledged(Result(1, (), {}, 1, 4, 7, 0, 0, 0.0, 0.0))
