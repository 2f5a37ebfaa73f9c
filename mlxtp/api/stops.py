"""An answer's tokens in, the text that is certain out: no half characters, nothing of a stop string. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from .backend import Score
from .text import Detokenizer

Scored = tuple[int, Score]
"""A token and its score."""


class StopFinder:
    """Finds the stop string that is complete first; of several that end at the same character, the longest.

    Text that may be the beginning of one is held back. Linear in the text, however it is cut and however many
    stop strings there are: an automaton over all of them (Aho and Corasick, 1975) reads each character once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        """Characters that lead to a state: so many at the text's end may belong to a stop string."""
        self._match = [0]
        """Length of the longest stop string that ends in a state; 0 for none."""
        self._fallback = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The text that is certain now. After a stop string is found: what stood before it, then nothing."""
        if self.found:
            return ""
        text, start = self._held + text, len(self._held)
        state, depth, match = self._state, self._depth, self._match
        for at in range(start, len(text)):
            state = self._step(state, text[at])
            if match[state]:
                self.found, self._held = True, ""
                return text[: at + 1 - match[state]]
        self._state = state
        certain = len(text) - depth[state]
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """What was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _step(self, state: int, character: str) -> int:
        while character not in self._next[state] and state:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(0)
                self._fallback.append(0)
            state = self._next[state][character]
        self._match[state] = self._depth[state]

    def _link(self) -> None:
        """For each state the longest other one that its characters end with, the short ones first."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], character)
                states.append(child)
            self._match[state] = self._match[state] or self._match[self._fallback[state]]


class TextStream:
    """One answer as it is shown: its text up to a stop string, and its scores.

    A token's score comes with the text that the token completes: later than the token when its character is
    incomplete or its text held back. No score is lost and none comes twice. Of the tokens that are pushed
    after the one that completed a stop string, nothing is shown or counted.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = (), scored: bool = False) -> None:
        self._detokenizer = detokenizer
        self._finder = StopFinder(stops) if stops else None
        self._scored = scored
        self._incomplete: list[Scored] = []
        """Scores of the tokens whose text is not complete yet."""
        self._waiting: deque[tuple[int, Scored]] = deque()
        """The other scores not shown yet, each with the length of the answer at its token's end."""
        self._made = 0
        self._shown = 0
        self.used = 0
        """Tokens up to the end, the one that completed a stop string included."""

    @property
    def stopped(self) -> bool:
        return self._finder is not None and self._finder.found

    def push(self, tokens: Sequence[int], scores: Sequence[Score] = ()) -> tuple[str, list[Scored]]:
        """The text and the scores that are certain now."""
        if self._finder is None and not self._scored:
            self.used += len(tokens)
            return self._detokenizer.push(tokens), []
        if self._scored and len(scores) != len(tokens):
            raise ValueError(f"{len(scores)} scores for {len(tokens)} tokens")
        parts = []
        for i, token in enumerate(tokens):
            if self.stopped:
                break
            self.used += 1
            if self._scored:
                self._incomplete.append((token, scores[i]))
            parts.append(self._show(self._detokenizer.push((token,))))
        return "".join(parts), self._due()

    def finish(self) -> tuple[str, list[Scored]]:
        """The rest, when no more tokens come."""
        text = "" if self.stopped else self._show(self._detokenizer.finish())
        if self._finder is not None:
            text += self._finder.finish()
        rest = [scored for _, scored in self._waiting] + self._incomplete
        self._waiting.clear()
        self._incomplete.clear()
        return text, rest

    def _show(self, text: str) -> str:
        if text and self._incomplete:
            self._made += len(text)
            self._waiting.extend([(self._made, scored) for scored in self._incomplete])
            self._incomplete.clear()
        if self._finder is not None:
            text = self._finder.push(text)
        self._shown += len(text)
        return text

    def _due(self) -> list[Scored]:
        if self.stopped:
            return self.finish()[1]
        due = []
        while self._waiting and self._waiting[0][0] <= self._shown:
            due.append(self._waiting.popleft()[1])
        return due
