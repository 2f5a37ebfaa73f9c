"""Small model that proposes tokens, on rank 0 alone.

It runs between steps on the same thread and stream as everything else, and enters no collective. Its
proposals are checked like any draft, so they can change an answer's speed, never its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import mlx.core as mx

from ..errors import Code, ModelError
from .batch import KVCACHE_STEP, Caches, cut
from .group import LoneGroup
from .loader import load, make_cache

MAX_CACHES = 4  # sequences whose caches it keeps
CACHES_SHARE = 8  # one part in so many of the room for KV caches
CHUNK = 512


class DraftModel:
    """Greedy implementation of `scheduler.Drafter`."""

    def __init__(self, folder: Path, vocabulary: int, progress: Callable[[], None] = lambda: None) -> None:
        """Load the model, calling `progress` as `load` does.

        Raises ModelError when the folder holds no model, or one whose vocabulary has another size.
        """
        from mlx_lm.models.cache import can_trim_prompt_cache

        loaded = load(folder, LoneGroup(), progress)
        if loaded.vocabulary.size != vocabulary:
            raise ModelError(
                f"draft model {folder.name}: its vocabulary has {loaded.vocabulary.size} tokens, "
                f"the model's has {vocabulary}; they must be the same",
                Code.MODEL_INVALID,
            )
        self.weight_bytes = loaded.weight_bytes
        self._room_bytes = 1 << 62  # bytes that its caches may take
        self._token_bytes = max(loaded.kv_token_bytes, 1)
        self._model = loaded.model
        if not can_trim_prompt_cache(make_cache(self._model)):
            raise ModelError(
                f"draft model {folder.name}: its caches cannot be rolled back, so it cannot draft",
                Code.MODEL_UNSUPPORTED,
            )
        #: Tokens and caches of the sequences it drafted for, latest last.
        self._fed: list[tuple[list[int], Caches]] = []

    def propose(self, tokens: Sequence[int], limit: int) -> tuple[int, ...]:
        """Return the most likely `limit` tokens after `tokens`; none while it still reads a long prompt.

        Each call reads one chunk, so that other requests do not wait for a whole prompt.
        """
        if self._bytes(len(tokens) + limit) > self._room_bytes:
            return ()
        fed, caches = self._resume(tokens)
        todo = list(tokens[len(fed) :])
        drafts: list[int] = []
        if len(todo) > CHUNK:
            self._model(mx.array([todo[:CHUNK]]), cache=caches)
            mx.eval([cache.state for cache in caches])
            fed += todo[:CHUNK]
            limit = 0
        while len(drafts) < limit:
            logits = self._model(mx.array([todo]), cache=caches)
            fed += todo
            todo = [cast(int, mx.argmax(logits[0, -1]).item())]
            drafts += todo
        self._fed = [*self._fed[-MAX_CACHES + 1 :], (fed, caches)]
        self.bound(self._room_bytes)
        return tuple(drafts)

    def bound(self, room_bytes: int) -> None:
        """Keep the caches within `room_bytes` from now on; the oldest make way."""
        self._room_bytes = room_bytes
        while sum(self._bytes(len(tokens)) for tokens, _ in self._fed) > room_bytes:
            self._fed.pop(0)

    def _bytes(self, tokens: int) -> int:
        """Return the bytes of one sequence's caches."""
        return -(-tokens // KVCACHE_STEP) * KVCACHE_STEP * self._token_bytes

    def _resume(self, tokens: Sequence[int]) -> tuple[list[int], Caches]:
        """Take the sequence that shares most with `tokens`, cut to the shared part.

        At least one of `tokens` is left to feed.
        """
        best, length = -1, 0
        for i, (fed, _) in enumerate(self._fed):
            shared = _shared(fed, tokens)
            if shared > length:
                best, length = i, shared
        if best < 0 or 2 * length < len(self._fed[best][0]):
            return [], make_cache(self._model)  # mostly another sequence, whose caches may be used again
        fed, caches = self._fed.pop(best)
        length = min(length, len(tokens) - 1)
        return fed[:length], cut(caches, length)


def _shared(fed: Sequence[int], tokens: Sequence[int]) -> int:
    length = min(len(fed), len(tokens))
    if fed[:length] == tokens[:length]:
        return length
    return next(i for i in range(length) if fed[i] != tokens[i])
