"""Choosing tokens: filters against mlx-lm's, draws against their distribution, penalties against NumPy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm import sample_utils as theirs

from mlxtp.engine.logit_shaping import Shaper
from mlxtp.engine.sampler import Sampler, draw, scores, stream_keys, uniforms
from mlxtp.wire.messages import Sampling, Shaping

pytestmark = pytest.mark.fault

VOCABULARY = 512
LARGE_VOCABULARY = 131072


@pytest.fixture(autouse=True, scope="module")
def nothing_is_compiled() -> Iterator[None]:
    """mlx-lm compiles its filters; on a CPU that calls a C++ compiler for every new constant."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def random_logits(seed: int, *shape: int, spread: float = 3.0) -> mx.array:
    return mx.array((np.random.default_rng(seed).standard_normal(shape) * spread).astype(np.float32))


def positions(rows: int, columns: int = 1, first: int = 0) -> mx.array:
    return mx.arange(first, first + rows * columns, dtype=mx.int32).reshape(rows, columns)


def threefry(key: Sequence[int], counter: Sequence[int]) -> tuple[int, int]:
    """Threefry-2x32-20 on plain integers, as its authors define it."""
    word = 0xFFFFFFFF
    keys = (key[0], key[1], 0x1BD11BDA ^ key[0] ^ key[1])
    x, y = (counter[0] + keys[0]) & word, (counter[1] + keys[1]) & word
    for round_ in range(20):
        by = (13, 15, 26, 6, 17, 29, 16, 24)[round_ % 8]
        x = (x + y) & word
        y = ((y << by | y >> (32 - by)) & word) ^ x
        if round_ % 4 == 3:
            step = round_ // 4 + 1
            x, y = (x + keys[step % 3]) & word, (y + keys[(step + 1) % 3] + step) & word
    return x, y


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_known_answers(counter: tuple[int, int], key: tuple[int, int], answer: tuple[int, int]) -> None:
    """The vectors that Random123 publishes for threefry2x32 with 20 rounds."""
    assert threefry(key, counter) == answer


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**24)), min_size=1, max_size=5))
@settings(max_examples=30)
def test_numbers_are_threefry_of_seed_and_position(pairs: list[tuple[int, int]]) -> None:
    got = uniforms(stream_keys([s for s, _ in pairs]), mx.array([[p] for _, p in pairs], dtype=mx.int32))
    for row, (seed, position) in enumerate(pairs):
        key = threefry((seed & 0xFFFFFFFF, seed >> 32), (0, 1))
        words = threefry(((key[0] + position) & 0xFFFFFFFF, key[1]), (0, 1))
        assert got[row, 0].tolist() == [(word >> 8) * 2.0**-24 for word in words]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Standard deviations above what chance would give (Wilson and Hilferty)."""
    degrees = len(counts) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * degrees)
    return float(((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


FILTERS = st.builds(
    Sampling,
    temperature=st.just(1.0),
    top_p=st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 5, 40, VOCABULARY - 1]),
    min_p=st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]),
    xtc_probability=st.sampled_from([0.0, 0.5, 1.0]),
    xtc_threshold=st.sampled_from([0.0, 0.05, 0.1, 0.5]),
)
SPECIAL = (3, 17)


def mlx_lm_filtered(logits: mx.array, row: Sampling, *, coin: bool) -> mx.array:
    """Return what mlx-lm's chain leaves of `logits` [V], with XTC applied if the `coin` says so."""
    x = (logits - mx.logsumexp(logits, keepdims=True))[None]
    if 0 < row.top_p < 1:
        x = theirs.apply_top_p(x, row.top_p)
    if row.min_p:
        x = theirs.apply_min_p(x, row.min_p)
    if row.xtc_probability and coin:
        x = theirs.apply_xtc(x, 1.0, row.xtc_threshold, list(SPECIAL))
    if row.top_k:
        x = theirs.apply_top_k(x, row.top_k)
    return x[0]


