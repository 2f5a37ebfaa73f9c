"""Models with recurrent states on one rank: right and wrong drafts, against text without any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from random import Random
from sys import modules

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.ssm import ssm_update
from mlx_lm.utils import load_model

from mlxtp.engine.batch import CacheKind
from mlxtp.engine.recurrent import _MAMBA, STATE, recurrent_layers, states_of, views_of
from mlxtp.engine.runner import Runner
from mlxtp.errors import GroupError
from mlxtp.wire.messages import Forward

from ..reference import reference
from ..wire.forwards import of_prompt
from .families import FAMILIES, PIPELINE
from .small_models import remember, write_model
from .test_runner import active_bytes, runner_of

pytestmark = pytest.mark.fault

LENGTH = 60
KINDS = (
    *("bailing_moe_v3", "falcon_h1", "granitemoehybrid", "jamba", "kimi_linear", "lfm2", "lfm2_moe"),
    *("nemotron_h", "olmo_hybrid", "qwen3_5"),
)
"""Families that go back, one for each of mlx-lm's classes of recurrent layers."""
OLMO = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
    "attention_bias": False,
}
SIZES = {**PIPELINE, **FAMILIES, "olmo_hybrid": OLMO}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            path = tmp_path_factory.mktemp("models") / family
            fields = {**SIZES[family], "eos_token_id": []}
            made[family] = remember(write_model(path, model_type=family, attentive=True, **fields))
        return made[family]

    return folder


class Course:
    """Rows whose texts are known beforehand, with drafts that are right up to a random place."""

    def __init__(self, folder: Path, seed: int = 0, *, compiled: bool = False) -> None:
        self.random = Random(seed)
        self.runner: Runner = runner_of(folder, compiled=compiled)
        self.texts: dict[int, tuple[int, ...]] = {}  # whole ones, by uid
        self.known: dict[int, int] = {}  # tokens so far of those that run, in row order
        self._folder = folder

    def begin(self, uid: int, prompt: Sequence[int], source: int = 0, offset: int = 0) -> None:
        self.texts[uid] = (*prompt, *reference(prompt, LENGTH, self._folder))
        rest = tuple(prompt[offset:])
        chosen = self.runner.run(of_prompt(uid, offset, len(prompt), rest, source=source))
        assert chosen.tokens.item() == self.texts[uid][len(prompt)]
        self.known[uid] = len(prompt) + 1

    def step(self) -> None:
        feeds = {}
        for uid, known in self.known.items():
            right = self.texts[uid][known : known + self.random.choice((0, 0, 1, 3, 6))]
            wrong_from = self.random.randrange(len(right) + 1)
            wrong = [(token + 1) % 500 for token in right[wrong_from:]]
            feeds[uid] = (self.texts[uid][known - 1], *right[:wrong_from], *wrong)
        chosen = self.runner.run(
            Forward(
                tuple(feeds),
                tuple(known - 1 for known in self.known.values()),
                tuple(map(len, feeds.values())),
                tuple(token for feed in feeds.values() for token in feed),
            )
        )
        for uid, row in zip(feeds, chosen.tokens.tolist(), strict=True):
            drafts = feeds[uid][1:]
            count = next((i for i, draft in enumerate(drafts) if draft != row[i]), len(drafts)) + 1
            known = self.known[uid]
            assert tuple(row[:count]) == self.texts[uid][known : known + count]
            self.known[uid] += count

    def held(self, uid: int) -> tuple[int, ...]:
        """Return the tokens that a row's caches have."""
        return self.texts[uid][: self.known[uid] - 1]

    def stop(self, uid: int, *, keep: bool) -> tuple[int, ...]:
        """Return the tokens that are kept."""
        held = self.held(uid)
        self.runner.stop(uid, len(held) if keep else 0)
        order = list(self.known)
        order[order.index(uid)] = order[-1]
        order.pop()
        self.known = {other: self.known[other] for other in order if other != uid}
        return held if keep else ()


