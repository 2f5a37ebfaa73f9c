"""Lazy sampling from logits: filters, seeded draws, log-probabilities, and agreement of all ranks.

Everything here builds a graph and evaluates nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..wire.messages import Sampling
from .group import Group

_BLOCK = 256  # tokens in a block of the cumulative sum for a draw
#: Largest 1 / temperature: finite in float32, and enough to separate any two different logits.
_COLDEST = 1e30


# --- random numbers -----------------------------------------------------------------------------------

#: Words uint32 [n, 2] of Threefry-2x32 with 20 rounds at counter (0, 1), for keys uint32 [n, 2]. Salmon,
#: Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A single MLX operation.
_threefry = mx.vmap(lambda key: mx.random.split(key, num=1)[0])


def stream_keys(seeds: Sequence[int]) -> mx.array:
    words = [(seed & 0xFFFFFFFF, seed >> 32) for seed in seeds]
    return _threefry(mx.array(np.array(words, dtype=np.uint32)))


def uniforms(keys: mx.array, positions: mx.array) -> mx.array:
    """Return two independent numbers of [0, 1) for each of `positions` [R, L]: float32 [R, L, 2]."""
    # On a grid of 2^-24; they depend only on position and seed: `keys` are `stream_keys` of the rows' seeds.
    low = keys[:, :1] + positions.astype(mx.uint32)
    words = _threefry(mx.stack([low, mx.broadcast_to(keys[:, 1:], low.shape)], axis=-1).reshape(-1, 2))
    return (words.reshape(*low.shape, 2) >> 8).astype(mx.float32) * 2.0**-24


# --- filters, like mlx-lm's of the same names: removed tokens become -inf --------------------------------
# `logprobs` is float32 [R, L, V], settings are [R, 1, 1] or [R, L, 1].


def keep_top_p(logprobs: mx.array, top_p: mx.array, ascending: mx.array) -> mx.array:
    """Keep the likeliest tokens until they reach `top_p`; above 1, keep all. `ascending`: sorted logprobs."""
    probabilities = mx.exp(ascending)
    above = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
    total = above[..., :1] + probabilities[..., :1]
    dropped = (above >= top_p * total).sum(axis=-1, keepdims=True)
    return mx.where(logprobs < mx.take_along_axis(ascending, dropped, axis=-1), -mx.inf, logprobs)


def keep_min_p(logprobs: mx.array, log_min_p: mx.array) -> mx.array:
    return mx.where(logprobs < logprobs.max(axis=-1, keepdims=True) + log_min_p, -mx.inf, logprobs)


def exclude_top(logprobs: mx.array, on: mx.array, threshold: mx.array, special: tuple[int, ...]) -> mx.array:
    """Apply XTC to rows that are `on`: of tokens above `threshold`, keep the least likely and `special`."""
    probabilities = mx.softmax(logprobs, axis=-1)
    least = mx.where(probabilities > threshold, probabilities, mx.inf).min(axis=-1, keepdims=True)
    excluded = probabilities > least
    if special:
        excluded[..., mx.array(special)] = False
    return mx.where(on & excluded, -mx.inf, logprobs)


def keep_top_k(logprobs: mx.array, top_k: mx.array, leaders: mx.array) -> mx.array:
    """Keep `top_k` (int32) tokens; of equals, the lower ids. `leaders`: the top ones or more, ascending."""
    which = mx.broadcast_to(leaders.shape[-1] - top_k, (*logprobs.shape[:-1], 1))
    last = mx.take_along_axis(leaders, which, axis=-1)
    above, level = logprobs > last, (logprobs == last).astype(mx.int32)
    room = top_k - above.sum(axis=-1, keepdims=True)
    kept = above | ((level == 1) & (mx.cumsum(level, axis=-1) <= room))
    return mx.where(kept, logprobs, -mx.inf)


# --- choosing -------------------------------------------------------------------------------------------
LEAST_P = 1e-30  # a smaller top_p would be 0 in 32 bits, and keep nothing


def _column(values: list[float] | list[int] | list[bool]) -> mx.array:
    return mx.array(values)[:, None, None]


class Sampler:
    """Sampler of rows with these settings. `top_p` 0 keeps everything, as 1 does."""

    def __init__(self, rows: tuple[Sampling, ...], xtc_special: tuple[int, ...] = ()) -> None:
        self._rows = len(rows)
        self._drawn = [i for i, row in enumerate(rows) if row.temperature > 0]
        drawn = [rows[i] for i in self._drawn]
        self.greedy = not drawn  # every row takes its most likely token
        if not drawn:
            return
        self._keys = stream_keys([row.seed for row in drawn])
        self._sharpness = _column([min(1.0 / row.temperature, _COLDEST) for row in drawn])
        # A setting that keeps everything must not lose a token to rounding.
        self._top_p = _column([max(row.top_p, LEAST_P) if 0.0 < row.top_p < 1.0 else 2.0 for row in drawn])
        self._log_min_p = _column([math.log(row.min_p) if row.min_p else -math.inf for row in drawn])
        self._xtc: tuple[mx.array, mx.array, tuple[int, ...]] | None = None
        if any(row.xtc_probability for row in drawn):
            probability = _column([row.xtc_probability for row in drawn])
            self._xtc = probability, _column([row.xtc_threshold for row in drawn]), xtc_special
        self._all_k = _column([row.top_k == 0 for row in drawn])
        self._top_k = _column([row.top_k for row in drawn])
        self._largest_k = max(row.top_k for row in drawn)
        self._some_top_p = any(0.0 < row.top_p < 1.0 for row in drawn)
        self._some_min_p = any(row.min_p for row in drawn)

    def choose(self, logits: mx.array, positions: mx.array) -> mx.array:
        """Choose tokens, int32 [R, L], from `logits` [R, L, V]; greedy rows take the lowest id of equals.

        `positions`: the chosen tokens' places in the sequence, int32 [R, L], or [R] for consecutive ones.
        """
        if self.greedy:
            return mx.argmax(logits, axis=-1).astype(mx.int32)
        if positions.ndim == 1:
            positions = positions[:, None] + mx.arange(logits.shape[1], dtype=mx.int32)
        if len(self._drawn) == self._rows:
            return self._draw(logits, positions)
        rows = mx.array(self._drawn)
        chosen = mx.argmax(logits, axis=-1).astype(mx.int32)
        chosen[rows] = self._draw(logits[rows], positions[rows])
        return chosen

    def filter(self, logits: mx.array, coins: mx.array) -> mx.array:
        """Return log-probabilities [D, L, V] of rows that draw; -inf if filtered out. `coins`: [D, L, 1]."""
        logits = logits.astype(mx.float32)
        kept = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if self._some_top_p:
            leaders = mx.sort(kept, axis=-1)
            kept = keep_top_p(kept, self._top_p, leaders)
        if self._some_min_p:
            kept = keep_min_p(kept, self._log_min_p)
        if self._xtc:
            probability, threshold, special = self._xtc
            kept = exclude_top(kept, coins < probability, threshold, special)
        if self._largest_k:
            vocabulary = logits.shape[-1]
            top_k = mx.where(self._all_k, vocabulary, mx.clip(self._top_k, 1, vocabulary))
            largest_k = vocabulary if self._largest_k >= vocabulary else self._largest_k
            if not self._some_top_p or self._xtc:  # XTC removes the most likely tokens
                leaders = mx.sort(mx.topk(kept, largest_k, axis=-1), axis=-1)
            kept = mx.where(self._all_k, kept, keep_top_k(kept, mx.minimum(top_k, largest_k), leaders))
        return kept

    def _draw(self, logits: mx.array, positions: mx.array) -> mx.array:
        numbers = uniforms(self._keys, positions)
        kept = self.filter(logits, numbers[..., 1:])
        weights = mx.exp((kept - kept.max(axis=-1, keepdims=True)) * self._sharpness)
        return draw(weights, numbers[..., :1])


def draw(weights: mx.array, uniform: mx.array) -> mx.array:
    """Draw tokens int32 [R, L] in proportion to `weights` [R, L, V], never one of 0. `uniform`: [R, L, 1]."""
    # By blocks, because one running sum would lose a long tail of rare tokens to rounding.
    pad = -weights.shape[-1] % _BLOCK
    blocks = mx.pad(weights, [(0, 0), (0, 0), (0, pad)]).reshape(*weights.shape[:-1], -1, _BLOCK)
    within = mx.cumsum(blocks, axis=-1)
    sums = within[..., -1]
    ends = mx.cumsum(sums, axis=-1)
    target = uniform * mx.where(sums > 0, ends, 0).max(axis=-1, keepdims=True)
    block = _first_past(sums, ends, target)
    start = mx.where(block > 0, mx.take_along_axis(ends, mx.maximum(block - 1, 0), axis=-1), 0)

    def of_block(values: mx.array) -> mx.array:
        return mx.take_along_axis(values, block[..., None], axis=-2).squeeze(-2)

    token = _first_past(of_block(blocks), of_block(within), target - start)
    return (block * _BLOCK + token).squeeze(-1)


def _first_past(weights: mx.array, ends: mx.array, target: mx.array) -> mx.array:
    """Return the first index with weight whose cumulative sum in `ends` is past `target`, int32 [.., 1]; if
    none is, the first index with weight and the largest sum.
    """
    real = weights > 0
    reached = mx.where(real, ends, -1)
    past = real & ((reached > target) | (reached == reached.max(axis=-1, keepdims=True)))
    return mx.argmax(past, axis=-1, keepdims=True).astype(mx.int32)


# --- log-probabilities ----------------------------------------------------------------------------------


def scores(logits: mx.array, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return log-probabilities under raw `logits` [L, V]: of `tokens` [L], float32 [L]; the `top` tokens,
    int32 [L, top], and theirs, float32 [L, top]: most likely first, then lower ids.
    """
    return joined_scores([each[None] for each in scores_of_share(logits, tokens, 0, top)], top)