@given(rows=st.lists(FILTERS, min_size=1, max_size=4), seed=st.integers(0, 10**6), coin=st.booleans())
@settings(max_examples=60)
def test_what_survives_is_what_survives_in_mlx_lm(rows: list[Sampling], seed: int, coin: bool) -> None:
    """The same tokens with the same log-probabilities, each row by its own settings."""
    logits = random_logits(seed, len(rows), 2, VOCABULARY)
    coins = mx.full((len(rows), 2, 1), 0.0 if coin else 0.9999)
    kept = Sampler(tuple(rows), SPECIAL).filter(logits, coins)
    for i, row in enumerate(rows):
        applies = coin or row.xtc_probability == 1.0
        for column in range(2):
            expected = np.array(mlx_lm_filtered(logits[i, column], row, coin=applies))
            np.testing.assert_array_equal(np.array(kept[i, column]), expected)


@pytest.mark.parametrize(
    "row", [Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=50), Sampling(1.0, min_p=0.05)]
)
def test_filters_of_a_large_vocabulary(row: Sampling) -> None:
    logits = random_logits(1, 1, 1, LARGE_VOCABULARY)
    kept = np.array(Sampler((row,)).filter(logits, mx.ones((1, 1, 1))))[0, 0]
    expected = np.array(mlx_lm_filtered(logits[0, 0], row, coin=False))
    np.testing.assert_array_equal(kept, expected)
    assert 0 < np.isfinite(kept).sum() < LARGE_VOCABULARY


def test_equals_at_the_edge_of_top_k_go_to_the_lower_ids_with_any_rows_beside() -> None:
    logits = mx.array([[[0.0, 2.0, 1.0, 1.0, 1.0, -1.0]]])
    alone = Sampler((Sampling(1.0, top_k=3),)).filter(logits, mx.ones((1, 1, 1)))
    assert np.isfinite(np.array(alone))[0, 0].tolist() == [False, True, True, True, False, False]
    others = (Sampling(1.0, top_k=3), Sampling(1.0, top_k=5), Sampling(1.0))
    beside = Sampler(others).filter(mx.repeat(logits, 3, axis=0), mx.ones((3, 1, 1)))
    assert beside[0].tolist() == alone[0].tolist()
    assert np.isfinite(np.array(beside)).sum(axis=-1).ravel().tolist() == [3, 5, 6]


def test_a_top_k_larger_than_the_vocabulary_keeps_all() -> None:
    kept = Sampler((Sampling(1.0, top_k=10**9), Sampling(1.0))).filter(
        random_logits(0, 2, 1, 8), mx.ones((2, 1, 1))
    )
    assert np.isfinite(np.array(kept)).all()


def test_greedy_rows_take_the_most_likely_and_the_lowest_among_equals() -> None:
    logits = mx.array([[[0.0, 5.0, 5.0, 1.0]], [[9.0, 1.0, 9.0, 9.0]]])
    sampler = Sampler((Sampling(), Sampling(top_p=0.5, top_k=1)))
    chosen = sampler.choose(logits, mx.array([3, 4]))
    assert sampler.greedy
    assert chosen.dtype == mx.int32
    assert chosen.tolist() == [[1], [0]]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_greedy_rows_of_a_mixed_batch_are_greedy(dtype: mx.Dtype) -> None:
    logits = random_logits(2, 3, 4, VOCABULARY).astype(dtype)
    rows = (Sampling(), Sampling(2.0, seed=1), Sampling())
    chosen = Sampler(rows).choose(logits, mx.array([0, 5, 9]))
    expected = mx.argmax(logits, axis=-1)
    assert chosen.shape == (3, 4)
    assert chosen[0].tolist() == expected[0].tolist()
    assert chosen[2].tolist() == expected[2].tolist()
    assert chosen[1].tolist() != expected[1].tolist()


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20), FILTERS, st.integers(0, 3))
@settings(max_examples=30)
def test_a_draw_does_not_depend_on_what_else_runs(
    seed: int, position: int, row: Sampling, place: int
) -> None:
    """Same seed, position, settings and logits: same token, in any row, beside any others, at any column."""
    row = Sampling(0.8, row.top_p, row.top_k, row.min_p, row.xtc_probability, row.xtc_threshold, seed)
    logits = random_logits(position, 1, 1, VOCABULARY)
    alone = Sampler((row,)).choose(logits, mx.array([position])).item()
    rows = [Sampling(1.5, top_k=7, seed=1), Sampling(), Sampling(0.3, top_p=0.4, xtc_probability=0.5, seed=2)]
    rows.insert(place, row)
    batch = random_logits(1, 4, 3, VOCABULARY)
    batch[place, 2] = logits[0, 0]
    start = mx.array([position - 2 if i == place else 50 for i in range(4)])
    assert Sampler(tuple(rows)).choose(batch, start)[place, 2].item() == alone