@pytest.mark.parametrize(
    ("family", "seed"),
    [
        *((name, 0) for name in ("qwen3_5", "nemotron_h", "lfm2")),
        *(pytest.param(name, 1, marks=pytest.mark.chaos) for name in (*KINDS, "qwen3_5_moe", "qwen3_next")),
        *(pytest.param(name, 2, marks=pytest.mark.chaos) for name in (*KINDS, "qwen3_next")),
    ],
)
def test_rows_with_right_and_wrong_drafts_say_what_they_say_without(
    folder_of: Callable[[str], Path], family: str, seed: int
) -> None:
    """They come, go, are kept, copied, started from and laid out elsewhere, also behind wrong drafts."""
    course, uid = Course(folder_of(family), seed, compiled=True), 0
    random, kept = course.random, dict[int, tuple[int, ...]]()
    for _ in range(45):
        over = [each for each, known in course.known.items() if known > len(course.texts[each]) - 8]
        if len(course.known) < 4 and (not course.known or random.random() < 0.4):
            uid += 1
            prompt, source = tuple(random.randrange(6, 500) for _ in range(random.choice((3, 40)))), 0
            held = kept | {other: course.held(other) for other in course.known}
            if held and random.random() < 0.6:
                source = random.choice(list(held))
                prompt = (*held[source], *prompt)
            course.begin(uid, prompt, source, len(held.get(source, ())))
        elif over or (course.known and random.random() < 0.15):
            leaving = random.choice(over or list(course.known))
            if tokens := course.stop(leaving, keep=random.random() < 0.7):
                kept[leaving] = tokens
        elif random.random() < 0.2:
            course.runner.arrange(tuple(random.choice((192, 256)) for _ in course.known))
        else:
            course.step()
    assert uid > 4
    assert kept


@pytest.mark.parametrize("family", KINDS)
def test_a_layer_goes_back_to_any_token_of_a_step(folder_of: Callable[[str], Path], family: str) -> None:
    """Rows of which no draft stands, some stand, and all; the first keeps its state bit for bit."""
    model, _ = load_model(folder_of(family))
    caches = CacheKind(model)
    kind, layer = caches.recurrence, caches._recurrent[0]
    assert kind is not None
    masked = {"mask": None} if "mask" in signature(type(layer).__call__).parameters else {}
    tokens = mx.random.normal((4, 12, 64), key=mx.random.key(1))
    plain, found = ArraysCache(kind.size), ArraysCache(kind.size)
    layer(tokens[:, :6], cache=plain, **masked)
    begun = [mx.array(array) for array in plain.cache]
    states = states_of(kind, [plain], 6)
    states.held = [6] * 4
    (view,) = views_of(kind, states.kept)
    layer(tokens[:, 6:10], cache=view, **masked)
    states.fed([6] * 4, 4, [view.kept])
    for row, stood in enumerate((0, 1, 3, 4)):
        states.rows([row]).fill([found], [layer], 6 + stood)
        expected = [array[row : row + 1] for array in begun]
        if stood:
            alone = ArraysCache(kind.size)
            alone.cache = expected
            for at in range(6, 6 + stood):
                layer(tokens[row : row + 1, at : at + 1], cache=alone, **masked)
            expected = alone.cache
        within = 1e-5 if stood else 0.0
        assert all(
            mx.allclose(a, b, rtol=within, atol=within) for a, b in zip(found.cache, expected, strict=True)
        )


def test_what_stands_is_fed_again_with_the_bits_of_plain_steps() -> None:
    """By mlx-lm's recurrence of Mamba 2, whose scan of several tokens has other bits."""
    shapes = {"hidden_states": (2, 5, 4, 16), "B": (2, 5, 2, 16), "C": (2, 5, 2, 16), "dt": (2, 5, 4)}
    each = {name: mx.random.normal(shape, key=mx.random.key(1)) for name, shape in shapes.items()}
    layer = {"A_log": mx.zeros(4), "D": mx.ones(4), "dt_bias": mx.zeros(4), "time_step_limit": (0.001, 100.0)}
    state = begun = mx.random.normal((2, 4, 16, 16), key=mx.random.key(2))
    results = []
    for at in range(5):
        own = {name: array[:, at : at + 1] for name, array in each.items()}
        found, after = ssm_update(**own, **layer, state=state)
        state = mx.concatenate([after[:1], begun[1:]]) if at < 3 else state
        results.append(found[:1])
    given = {**each, **layer, "state": begun}
    stands = mx.arange(5) < mx.array([[3], [0]])
    assert mx.array_equal(_MAMBA.run(ssm_update, given, stands)[1], state)
    assert mx.array_equal(_MAMBA.run(ssm_update, given)[0][:1, :3], mx.concatenate(results[:3], axis=1))