Shares = tuple[mx.array, mx.array, mx.array, mx.array]


def scores_of_share(logits: mx.array, tokens: mx.array, first: int, top: int) -> Shares:
    """Return one rank's part of `scores`, from its `logits` [.., share] of tokens from `first` on.

    The logarithm of the summed exponentials and the logit of `tokens` (-inf for other ranks' tokens), float32
    [..]; the best `top` tokens (at least one), int32 [.., top], and their logits. NaN counts as -inf.
    """
    logits, share = logits.astype(mx.float32), logits.shape[-1]
    logits = mx.where(mx.isnan(logits), -mx.inf, logits) + 0.0  # without negative zeros
    place, most = tokens - first, min(max(top, 1), share)
    own = mx.take_along_axis(logits, mx.clip(place, 0, share - 1)[..., None], axis=-1)[..., 0]
    own = mx.where((place >= 0) & (place < share), own, -mx.inf)
    best = mx.topk(_order(logits, mx.arange(share)), most, axis=-1)
    ids = (~best.astype(mx.uint32)).astype(mx.int32)
    return mx.logsumexp(logits, axis=-1), own, ids + first, mx.take_along_axis(logits, ids, axis=-1)


def joined_scores(parts: Sequence[mx.array], top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return `scores` of the parts of all ranks, each [ranks, ..]."""
    totals, own, ids, values = parts
    total = mx.logsumexp(totals, axis=0)
    ids, values = (mx.moveaxis(each, 0, -2).reshape(*total.shape, -1) for each in (ids, values))
    order = mx.argsort(_order(values, ids), axis=-1)[..., ::-1][..., :top]
    ids, values = (mx.take_along_axis(each, order, axis=-1) for each in (ids, values))
    return own.max(axis=0) - total, ids, values - total[..., None]


def _order(logits: mx.array, ids: mx.array) -> mx.array:
    bits = logits.view(mx.uint32)
    ascending = mx.where(bits >> 31 == 1, ~bits, bits | 0x80000000)
    return ascending.astype(mx.uint64) << 32 | (~ids.astype(mx.uint32)).astype(mx.uint64)


# --- agreement of all ranks on each token, from the logits that every rank gathered ----------------------
# `verify`: every rank samples the same way; rank 0 compares the digests in Acks before it sends the token.
# `broadcast`: rank 0 samples, and one small sum in the graph carries its choice to all. Only rank 0 knows a
# request's penalties and grammar: they are in its `LogitShaping`.

#: Requested scores by uid: log-probabilities [width], alternatives [width, top], theirs.
Scores = Mapping[int, tuple[mx.array, mx.array, mx.array]]


@dataclass(frozen=True, slots=True)
class Chosen:
    tokens: mx.array  # int32 [rows, width]
    rows: tuple[int, ...]
    widths: tuple[int, ...]  # tokens of each row without padding
    scores: Scores  # on rank 0
    forward: int = 0  # its number
    fed: mx.array | None = None  #: a step's input, int32 [rows, width]
    drafts: mx.array | None = None  #: the MTP head's proposals for each row, int32 [rows, n]
    prompts: Scores = field(default_factory=dict)  #: of the tokens after each of a prompt's


class LogitShaping:
    """Changes to logits, which rank 0 alone makes. This base class, on the other ranks, makes none."""

    def shape(self, uid: int, logits: mx.array) -> mx.array:
        """Return the row's logits [width, V] with penalties, biases and its grammar's mask."""
        return logits

    def chosen(self, uid: int, tokens: mx.array) -> None:
        """Take the row's new tokens, int32 [width], which may not be computed yet."""

    def top(self, uid: int) -> int:
        return -1


class Chooser:
    def __init__(self, group: Group, shaping: LogitShaping, special: tuple[int, ...] = ()) -> None:
        self.group = group
        self._shaping = shaping
        self._special = special
        self._sampler = Sampler(())
        self._samplings: tuple[Sampling, ...] = ()

    def choose(
        self,
        logits: mx.array,
        rows: tuple[int, ...],
        widths: tuple[int, ...],
        samplings: tuple[Sampling, ...],
        at: mx.array,
        *,
        broadcast: bool,
    ) -> tuple[mx.array, Scores]:
        """Return tokens int32 [rows, width] from `logits` [rows, width, V], and the scores by uid.

        `at`, int32 [rows]: the position of each row's first chosen token. With `broadcast`, rank 0 decides;
        other ranks sample, too, so that their graphs depend on the same collectives.
        """
        if samplings != self._samplings:
            self._sampler, self._samplings = Sampler(samplings, self._special), samplings
        own, shaped = self._shaping, logits
        if broadcast:
            shaped = mx.stack([own.shape(uid, logits[i]).astype(mx.float32) for i, uid in enumerate(rows)])
        tokens = self._sampler.choose(shaped, at)
        if broadcast:
            tokens = self.group.agree(tokens)
        found: dict[int, tuple[mx.array, mx.array, mx.array]] = {}
        for i, uid in enumerate(rows):
            if broadcast:
                own.chosen(uid, tokens[i, : widths[i]])
            if (top := own.top(uid)) >= 0:
                found[uid] = scores(logits[i], tokens[i], top)
        return tokens, found