def test_nothing_is_evaluated_before_it_is_asked_for() -> None:
    """While MLX traces a function nothing can be evaluated."""
    sampler = Sampler((Sampling(), Sampling(0.7, 0.9, 20, 0.01, 0.5, 0.1, 3)))
    shaper = Shaper(Shaping(1.2, 0.5, 0.5, (1,), (2.0,), 3), (1, 2), VOCABULARY, (0,))

    def step(logits: mx.array, at: mx.array) -> tuple[mx.array, ...]:
        tokens = sampler.choose(logits, at)
        shaper.advance(tokens[0, :1])
        return tokens, shaper.apply(logits[0], generated=1, mask=None), *scores(logits[0], tokens[0], 2)

    logits, at = random_logits(5, 2, 2, VOCABULARY), mx.array([1, 2])
    mx.enable_compile()
    try:
        assert [out.shape for out in mx.compile(step)(logits, at)] == [(2, 2), (2, 512), (2,), (2, 2), (2, 2)]
        with pytest.raises(ValueError, match="eval"):
            mx.compile(lambda logits: mx.array(logits.tolist()))(logits)
    finally:
        mx.disable_compile()


@pytest.mark.parametrize("temperature", [1e-40, 1e-9, 1e-3])
def test_a_temperature_near_zero_is_greedy(temperature: float) -> None:
    logits = random_logits(6, 20, 1, VOCABULARY)
    rows = tuple(Sampling(temperature, seed=i) for i in range(20))
    chosen = Sampler(rows).choose(logits, mx.zeros((20,), dtype=mx.int32))
    assert chosen.tolist() == mx.argmax(logits, axis=-1).tolist()


def drawn(row: Sampling, logits: mx.array, count: int) -> Counter[int]:
    """Tokens drawn at `count` consecutive positions from the same logits [V]."""
    found: Counter[int] = Counter()
    for start in range(0, count, 2_000):
        repeated = mx.broadcast_to(logits, (1, 2_000, logits.size))
        found.update(Sampler((row,)).choose(repeated, mx.array([start]))[0].tolist())
    return found


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(Sampling(1.0, seed=1), marks=pytest.mark.chaos),
        Sampling(0.5, seed=2),
        Sampling(1.7, top_p=0.9, seed=3),
        pytest.param(Sampling(1.0, top_k=20, seed=4), marks=pytest.mark.chaos),
        Sampling(0.8, min_p=0.05, top_p=0.95, top_k=50, seed=5),
        Sampling(1.0, xtc_probability=1.0, xtc_threshold=0.02, seed=6),
    ],
)
def test_draws_follow_the_filtered_distribution(row: Sampling) -> None:
    logits = random_logits(8, VOCABULARY, spread=2.0)
    count = 20_000
    kept = np.array(Sampler((row,)).filter(logits[None, None], mx.zeros((1, 1, 1))), dtype=np.float64)[0, 0]
    weights = np.exp((kept - kept.max()) / row.temperature)
    expected = weights / weights.sum() * count
    found = drawn(row, logits, count)
    assert set(found) <= set(np.flatnonzero(weights))
    counts = np.array([found[token] for token in range(VOCABULARY)])
    common = expected >= 10
    counts = np.append(counts[common], counts[~common].sum() + 10)
    assert chi_square(counts, np.append(expected[common], expected[~common].sum() + 10)) < 4


def test_the_xtc_coin_falls_as_often_as_asked_and_on_its_own() -> None:
    """Two tokens of 0.5 and 0.4 and a threshold of 0.3: XTC takes out the first."""
    logits = mx.log(mx.array([0.5, 0.4, 0.1]))
    count = 20_000
    found = drawn(Sampling(1.0, xtc_probability=0.25, xtc_threshold=0.3, seed=9), logits, count)
    shares = np.array([0.75 * 0.5, 0.75 * 0.4 + 0.25 * 0.8, 0.75 * 0.1 + 0.25 * 0.2])
    assert chi_square(np.array([found[0], found[1], found[2]]), shares * count) < 4


