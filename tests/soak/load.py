"""Apps that ask an agent all the time, each in its own way, and what became of every request."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from ..chaos.answers import COUNT, KINDS, LONG, Answer, ask_into
from ..live_cluster import SLOWNESS
from ..reference import random_text

RIGHT = "right"
REFUSED = "refused"
"""With 503 or 429 and the time to come back: while no group serves, or too many ask."""
NO_CLAIM = "no agent there"
"""The agent does not run."""
CUT = "cut"
"""The connection ended before the answer did; what came was right."""
ENDED = "ended"
"""With an error event; what came was right."""
LEFT = "left"
"""The app hung up."""
WRONG = "wrong"

HANGS_S = 300 * SLOWNESS  #: Time without a byte after which a request counts as one without an end.
_AT_ONCE = 8
"""Requests for the right answers. One after the other they take minutes on a busy machine."""
_LEAVES = 0.05
_RESTS_S = 0.1


@dataclass(frozen=True)
class Question:
    """One of the kinds of `KINDS`, a prompt, and a deployment."""

    kind: str
    prompt: str
    model: str

    def blanks(self) -> list[Answer]:
        return [Answer() for _ in range(int(KINDS[self.kind].get("n", 1)))]

    def into(self, answers: list[Answer], url: str, **changed: Any) -> None:
        fields = {"max_tokens": 200, **KINDS[self.kind], "prompt": self.prompt, "model": self.model}
        fields |= {"silent_s": HANGS_S, **changed}
        ask_into(answers, url, **{name: value for name, value in fields.items() if name != "n"})


def questions(random: Random, models: Iterable[str]) -> list[Question]:
    """Some of each kind for each model, with prompts that share beginnings and some that share none."""
    prompts = [COUNT, LONG, *(f"Repeat exactly: {random_text(random, length)}" for length in (8, 20, 40))]
    own = {kind: str(fields["prompt"]) for kind, fields in KINDS.items() if "prompt" in fields}
    turns = itertools.cycle(prompts)
    return [
        Question(kind, prompt, model)
        for model in models
        for kind in KINDS
        for prompt in ([own[kind]] if kind in own else [next(turns), next(turns)])
    ]


def judged(answers: Sequence[Answer], expected: Sequence[Answer], *, cut: bool = False) -> str:
    """Return the outcome of a request. `cut`: whether its connection ended before it did."""
    first = answers[0]
    if first.status in (429, 503) and not cut:
        return REFUSED if first.retry_after is not None else WRONG
    for answer, right in zip(answers, expected, strict=True):
        whole = not cut and first.error is None
        if answer.text != right.text if whole else not right.text.startswith(answer.text):
            return WRONG
        if whole and (not answer.done or answer.finish != right.finish):
            return WRONG
        if not whole and answer.done:
            return WRONG
    return CUT if cut else ENDED if first.error else RIGHT


class App:
    """Asks until it is closed. What is `WRONG` is kept in `complaints`, with all that was said."""

    def __init__(self, name: str, url: str, expected: Mapping[Question, Sequence[Answer]], seed: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        """Right answers by kind."""
        self.codes: Counter[str] = Counter()
        """Of the requests that ended with an error."""
        self.tokens = 0
        self.longest_s = 0.0
        self.complaints: list[str] = []
        self.agent = name
        self._url = url
        self._expected = expected
        self._random = Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self, within_s: float) -> bool:
        """Ask nothing more; returns whether the request that is open has ended in time."""
        self._over.set()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        everything = list(self._expected)
        while not self._over.is_set():
            question = self._random.choice(everything)
            leaves = self._random.random() < _LEAVES
            outcome = self._leave(question) if leaves else self._ask(question)
            self.outcomes[outcome] += 1
            self._over.wait(1.0 if outcome in (REFUSED, NO_CLAIM) else self._random.uniform(0, 2 * _RESTS_S))

    def _ask(self, question: Question) -> str:
        answers, cut = question.blanks(), False
        try:
            question.into(answers, self._url)
        except httpx.ConnectError:
            return NO_CLAIM
        except httpx.TransportError:
            cut = True
        except AssertionError as error:  # events in an order that no stream may have
            self.complaints.append(f"{question}: {error}")
            return WRONG
        outcome = judged(answers, self._expected[question], cut=cut)
        if outcome == WRONG:
            self.complaints.append(f"{question}: {answers} instead of {self._expected[question]}")
        elif outcome == RIGHT:
            self.kinds[question.kind] += 1
            self.tokens += sum(answer.tokens for answer in answers)
        elif outcome == ENDED:
            self.codes[str(answers[0].code)] += 1
        return outcome

    def _leave(self, question: Question) -> str:
        """Hang up at some point of a stream."""
        lines, url = self._random.randrange(30), f"{self._url}/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": question.prompt}], "stream": True}
        body |= {"model": question.model}
        try:
            with httpx.stream("POST", url, json=body, timeout=HANGS_S) as response:
                for line in response.iter_lines():
                    if (lines := lines - bool(line)) <= 0:
                        break
        except httpx.ConnectError:
            return NO_CLAIM
        except httpx.TransportError:
            return CUT
        return LEFT


def without_faults(url: str, wanted: Sequence[Question]) -> dict[Question, list[Answer]]:
    """The answers of a sound cluster, all as streams: they may take as long as they like, if they go on."""

    def answered(question: Question) -> list[Answer]:
        answers = question.blanks()
        question.into(answers, url, stream=True)
        assert all(answer.done and answer.text for answer in answers), (question, answers)
        return answers

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(wanted, pool.map(answered, wanted), strict=True))
