"""The index of kept caches, against a plain model of it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlxtp.engine.kv_cache import SHORTEST_HIT, Hit, PrefixCache, capacity

A = tuple(range(100, 140))
B = tuple(range(200, 240))
QUESTION = (1, 2, 3)


def cache(budget: int = 1_000, entries: int = 10, shortest: int = SHORTEST_HIT) -> PrefixCache:
    return PrefixCache(budget, entries, shortest)


def test_a_running_sequence_shares_its_prompt() -> None:
    kept = cache()
    kept.share(7, A)
    assert kept.find(A + QUESTION) == Hit(7, 40, whole=False)
    assert (kept.positions, len(kept)) == (0, 0)
    kept.touch(7)
    kept.share(7, (*A, 5))
    assert kept.find((*A, 5, 5)) == Hit(7, 41, whole=False)
    kept.unshare(7)
    assert kept.find(A + QUESTION) is None


def test_what_is_kept_already_or_not_at_all_is_an_error() -> None:
    kept = cache()
    kept.keep(1, A)
    with pytest.raises(ValueError, match="uid 1"):
        kept.keep(1, B)
    assert kept.take(1) == 40
    for unknown in (kept.take, kept.touch):
        with pytest.raises(KeyError):
            unknown(1)


def test_caches_that_cannot_be_cut_are_of_one_salt_too() -> None:
    kept = PrefixCache(1_000, 10, truncatable=False)
    kept.keep(1, A, salt=7)
    for other in (0, 6, 7 + (1 << 32)):
        assert kept.find(A + QUESTION, salt=other) is None
    assert kept.find(A + QUESTION, salt=7) == Hit(1, 40, whole=True)
    assert kept.keep(2, A, salt=6) == ()


def common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@dataclass
class Plain:
    """The same index, looked through token by token."""

    budget: int
    entries: int
    shortest: int
    kept: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    running: dict[int, tuple[int, ...]] = field(default_factory=dict)
    salts: dict[int, int] = field(default_factory=dict)

    def keep(self, uid: int, tokens: tuple[int, ...], salt: int) -> tuple[int, ...]:
        self.running.pop(uid, None)
        self.salts[uid] = salt
        if len(tokens) < self.shortest or capacity(len(tokens)) > self.budget or not self.entries:
            return (uid,)
        for entry in self.kept:
            if self.salts[entry[0]] == salt and entry[1][: len(tokens)] == tokens:
                self.kept.remove(entry)
                self.kept.append(entry)
                return (uid,)
        alike = [entry for entry in self.kept if self.salts[entry[0]] == salt]
        freed = [entry for entry in alike if tokens[: len(entry[1])] == entry[1]]
        self.kept = [entry for entry in self.kept if entry not in freed]
        self.kept.append((uid, tokens))
        while self.size() > self.budget or len(self.kept) > self.entries:
            freed.append(self.kept.pop(0))
        return tuple(uid for uid, _ in freed)

    def size(self) -> int:
        return sum(capacity(len(tokens)) for _, tokens in self.kept)

    def find(self, prompt: tuple[int, ...], salt: int) -> Hit | None:
        hits = [
            Hit(uid, common(tokens, prompt[:-1]), prompt[: len(tokens)] == tokens)
            for uid, tokens in self.kept
        ]
        hits.reverse()
        hits += [
            Hit(uid, common(tokens, prompt[:-1]), whole=False)
            for uid, tokens in reversed(self.running.items())
        ]
        hits = [hit for hit in hits if hit.length >= max(self.shortest, 1) and self.salts[hit.uid] == salt]
        return max(hits, key=lambda hit: (hit.length, hit.whole), default=None)

    def evict(self, positions: int) -> tuple[int, ...]:
        freed, enough = [], self.size() - positions
        while self.kept and self.size() > enough:
            freed.append(self.kept.pop(0)[0])
        return tuple(freed)


#: Texts that go different ways, all or some of them, after so many tokens.
TEXTS = [tuple([way if at >= turn else 0 for at in range(150)]) for turn in (0, 59, 90) for way in (1, 2)]
TOKENS = st.tuples(st.sampled_from(TEXTS), st.integers(0, 5)).map(lambda part: part[0][: 30 * part[1]])
SALTS = st.sampled_from([*[0] * 6, 7, 7 + (1 << 32)])
STEP = st.sampled_from([*["keep", "find"] * 3, "share", "end", "evict", "take"])
STEPS = st.lists(st.tuples(STEP, TOKENS, SALTS), min_size=20, max_size=60)
"""What is done, with which text, of which salt."""


@given(STEPS, st.sampled_from((90, 300, 2000)), st.sampled_from((0, 2, 4, 9)), st.sampled_from((0, 30, 60)))
@example([("keep", A, 0), ("keep", (*A[:39], 9), 0), ("find", A, 0)], 300, 9, 0)  # what may be taken wins
@settings(max_examples=200)
def test_any_story_goes_as_in_the_plain_model(
    steps: list[tuple[str, tuple[int, ...], int]], budget: int, entries: int, shortest: int
) -> None:
    """Hits are the longest, budget and count hold, what runs is not evicted, all that goes is named."""
    real, plain = PrefixCache(budget, entries, shortest), Plain(budget, entries, shortest)
    for uid, (step, tokens, salt) in enumerate(steps, 1):
        match step:
            case "keep":
                freed = real.keep(uid, tokens, salt)
                assert freed == plain.keep(uid, tokens, salt)
                assert not set(freed) & set(plain.running)
            case "share":
                real.share(uid, tokens, salt)
                plain.running[uid], plain.salts[uid] = tokens, salt
            case "end" if plain.running:
                ended = min(plain.running)
                assert real.keep(ended, tokens, salt) == plain.keep(ended, tokens, salt)
            case "find":
                hit = real.find(tokens, salt)
                assert hit == plain.find(tokens, salt)
                if hit and hit.uid not in plain.running:
                    real.touch(hit.uid)
                    plain.kept.sort(key=lambda entry: entry[0] == hit.uid)
            case "evict":
                assert real.evict(len(tokens)) == plain.evict(len(tokens))
            case "take" if plain.kept:
                uid_taken, held = plain.kept.pop()
                assert real.take(uid_taken) == len(held)
        assert real.positions == plain.size() <= budget
        assert len(real) == len(plain.kept) <= entries


@pytest.mark.parametrize("differs_at", [0, 16, 17, 50_000, 99_998, 99_999])
def test_long_prompts_are_compared_to_the_token(differs_at: int) -> None:
    """Tokens of which one byte alone differs, too."""
    rng = random.Random(differs_at)
    prompt = [rng.randrange(1 << 18) for _ in range(100_000)]
    held = list(prompt)
    held[differs_at] ^= 1 << rng.choice((0, 9, 17))
    kept = cache(budget=1_000_000)
    kept.keep(1, held)
    expected = Hit(1, differs_at, whole=False) if differs_at >= SHORTEST_HIT else None
    assert kept.find(prompt) == expected


def whole(budget: int = 10_000, entries: int = 10) -> PrefixCache:
    return PrefixCache(budget, entries, 8, truncatable=False)


def test_only_a_whole_beginning_is_found() -> None:
    kept = whole()
    for uid, length in ((1, 10), (2, 30), (3, 20)):
        assert kept.keep(uid, A[:length]) == ()
    assert kept.find(A) == Hit(2, 30, whole=True)
    assert kept.find(A[:30]) == Hit(3, 20, whole=True)  # one token is left to feed
    assert kept.find(A[:29]) == Hit(3, 20, whole=True)
    assert kept.find((*A[:19], 7, 7)) == Hit(1, 10, whole=True)
    assert kept.find((*A[:9], 7, 7)) is None
    assert kept.find(A, salt=1) is None


def test_what_runs_is_not_shared_by_those_that_cannot_be_cut() -> None:
    kept = whole()
    kept.share(1, A)
    assert kept.find(A + QUESTION) is None
    kept.unshare(1)


def test_one_that_saves_little_beyond_another_is_refused_and_keeps_that_one_young() -> None:
    kept = whole(budget=128)
    kept.keep(1, A[:20])
    kept.keep(2, B[:20])
    assert kept.keep(3, A[:27]) == (3,)
    assert kept.keep(4, A[:20]) == (4,)
    assert kept.keep(5, A[:28]) == (2,)
    assert kept.find(A) == Hit(5, 28, whole=True)
    assert kept.find(A[:28]) == Hit(1, 20, whole=True)
    assert kept.keep(6, A[:12]) == (1,)  # a shorter one serves other prompts


def test_what_does_not_grow_counts_for_every_cache() -> None:
    kept = PrefixCache(300, 10, row_tokens=50)
    assert [kept.keep(uid, (uid, *A[1:])) for uid in (1, 2, 3)] == [(), (), (1,)]
    assert kept.positions == 2 * (64 + 50)
    kept.take(2)
    assert kept.positions == 64 + 50
    assert PrefixCache(100, 10, row_tokens=50).keep(1, A) == (1,)


def test_those_that_a_longer_one_begins_with_count_as_what_does_not_grow() -> None:
    kept = PrefixCache(10_000, 10, 8, truncatable=False, overlapping=True, row_tokens=7)
    assert [kept.keep(uid, A[:length]) for uid, length in ((1, 10), (2, 20), (4, 40))] == [()] * 3
    assert kept.keep(3, (*A[:30], *B)) == ()  # another answer to the beginning of 2
    assert (kept.covered(2), kept.covered(4), kept.covered(3)) == ((), (), (1, 2))
    assert kept.positions == 64 + 96 + 4 * 7
    assert kept.take(3) == 70
    assert (kept.covered(2), kept.positions) == ((1,), 64 + 64 + 3 * 7)  # 2 has arrays again
    assert kept.keep(5, (*A, *B)) == ()
    assert (set(kept.covered(5)), kept.positions) == ({1, 2, 4}, 96 + 4 * 7)
    kept.take(2)
    assert (set(kept.covered(5)), kept.positions) == ({1, 4}, 96 + 3 * 7)
    assert kept.evict(1_000) == (1, 4, 5)
    assert kept.positions == 0


def test_what_makes_room_is_evicted_after_those_that_share_arrays_stopped_to_count() -> None:
    kept = PrefixCache(200, 10, 8, truncatable=False, overlapping=True)
    kept.keep(1, A)
    kept.keep(2, B)
    kept.touch(1)
    assert kept.keep(3, (*A, *B)) == ()
    assert kept.positions == 64 + 96
    assert kept.keep(4, (*B, *A)) == ()
    assert kept.positions == 96 + 96