@pytest.mark.parametrize(
    "family", ["qwen3_5", *(pytest.param(name, marks=pytest.mark.chaos) for name in KINDS[:-1])]
)
def test_a_row_is_kept_as_it_was_before_its_drafts_or_behind_any_of_them(
    folder_of: Callable[[str], Path], family: str
) -> None:
    for stood in range(5):
        course = Course(folder_of(family))
        course.begin(1, (7, 8, 9))
        text = course.texts[1]
        course.runner.run(Forward((1,), (3,), (4,), text[3:7]))  # the rest are in flight
        if stood == 4:
            text = (*text[:7], 1)
        course.runner.stop(1, 3 + stood)
        course.begin(2, (*text[: 3 + stood], 99), 1, 3 + stood)
    course.runner.run(Forward((2,), (8,), (4,), (1, 2, 3, 4)))
    with pytest.raises(GroupError, match="7 tokens to keep, but this rank holds 12, not to be cut"):
        course.runner.stop(2, 7)


def test_what_waits_is_little_beside_a_state(folder_of: Callable[[str], Path]) -> None:
    course = Course(folder_of("qwen3_5"))
    course.begin(1, (7, 8, 9))
    before = course.runner.kv_bytes()
    course.runner.run(Forward((1,), (3,), (4,), course.texts[1][3:7]))
    assert 0 < course.runner.kv_bytes() - before < before / 4
    course.runner.run(Forward((1,), (7,), (1,), course.texts[1][7:8]))
    assert course.runner.kv_bytes() == before


def test_a_copy_holds_no_more_than_is_counted(folder_of: Callable[[str], Path]) -> None:
    """mlx-lm cuts the last inputs of a convolution out of those of a whole chunk, which they keep alive."""
    runner = runner_of(folder_of("lfm2"))
    runner.run(of_prompt(1, 0, 1001, (7,) * 1000, save=9))
    runner.run(of_prompt(1, 1000, 1001, (7,))).tokens.item()
    runner.stop(1, 0)
    counted, held = runner.kept.size_bytes, active_bytes()
    runner.evict((9,))
    assert counted <= held - active_bytes() < 1.1 * counted


def test_states_of_other_layers_are_left_to_mlx_lm(tmp_path: Path) -> None:
    fields = PIPELINE["bailing_moe_linear"]
    model, _ = load_model(write_model(tmp_path, model_type="bailing_moe_linear", **fields))
    kind = CacheKind(model)
    assert recurrent_layers(model, 2) == (None, [])
    assert not kind.can.rolls_back


@pytest.mark.parametrize("family", ["jamba", "qwen3_5"])
def test_other_models_of_the_family_run_mlx_lm_s_own_code(
    folder_of: Callable[[str], Path], family: str
) -> None:
    """A method of the class, and a function of its module."""
    model, _ = load_model(folder_of(family))
    states = [cache for cache in model.make_cache() if type(cache).__name__ == STATE]
    (layer, *_) = recurrent_layers(model, len(states))[1]
    other, _ = load_model(folder_of(family))
    (own, *_) = [part for part in other.modules() if type(part).__name__ == type(layer).__name__]
    assert isinstance(layer, type(own))
    assert not hasattr(own, "takes_views")
    assert vars(type(own))["__call__"].__globals__ is vars(modules[type(own).__module__])
    assert not hasattr(vars(type(own))["__call__"], "__wrapped__")