WEIGHTS = st.lists(
    st.one_of(st.just(0.0), st.floats(2.0**-120, 1.0, width=32), st.floats(0.125, 1.0, width=32)),
    min_size=1,
    max_size=700,
)


@given(WEIGHTS.filter(any), st.one_of(st.sampled_from([0.0, 1 - 2.0**-24]), st.integers(0, 2**24 - 1)))
@settings(max_examples=200)
def test_what_has_no_weight_is_never_drawn(weights: list[float], number: float) -> None:
    uniform = number * 2.0**-24 if isinstance(number, int) else number
    token = draw(mx.array(weights)[None, None], mx.full((1, 1, 1), uniform)).item()
    assert token < len(weights)
    assert weights[token] > 0


@pytest.mark.parametrize("seed", range(4))
def test_a_large_vocabulary_neither_runs_past_the_end_nor_into_the_filtered(seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.random(LARGE_VOCABULARY).astype(np.float32)
    weights[rng.random(LARGE_VOCABULARY) < (0.0, 0.5, 0.99, 0.9999)[seed]] = 0
    weights[-300:] = 0
    numbers = np.concatenate([[0.0, 1 - 2.0**-24], rng.integers(0, 2**24, 30) * 2.0**-24]).astype(np.float32)
    repeated = mx.broadcast_to(mx.array(weights), (1, len(numbers), LARGE_VOCABULARY))
    tokens = np.array(draw(repeated, mx.array(numbers)[None, :, None]))[0]
    real = np.flatnonzero(weights)
    assert (weights[tokens] > 0).all()
    assert tokens[0] == real[0]
    assert tokens[1] in real[-3:]
    # A draw is where it would be with exact sums, but for float32's own rounding.
    exact = np.cumsum(weights.astype(np.float64))
    error = np.abs(exact[tokens] - numbers * exact[-1])
    assert (error <= 1.0 + exact[-1] * 2.0**-20).all()


def test_a_long_tail_of_rare_tokens_keeps_its_share() -> None:
    """A running float32 sum would not notice any of them after the first token's weight of 1."""
    weights = np.full(LARGE_VOCABULARY, 1e-8, dtype=np.float32)
    weights[0] = 1.0
    tail = weights[1:].sum(dtype=np.float64)
    for share, place in ((0.25, 0.25), (0.5, 0.5), (0.9, 0.9)):
        number = (1 + share * tail) / (1 + tail)
        token = draw(mx.array(weights)[None, None], mx.full((1, 1, 1), number)).item()
        assert token / LARGE_VOCABULARY == pytest.approx(place, abs=0.02)


def reference(
    logits: np.ndarray, shaping: Shaping, prompt: Sequence[int], answer: Sequence[int], eos: Sequence[int]
) -> np.ndarray:
    """One column, token by token."""
    out = logits.astype(np.float32).copy()
    for token, value in zip(shaping.bias_tokens, shaping.bias_values, strict=True):
        out[token] += np.float32(value)
    penalty = np.float32(shaping.repetition_penalty)
    for token in {*prompt, *answer}:
        out[token] = out[token] / penalty if out[token] >= 0 else out[token] * penalty
    for token, count in Counter(answer).items():
        out[token] -= np.float32(shaping.presence_penalty)
        out[token] -= np.float32(shaping.frequency_penalty) * np.float32(count)
    if len(answer) < shaping.min_tokens:
        out[list(eos)] = -np.inf
    return out


TOKENS = st.integers(0, 31)
SHAPINGS = st.builds(
    Shaping,
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.4]),
    bias_tokens=st.just((2, 5)),
    bias_values=st.tuples(st.sampled_from([0.0, -100.0, 4.0]), st.just(1.5)),
    min_tokens=st.integers(0, 6),
)


