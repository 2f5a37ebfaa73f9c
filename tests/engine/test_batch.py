"""Rows that decode together against the same sequences one by one, through any course of joins and leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    create_causal_mask,
    make_prompt_cache,
)
from mlx_lm.models.deepseek_v41 import LayerCache
from mlx_lm.utils import load_model

from mlxtp.engine import kv_cache
from mlxtp.engine.batch import (
    Bucket,
    CacheKind,
    Caches,
    ForwardShape,
    MergedBucket,
    MergedCaches,
    SlotCaches,
    arrays_of,
    cut,
    in_parts,
    share,
    snapshot,
)
from mlxtp.engine.loader import leaves
from mlxtp.errors import Code, ModelError
from mlxtp.wire.messages import MAX_WIDTH

from .families import FAMILIES, OTHERS
from .small_models import write_model
from .tables import refused

pytestmark = pytest.mark.slow

MARGIN = 1e-3
"""The most by which other shapes of the same sums may differ; logits here are of the order of 10."""
VOCABULARY = 512
MOST_ROWS = 5


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    root = tmp_path_factory.mktemp("models")

    @cache
    def load(family: str) -> Any:
        return load_model(write_model(root / family, model_type=family, **FAMILIES[family]))[0]

    return load


def some_tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCABULARY) for _ in range(count)]


def prefilled(model: Any, tokens: list[int]) -> Caches:
    caches: Caches = make_prompt_cache(model)
    mx.eval(model(mx.array([tokens]), cache=caches))
    return caches


def forward(kind: CacheKind, batch: SlotCaches, rows: list[list[int]], positions: list[int]) -> mx.array:
    """Logits [rows, width, V] as a runner has them; shorter rows are padded."""
    width = max(map(len, rows))

    def together(
        buckets: Sequence[Bucket | MergedBucket], inputs: list[mx.array], at: tuple[int, ...]
    ) -> list[mx.array]:
        shapes, views = [], []
        for bucket in buckets:
            assert isinstance(bucket, Bucket)
            own, at = at[: len(bucket.rows)], at[len(bucket.rows) :]
            bucket.reserve(max(own) + width)
            view = min(kv_cache.view(max(own) + width), bucket.shape[1])
            rings = kind.rings(bucket.room)
            shapes.append(
                ForwardShape(*ForwardShape.arrays(mx.array(own, dtype=mx.int32), width, view, rings))
            )
            views.append(kind.views(bucket.arrays, shapes[-1]))
            bucket.arrays = []
        logits = kind.model(inputs[0], cache=kind.layers(views, [[]] * len(buckets), shapes))
        for bucket, own_views in zip(buckets, views, strict=True):
            bucket.arrays = [array for layer in own_views for array in layer.arrays]
        return [logits]

    tokens = mx.array([[*row, *[0] * (width - len(row))] for row in rows])
    (every,) = in_parts([batch.every], batch.rows, [tokens], tuple(positions), forward=together)
    mx.async_eval(every, batch.arrays())
    return every


def assert_same(got: mx.array, expected: mx.array, margin: float = MARGIN) -> None:
    """By margin, and the greedy token exactly."""
    np.testing.assert_allclose(np.array(got), np.array(expected), rtol=0, atol=margin)
    if margin == MARGIN:
        assert mx.argmax(got, axis=-1).tolist() == mx.argmax(expected, axis=-1).tolist()


@dataclass
class Course:
    """A SlotCaches, and for each of its rows what the same tokens give in a cache of their own."""

    kind: CacheKind
    random: Random
    tokens: dict[int, list[int]] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """The rows as a plain list has them."""
    rooms: list[int] = field(default_factory=list)
    """Room of every slot since the rows were arranged; empty since a row has joined or outgrown it."""
    alone: dict[int, Caches] = field(default_factory=dict)
    detached: list[tuple[list[int], Caches]] = field(default_factory=list)
    """Caches copied out of the batch, or kept when a row left."""
    uid: int = 0
    least: dict[int, int] = field(default_factory=dict)
    """Tokens to which each row may be rolled back."""
    counts: set[int] = field(default_factory=set)
    buckets: set[int] = field(default_factory=set)
    margin: float = MARGIN

    def __post_init__(self) -> None:
        batch = self.kind.empty_batch()
        assert isinstance(batch, SlotCaches)
        self.batch = batch
        self.model = self.kind.model

    def prefilled(self, tokens: list[int]) -> Caches:
        caches = self.kind.new()
        mx.eval(self.model(mx.array([tokens]), cache=caches))
        return caches

    def join(self) -> None:
        tokens = some_tokens(self.random, self.random.choice((1, 3, 40, 63, 64, 65, 130, 260)))
        if self.detached and self.random.random() < 0.5:
            tokens, caches = self.random.choice(self.detached)
            caches = share(caches, len(tokens))
        else:
            caches = self.prefilled(tokens)
        self.uid += 1
        self.tokens[self.uid] = list(tokens)
        self.order.append(self.uid)
        self.rooms = []
        self.alone[self.uid] = self.prefilled(tokens)
        self.least[self.uid] = 1 if self.kind.can.truncatable else len(tokens)
        self.batch.join(self.uid, caches)

    def leave(self) -> None:
        uid = self.random.choice(self.order)
        tokens = self.tokens.pop(uid)
        lengths = (1, len(tokens) // 2) if self.kind.can.truncatable else (self.least[uid],)
        keep = self.random.choice((0, *lengths, len(tokens)))
        kept = self.batch.leave(uid, keep)
        self.order[self.order.index(uid)] = self.order[-1]
        self.order.pop()
        assert (kept is None) == (keep == 0)
        if kept is not None:
            self.detached.append((tokens[:keep], kept))
        del self.alone[uid]

    def arrange(self) -> None:
        """Put each row into one of three buckets, some with free slots."""
        of = {uid: self.random.randrange(3) for uid in self.order}
        longest = dict.fromkeys(of.values(), 0)
        for uid, label in of.items():
            longest[label] = max(longest[label], len(self.tokens[uid]))
        room = {label: kv_cache.capacity(length) + 32 * label for label, length in longest.items()}
        spare = [self.random.choice(list(room.values())) for _ in range(self.random.choice((0, 0, 1, 3)))]
        self.rooms = [*[room[of[uid]] for uid in self.order], *spare]
        self.batch.arrange(self.rooms)
        self.buckets.add(len(self.batch.every))

    def copy(self) -> None:
        uid = self.random.choice(self.order)
        length = self.random.randint(self.least[uid], len(self.tokens[uid]))
        self.detached.append((self.tokens[uid][:length], self.batch.copy(uid, length)))

    def roll_back(self) -> None:
        uid = self.random.choice(self.order)
        back = self.random.randint(0, min(20, len(self.tokens[uid]) - self.least[uid]))
        self.tokens[uid] = self.tokens[uid][: len(self.tokens[uid]) - back]
        if self.kind.can.truncatable:
            cut(self.alone[uid], len(self.tokens[uid]))
        else:
            self.alone[uid] = self.prefilled(self.tokens[uid])

    def step(self) -> None:
        most = self.random.choice((1, 1, 1, 4, 17))
        fed = [some_tokens(self.random, self.random.randint(1, most)) for _ in self.order]
        logits = forward(self.kind, self.batch, fed, [len(self.tokens[uid]) for uid in self.order])
        for row, uid in enumerate(self.order):
            expected = self.model(mx.array([fed[row]]), cache=self.alone[uid])
            assert_same(logits[row, : len(fed[row])], expected[0], self.margin)
            self.tokens[uid] += fed[row]
            if not self.kind.can.truncatable:
                self.least[uid] = max(self.least[uid], len(self.tokens[uid]) + most - MAX_WIDTH)
        self.counts.add(len(self.order))
        self.rooms = []

    def write_to_a_copy(self) -> None:
        """It goes on by itself; neither its source nor other copies may notice, nor it theirs."""
        tokens, caches = self.random.choice(self.detached)
        mine = share(caches, len(tokens))
        more = some_tokens(self.random, self.random.randint(1, 9))
        got = self.model(mx.array([more]), cache=mine)
        expected = self.model(mx.array([more]), cache=self.prefilled(tokens))
        assert_same(got[0], expected[0], self.margin)

    def check(self) -> None:
        """Assert that every row is in one bucket, and that buckets have the room that was ordered."""
        assert self.batch.rows == self.order
        buckets = self.batch.every
        assert sorted(uid for bucket in buckets for uid in bucket.rows) == sorted(self.order)
        for bucket in buckets:
            held, room = bucket.shape
            sizes = {(held, room), *[(held, slots) for _, slots in self.kind.rings(room)]}
            assert {array.shape[:1] + array.shape[2:3] for array in bucket.arrays} == sizes
            assert 1 <= len(bucket.rows) <= held
            if self.rooms:
                assert self.rooms.count(room) == held

    def play(self, moves: int) -> None:
        self.join()
        for _ in range(moves):
            rows = len(self.order)
            events = [self.step] * 3 + [self.arrange] * 2
            if rows < MOST_ROWS:
                events += [self.join] * (3 if rows < 2 else 1)
            if rows > 1:
                events.append(self.leave)
            events += [self.copy, self.roll_back]
            if self.detached:
                events.append(self.write_to_a_copy)
            self.random.choice(events)()
            self.check()
        assert len(self.counts) > 2, "hardly any batch"
        assert len(self.buckets) > 1, "hardly any buckets"


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_any_course_of_events_gives_every_row_what_it_would_have_alone(
    model_of: Callable[[str], Any], family: str, seed: int
) -> None:
    Course(CacheKind(model_of(family)), Random(seed)).play(90)


@pytest.mark.parametrize("seed", range(2))
def test_any_course_of_events_gives_quantized_rows_what_they_would_have_alone(
    tmp_path: Path, seed: int
) -> None:
    """The last bit of a number may tip one of eight bits."""
    model, _ = load_model(write_model(tmp_path, head_dim=64))
    kind = CacheKind(model, kv_bits=8)
    assert (kind.can.rolls_back, kind.can.batched, kind.can.truncatable, kind.can.copyable) == (True,) * 4
    Course(kind, Random(seed), margin=0.1).play(90)


def test_rows_that_stay_together_are_not_copied(model_of: Callable[[str], Any]) -> None:
    """Else every row that joins would cost a copy of all others."""
    course = Course(CacheKind(model_of("llama")), Random(98))
    for _ in range(3):
        course.join()
    course.batch.arrange([512] * 4)
    mx.eval(course.batch.arrays())
    (before,) = course.batch.every
    course.batch.arrange([512] * 4)
    (after,) = course.batch.every
    assert all(one is other for one, other in zip(before.arrays, after.arrays, strict=True))


@pytest.mark.parametrize("positions", [[0, 3, 70], [64, 64, 64], [127, 0, 1]])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 8, 1000])
def test_masks_are_the_causal_ones(positions: list[int], width: int, window: int | None) -> None:
    view = kv_cache.view(max(positions) + width)
    shape = ForwardShape(*ForwardShape.arrays(mx.array(positions, dtype=mx.int32), width, view))
    mask = shape.mask(window)
    assert mask.shape == (3, 1, width, view)
    for row, position in enumerate(positions):
        expected = create_causal_mask(width, position, window_size=window)
        length = position + width
        assert mx.array_equal(mask[row, 0, :, :length], expected).item()
        assert not mask[row, 0, :, length:].any().item()


@pytest.mark.parametrize("room", [1024, 1280, 1536, 2048])
def test_what_is_kept_of_a_row_alone_has_the_room_that_is_counted(
    model_of: Callable[[str], Any], room: int
) -> None:
    """Rank 0 counts `capacity`; a row may be in arrays of another that was longer, or of a prompt."""
    keys, values = (mx.random.normal((1, 2, room, 16)) for _ in range(2))
    cache = KVCache()
    cache.keys, cache.values, cache.offset = keys, values, 1000
    batch = CacheKind(model_of("llama")).empty_batch()
    batch.join(1, [cache, deepcopy(cache)])
    kept = batch.leave(1, keep=1000)
    assert kept is not None
    assert kept[0].keys.shape[2] == kept[0].values.shape[2] <= kv_cache.capacity(1000)
    assert mx.array_equal(kept[0].keys[:, :, :1000], keys[:, :, :1000])


@pytest.mark.parametrize("width", [1, MAX_WIDTH])
def test_what_wrong_drafts_leave_in_a_ring_is_in_no_window(tmp_path: Path, width: int) -> None:
    """After a step of the most tokens, of which none or the first stands, in a ring without a spare slot."""
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": MAX_WIDTH + 1}
    model, _ = load_model(write_model(tmp_path, attentive=True, **windows))
    kind, random = CacheKind(model), Random(6)
    batch, said = kind.empty_batch(), some_tokens(random, 200)
    assert isinstance(batch, SlotCaches)
    assert kind.rings(1000) == [(MAX_WIDTH + 1, 2 * MAX_WIDTH)]
    batch.join(1, prefilled(model, said))
    for _ in range(3):
        forward(kind, batch, [said[-1:] + some_tokens(random, MAX_WIDTH - 1)], [len(said)])
        more = some_tokens(random, width)
        expected = model(mx.array([[*said, *more]]))[0, len(said) :]
        assert_same(model(mx.array([more]), cache=batch.copy(1, len(said)))[0], expected)
        said.append(said[-1])
        expected = model(mx.array([[*said, *more]]))[0, len(said) :]
        assert_same(forward(kind, batch, [more], [len(said)])[0], expected)
        said += more[:1]


def test_a_layer_may_read_the_ring_of_another(tmp_path: Path) -> None:
    text = {**OTHERS["gemma3n"]["text_config"], "model_type": "gemma3n_text", "sliding_window": 60}
    model, _ = load_model(write_model(tmp_path, model_type="gemma3n", attentive=True, text_config=text))
    kind, random = CacheKind(model), Random(8)
    batch, said = kind.empty_batch(), some_tokens(random, 150)
    assert isinstance(batch, SlotCaches)
    batch.join(1, prefilled(model, said))
    for width in (1, 5, 40):
        fed = some_tokens(random, width)
        got = forward(kind, batch, [fed], [len(said)])
        assert_same(got[0], model(mx.array([fed]), cache=prefilled(model, said))[0])
        said += fed[: width // 2 + 1]


@pytest.mark.parametrize(
    ("family", "seed"), [("gpt_oss", 0), ("exaone_moe", 1), ("qwen3_5", 0), ("qwen3_5", 1), ("llama", 0)]
)
def test_merged_rows_say_what_they_would_say_alone(
    model_of: Callable[[str], Any], family: str, seed: int
) -> None:
    """Rotating and recurrent caches; the windows of 8 tokens are long full."""
    model, random, batch = model_of(family), Random(seed), MergedCaches()
    alone: dict[int, Caches] = {}
    order: list[int] = []
    for uid in range(60):
        move = random.random()
        if not order or (move < 0.25 and len(order) < MOST_ROWS):
            prompt = some_tokens(random, random.choice((1, 2, 7, 8, 9, 25)))
            alone[uid] = prefilled(model, prompt)
            batch.join(uid, prefilled(model, prompt))
            order.append(uid)
        elif move < 0.4:
            leaving = random.choice(order)
            assert batch.leave(leaving, 0) is None
            order[order.index(leaving)] = order[-1]  # the last row takes its place
            order.pop()
        else:
            fed = some_tokens(random, len(order))
            logits = model(mx.array(fed)[:, None], cache=batch.every[0].caches)
            for row, uid_ in enumerate(order):
                assert_same(logits[row, 0], model(mx.array([[fed[row]]]), cache=alone[uid_])[0, 0])
        assert batch.rows == order


EVERY_KIND = (
    *("llama", "gpt_oss", "exaone_moe", "qwen3_5", "deepseek_v32", "iquestloopcoder"),
    *("longcat_flash", "longcat_flash_ngram"),
)
"""Families whose caches are plain, windows, recurrent, lists of plain ones, and mixtures of these."""


def go_on(model: Any, caches: Caches, tokens: list[int]) -> mx.array:
    """Logits [tokens, V] after a chunk, two tokens one by one, and the rest."""
    parts = [tokens[:3], tokens[3:4], tokens[4:5], tokens[5:]]
    return mx.concatenate([model(mx.array([part]), cache=caches)[0] for part in parts])


@pytest.mark.parametrize("copied", [share, snapshot])
@pytest.mark.parametrize("family", EVERY_KIND)
def test_copies_of_every_kind_go_on_by_themselves(
    model_of: Callable[[str], Any], family: str, copied: Callable[[Caches, int], Caches]
) -> None:
    model, random = model_of(family), Random(11)
    for length in (8, 31):
        prompt = some_tokens(random, length)
        source = prefilled(model, prompt)
        copies = [copied(source, length), copied(source, length)]
        copies.append(copied(copies[0], length))
        for caches in (source, *copies):
            more = some_tokens(random, 14)
            assert_same(go_on(model, caches, more), model(mx.array([[*prompt, *more]]))[0, length:])


@pytest.mark.parametrize("family", ["llama", "deepseek_v32", "longcat_flash"])
def test_plain_caches_can_be_cut_also_in_lists(model_of: Callable[[str], Any], family: str) -> None:
    model, random = model_of(family), Random(12)
    prompt, more = some_tokens(random, 40), some_tokens(random, 9)
    for cut_one in (share(prefilled(model, prompt), 17), cut(prefilled(model, prompt), 17)):
        expected = model(mx.array([[*prompt[:17], *more]]))[0, 17:]
        assert_same(go_on(model, cut_one, more), expected)


@pytest.mark.parametrize(
    ("family", "keep"), [("gpt_oss", 26), ("qwen3_5", 26), ("iquestloopcoder", 26), ("llama", 20)]
)
@pytest.mark.parametrize("others", [0, 2])
def test_a_row_is_kept_when_it_leaves(
    model_of: Callable[[str], Any], family: str, keep: int, others: int
) -> None:
    """Plain caches also in part."""
    model, random = model_of(family), Random(13)
    batch, said, more = MergedCaches(), some_tokens(random, 26), some_tokens(random, 9)
    batch.join(1, prefilled(model, said[:21]))
    for other in range(others):
        batch.join(10 + other, prefilled(model, some_tokens(random, 4 + 20 * other)))
    for token in said[21:]:
        mx.eval(model(mx.array([token, *[7] * others])[:, None], cache=batch.every[0].caches))
    kept = batch.leave(1, keep)
    assert kept is not None
    if others:
        mx.eval(model(mx.array([8] * others)[:, None], cache=batch.every[0].caches))
    assert_same(go_on(model, kept, more), model(mx.array([[*said[:keep], *more]]))[0, keep:])


@pytest.mark.parametrize("chunked", [True, False])
def test_the_kinds_of_families_that_no_model_here_has_copy_as_well(chunked: bool) -> None:
    def write(cache: Any, value: float) -> None:
        new = mx.full((1, 1, 3, 4), value)
        if chunked:
            cache.update_and_fetch(new, new)
            cache.maybe_trim_front()
        else:
            cache.update_window(new[:, 0])

    cache: Any = ChunkedKVCache(5) if chunked else LayerCache(5)
    for value in (1.0, 2.0):
        write(cache, value)
    (copy,) = share([cache], 6)
    (before,) = share([cache], 6)
    write(cache, 3.0)
    write(copy, 4.0)
    arrays = [each.keys if chunked else each.window for each in (before, cache, copy)]
    last = [float(array[..., : 5 if i else 6, :].max().item()) for i, array in enumerate(arrays)]
    assert last == [2.0, 3.0, 4.0]
    assert [each.offset for each in (before, cache, copy)] == [6, 9, 9]


@pytest.mark.parametrize("kind", ["plain", "window", "state"])
def test_a_snapshot_holds_no_memory_of_its_source(kind: str) -> None:
    chunk = mx.zeros((1, 1, 1 << 20, 1))
    mx.eval(chunk)
    held, own = mx.get_active_memory(), chunk[..., -8:, :]
    cache: Any = {"plain": KVCache(), "window": RotatingKVCache(8), "state": ArraysCache(1)}[kind]
    states = {"plain": (own, own, 8), "window": (own, own, 8, 0, 8, 8), "state": ([own], None, None)}
    cache.state = states[kind]
    (copy,) = snapshot([cache], 8)
    mx.eval(arrays_of([copy]))
    del chunk, own, cache, states
    assert mx.get_active_memory() < held - (1 << 21)


def test_a_window_keeps_no_tokens_before_it(model_of: Callable[[str], Any]) -> None:
    """A chunk leaves them there until the next token."""
    caches = prefilled(model_of("gpt_oss"), some_tokens(Random(14), 50))
    assert {each.keys.shape[2] for each in leaves(snapshot(caches, 50))} == {8, 50}
    assert {each.keys.shape[2] for each in caches} == {50, 256}


def test_a_model_whose_rotation_takes_one_position_serves_one_row_at_a_time(tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "factor": 2.0}
    model, _ = load_model(write_model(tmp_path, rope_scaling=scaling, max_position_embeddings=16))
    (rope,) = {type(each): each for each in model.modules() if "RoPE" in type(each).__name__}.values()
    with pytest.raises((TypeError, ValueError)):
        rope(mx.zeros((2, 1, 1, 8)), offset=mx.array([1, 2]))
    kind = CacheKind(model)
    assert (kind.can.rolls_back, kind.can.batched, kind.can.copyable) == (False, False, True)


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt_oss", r"this model's caches \(.*Cache.*\)"),
        ("qwen3_5", r"this model's caches \(.*Cache.*\)"),
        ("llama", ".* 16"),  # numbers of a head's keys; they are quantized in groups of at least 32
    ],
)
def test_caches_that_cannot_be_quantized_are_refused_by_name(
    model_of: Callable[[str], Any], family: str, why: str
) -> None:
    with refused(ModelError, Code.MODEL_UNSUPPORTED, f"--kv-bits 8: {why}"):
        CacheKind(model_of(family), kv_bits=8)


def test_a_model_that_cannot_read_quantized_caches_is_refused(tmp_path: Path) -> None:
    """Latent attention multiplies with its cache itself."""
    fields = {**FAMILIES["deepseek_v3"], "qk_rope_head_dim": 64, "kv_lora_rank": 64}
    model, _ = load_model(write_model(tmp_path, model_type="deepseek_v3", **fields))
    with refused(ModelError, Code.MODEL_UNSUPPORTED, "--kv-bits 8: this model's attention cannot read"):
        CacheKind(model, kv_bits=8)
