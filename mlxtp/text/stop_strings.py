"""Search for stop strings, and markers, in text that comes in pieces. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopFinder:
    """Finder of the stop string that is complete first.

    Of several that end at the same character, it finds the longest. Text that may be the beginning of a stop
    string is held back. The time is linear in the text, for any pieces and any number of stop strings: an
    automaton over all of them (Aho and Corasick, 1975) reads each character once.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        #: Characters that lead to a state: so many at the text's end may belong to a stop string.
        self._depth = [0]
        self._match = [0]  #: length of the longest stop string that ends in a state; 0 for none
        self._fallback = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self.found = False
        self.match = ""  #: the stop string that was found
        self.rest = ""  #: text after it in the same piece

    @property
    def held(self) -> int:
        """Number of characters that are held back."""
        return len(self._held)

    def push(self, text: str) -> str:
        """Return the text that is certain now: up to the stop string once it is found, then nothing."""
        if self.found:
            return ""
        text, start = self._held + text, len(self._held)
        state, depth, match = self._state, self._depth, self._match
        for at in range(start, len(text)):
            state = self._step(state, text[at])
            if match[state]:
                begin = at + 1 - match[state]
                self.found, self._held = True, ""
                self.match, self.rest = text[begin : at + 1], text[at + 1 :]
                return text[:begin]
        self._state = state
        certain = len(text) - depth[state]
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text that was held back, as it is no stop string after all."""
        held, self._held = self._held, ""
        self._state = 0
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
        """Set the fallback of each state, the longest other one that it ends with, short states first."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, child in self._next[state].items():
                self._fallback[child] = self._step(self._fallback[state], character)
                states.append(child)
            self._match[state] = self._match[state] or self._match[self._fallback[state]]