@given(
    SHAPINGS,
    st.lists(TOKENS, max_size=10),
    st.lists(TOKENS, max_size=8),
    st.lists(TOKENS, max_size=4),
    st.integers(0, 100),
)
@settings(max_examples=60)
def test_shaping_is_what_plain_code_says(
    shaping: Shaping, prompt: list[int], answer: list[int], ahead: list[int], seed: int
) -> None:
    """Every column as if the tokens ahead of it had been chosen; they leave no trace."""
    eos = (0, 31)
    shaper = Shaper(shaping, prompt, 32, eos)
    for token in answer:
        shaper.advance(mx.array([token]))
    logits = random_logits(seed, len(ahead) + 1, 32)
    got = np.array(shaper.apply(logits, generated=len(answer), mask=None, ahead=ahead))
    for column in range(len(ahead) + 1):
        expected = reference(np.array(logits[column]), shaping, prompt, answer + ahead[:column], eos)
        np.testing.assert_allclose(got[column], expected, rtol=1e-6, atol=1e-6)
    again = np.array(shaper.apply(logits[:1], generated=len(answer), mask=None))
    np.testing.assert_array_equal(again[0], got[0])


def allowed(*tokens: int) -> np.ndarray:
    mask = np.zeros(8, dtype=bool)
    mask[list(tokens)] = True
    return mask


def finite(logits: mx.array) -> list[list[int]]:
    return [np.flatnonzero(row).tolist() for row in np.isfinite(np.array(logits))]


def test_the_mask_has_the_last_word() -> None:
    shaper = Shaper(Shaping(bias_tokens=(1,), bias_values=(1000.0,)), (), 8, (7,))
    logits = mx.zeros((2, 8))
    assert finite(shaper.apply(logits, generated=0, mask=allowed(2, 3))) == [[2, 3], [2, 3]]
    each = np.stack([allowed(2), allowed(1, 4)])
    assert finite(shaper.apply(logits, generated=0, mask=each)) == [[2], [1, 4]]


def test_no_end_before_the_least_number_of_tokens() -> None:
    shaper = Shaper(Shaping(min_tokens=2), (), 8, (6, 7, 9))
    got = shaper.apply(mx.zeros((3, 8)), generated=0, mask=None)
    assert finite(got) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5], list(range(8))]
    assert finite(shaper.apply(mx.zeros((1, 8)), generated=2, mask=None)) == [list(range(8))]
    assert finite(shaper.apply(mx.zeros((1, 8)), generated=0, mask=allowed(5, 7))) == [[5]]


def test_an_end_that_is_all_the_grammar_allows_comes_early() -> None:
    shaper = Shaper(Shaping(min_tokens=9), (), 8, (6, 7))
    assert finite(shaper.apply(mx.zeros((1, 8)), generated=0, mask=allowed(7))) == [[7]]


def test_bias_and_ends_outside_the_vocabulary_are_ignored() -> None:
    shaper = Shaper(Shaping(bias_tokens=(99,), bias_values=(5.0,), min_tokens=1), (), 8, (99,))
    assert shaper.apply(mx.zeros((1, 8)), generated=0, mask=None).tolist() == [[0.0] * 8]


@pytest.mark.parametrize("top", [0, 1, 5])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_scores_are_log_softmax_of_the_raw_logits(top: int, dtype: mx.Dtype) -> None:
    logits = random_logits(14, 3, VOCABULARY).astype(dtype)
    tokens = mx.array([0, 100, 511], dtype=mx.int32)
    chosen, top_tokens, top_logprobs = scores(logits, tokens, top)
    exact = np.array(logits.astype(mx.float32), dtype=np.float64)
    exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(np.array(chosen), exact[range(3), [0, 100, 511]], atol=1e-5)
    expected = np.argsort(-exact, axis=-1, kind="stable")[:, :top]
    assert top_tokens.dtype == mx.int32
    assert top_tokens.tolist() == expected.tolist()
    assert top_logprobs.shape == (3, top)
    np.testing.assert_allclose(np.array(top_logprobs), np.take_along_axis(exact, expected, -1), atol=1e-5)


def test_more_scores_than_tokens_are_all_there_are() -> None:
    assert scores(mx.zeros((1, 3)), mx.array([1]), 20)[1].tolist() == [[0, 1, 2]]


def test_among_equals_the_lower_id_comes_first_and_impossible_ones_last() -> None:
    logits = mx.array([[0.0, -mx.inf, 1.0, 0.0, 1.0, -mx.inf]])
    _, tokens, logprobs = scores(logits, mx.array([0]), 6)
    assert tokens.tolist() == [[2, 4, 0, 3, 1, 5]]
    assert logprobs[0, 4:].tolist() == [-np.inf, -np.inf]
