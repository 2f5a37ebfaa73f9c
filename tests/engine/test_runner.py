"""One rank's runner driven by frames, in one process: what it counts, keeps and refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, cast

import mlx.core as mx
import pytest

from mlxtp.engine import forwards
from mlxtp.engine.batch import CacheKind, arrays_of
from mlxtp.engine.forwards import STEPS_BEFORE_TRACE, DecodeGraphs
from mlxtp.engine.group import CollectiveCounter, LoneGroup
from mlxtp.engine.kv_cache import capacity
from mlxtp.engine.loader import load
from mlxtp.engine.runner import Runner
from mlxtp.engine.sampler import Chooser, Chosen, LogitShaping
from mlxtp.errors import Code, GroupError
from mlxtp.wire.messages import Forward, Sampling

from ..reference import reference
from ..wire.forwards import of_prompt, of_prompts
from .families import FAMILIES
from .small_models import write_model
from .tables import refused

PROMPT = (7, 8, 9, 10, 11, 12, 13, 14)
OTHER = (70, 80, 90, 100, 110)
Prompts = dict[int, tuple[int, ...]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def attentive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose choices depend on all that was said, and at a temperature of 1 on chance, too."""
    folder = tmp_path_factory.mktemp("models") / "attentive"
    return write_model(folder, attentive=True, tie_word_embeddings=False)


def runner_of(folder: Path, *, compiled: bool = True) -> Runner:
    group = LoneGroup()
    loaded = load(folder, group, lambda: None)
    chooser = Chooser(group, LogitShaping())
    return Runner(loaded, CacheKind(loaded.model), CollectiveCounter(), chooser, compiled=compiled)


@pytest.fixture
def runner(folder: Path) -> Runner:
    return runner_of(folder)


def active_bytes() -> int:
    """Return the memory of all arrays that are held."""
    mx.synchronize()
    return mx.get_active_memory()


def tokens_of(chosen: Chosen) -> list[list[int]]:
    table = cast("list[list[int]]", chosen.tokens.tolist())
    return [row[:width] for row, width in zip(table, chosen.widths, strict=True)]


def prefill(runner: Runner, uid: int, prompt: Sequence[int], **fields: Any) -> int:
    offset = fields.pop("offset", 0)
    frame = of_prompt(uid, offset, len(prompt), tuple(prompt[offset:]), **fields)
    ((token,),) = tokens_of(runner.run(frame))
    return token


def step(runner: Runner, positions: dict[int, int], **fields: Any) -> list[list[int]]:
    frame = Forward(tuple(positions), tuple(positions.values()), **fields)
    return tokens_of(runner.run(frame))


def decode_beside(runner: Runner, others: dict[int, int], uid: int, start: int, count: int) -> list[int]:
    """Decode a sequence as the last row; `others` by the length of each, which grows."""
    found = []
    for i in range(count):
        found.append(step(runner, {**others, uid: start + i})[-1][0])
        others.update({other: length + 1 for other, length in others.items()})
    return found


def begun(runner: Runner, *prompts: Sequence[int]) -> None:
    """Have rows 1 and on."""
    for uid, prompt in enumerate(prompts, 1):
        prefill(runner, uid, prompt)


def decode(runner: Runner, uid: int, start: int, count: int) -> list[int]:
    return [step(runner, {uid: start + i})[0][0] for i in range(count)]


@pytest.mark.parametrize("compiled", [True, False])
def test_steps_follow_a_prefill(folder: Path, compiled: bool) -> None:
    runner = runner_of(folder, compiled=compiled)
    said = [prefill(runner, 1, PROMPT), *decode(runner, 1, 8, 100)]  # past two sizes of the KV arrays
    assert tuple(said) == reference(PROMPT, 101, folder)
    assert runner.forwards == 101
    assert runner.stop(1, 0) == 101


def test_the_end_of_a_long_prompt_is_read_beside_a_whole_one(tmp_path: Path) -> None:
    """Padded to the width of the other, it would be longer than its arrays."""
    folder, random = write_model(tmp_path, attentive=True), Random(1)
    long, short = (tuple(random.randrange(6, 512) for _ in range(count)) for count in (63, 50))
    runner = runner_of(folder)
    prefill(runner, 1, long[:60])
    runner.stop(1, 60)
    frame = of_prompts((2, 3), (63, 50), (60, 0), (*long[60:], *short), (1, 0), (True, False))
    said = tokens_of(runner.run(frame))
    for i in range(12):
        for row, new in zip(said, step(runner, {2: 63 + i, 3: 50 + i}), strict=True):
            row.extend(new)
    assert [tuple(row) for row in said] == [reference(each, 13, folder) for each in (long, short)]


def test_steps_of_several_rows_are_traced_once_they_come_again(folder: Path, runner: Runner) -> None:
    begun(runner, PROMPT, OTHER)
    runner.arrange((64, 64))
    for i in range(STEPS_BEFORE_TRACE + 2):
        assert runner.cache_use()["graphs"] == (i > STEPS_BEFORE_TRACE)
        step(runner, {1: 8 + i, 2: 5 + i})


@pytest.mark.parametrize(("width", "traced"), [(2, True), (3, True), (4, False), (5, True), (17, True)])
def test_steps_of_the_widths_that_drafts_usually_have_are_traced(
    folder: Path, runner: Runner, width: int, traced: bool
) -> None:
    said, length = [prefill(runner, 1, PROMPT)], 8
    for i in range(4):
        right = reference(PROMPT, len(said) + width, folder)[-width - 1 : -1] if i else (said[-1],) * width
        (new,) = step(runner, {1: length}, widths=(width,), tokens=right)
        said, length = [*said, *new[: width if i else 1]], length + (width if i else 1)
        assert runner.cache_use()["graphs"] == (traced and i > 0)
    assert tuple(said) == reference(PROMPT, 2 + 3 * width, folder)


def test_graphs_that_are_used_stay_and_the_oldest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwards, "MAX_LAYERS", 8)
    graphs = DecodeGraphs(lambda x: x + 1, CollectiveCounter(), traces=True, layers=4)
    for room in (1, 2, 1, 3, 1):
        graphs.run(((1, 1, room, 64, 1),), (), (mx.array(1),), again=True)
    assert [key[0][0][2] for key in graphs._graphs] == [3, 1]


def test_rows_of_several_widths_share_a_forward(attentive: Path) -> None:
    """One row's token is known, the other's is still in the graph."""
    runner = runner_of(attentive)
    one, other = reference(PROMPT, 6, attentive), reference(OTHER, 6, attentive)
    begun(runner, PROMPT, OTHER)
    chosen = step(runner, {1: 8, 2: 5}, widths=(3, 0), tokens=one[:3])
    assert chosen == [list(one[1:4]), [other[1]]]
    assert step(runner, {1: 11, 2: 6}) == [[one[4]], [other[2]]]


def test_the_last_row_takes_the_place_of_one_that_leaves(folder: Path, runner: Runner) -> None:
    prompts = {1: PROMPT, 2: OTHER, 3: (60, 61, 62)}
    begun(runner, *prompts.values())
    runner.stop(1, 0)
    said = [step(runner, {3: 3 + i, 2: 5 + i}) for i in range(3)]
    for row, uid in enumerate((3, 2)):
        assert tuple(each[row][0] for each in said) == reference(prompts[uid], 4, folder)[1:]


def test_draws_go_by_seed_and_position(runner: Runner) -> None:
    sampling = Sampling(temperature=20.0, seed=3)
    logits = {"sampling": sampling}

    def said(uid: int, **fields: Any) -> list[int]:
        first = prefill(runner, uid, PROMPT, **logits, **fields, gathered=(uid,))
        more = [step(runner, {uid: 8 + i}, gathered=(uid,))[0][0] for i in range(5)]
        runner.stop(uid, 0)
        return [first, *more]

    once = said(1)
    assert said(2) == once
    assert said(3, agreement="broadcast") == once
    logits["sampling"] = replace(sampling, seed=4)
    assert said(4) != once


def test_a_draw_depends_on_what_was_said_and_not_on_how_it_was_computed(attentive: Path) -> None:
    """Row 1 draws in steps with a greedy row, others as prompts of the same text."""
    runner, draws = runner_of(attentive), cast("Any", {"sampling": Sampling(temperature=1.0, seed=3)})
    said = [prefill(runner, 1, PROMPT, **draws, gathered=(1,))]
    prefill(runner, 2, OTHER)
    said += [step(runner, {1: 8 + i, 2: 5 + i}, gathered=(1,))[0][0] for i in range(8)]
    for i, token in enumerate(said):
        assert prefill(runner, 3 + i, (*PROMPT, *said[:i]), **draws, gathered=(3 + i,)) == token


DRAWN = (1, 3)
SEEDED = {uid: Sampling(temperature=1.0, seed=uid) for uid in DRAWN}
FED = ((), (3, 0, 2), (1, 5, 1), (2, 1, 4), ())
"""Tokens of each row in one step after another; the next step rolls back all but one."""


def fed_by(widths: Sequence[int]) -> tuple[int, ...]:
    return tuple(100 * row + at for row, width in enumerate(widths, 1) for at in range(width))


def said_by(runner: Runner, uids: Sequence[int], drawn: Sequence[int], prompts: Prompts) -> dict[int, Any]:
    """What rows say that begin together, where `drawn` ones draw and the others are greedy."""
    gathered, own = tuple(uid for uid in uids if uid in drawn), [prompts[uid] for uid in uids]
    draws = [SEEDED.get(uid, Sampling()) if uid in drawn else Sampling() for uid in uids]
    frame = of_prompts(
        tuple(uids), [*map(len, own)], (0,) * len(uids), sum(own, ()), samplings=draws, gathered=gathered
    )
    said = {uid: [row] for uid, row in zip(uids, tokens_of(runner.run(frame)), strict=True)}
    for number, widths in enumerate(FED):
        all_fed = fed_by(widths)
        starts = [sum(widths[:row]) for row in range(len(widths))]
        rows = [(widths[uid - 1], starts[uid - 1]) for uid in uids] if widths else []
        fed = tuple(token for width, start in rows for token in all_fed[start : start + width])
        at = {uid: len(prompts[uid]) + number for uid in uids}
        found = step(runner, at, widths=tuple(width for width, _ in rows), tokens=fed, gathered=gathered)
        for uid, row in zip(uids, found, strict=True):
            said[uid].append(row)
    return said


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("drawn", [(), (1,), (3,), (1, 3)])
def test_drawn_and_greedy_rows_say_together_what_they_say_alone(
    attentive: Path, drawn: tuple[int, ...], apart: bool
) -> None:
    """In one forward, whatever the numbers of tokens; `apart`: their caches are of unlike sizes."""
    prompts = {1: PROMPT, 2: OTHER * (20 if apart else 1), 3: (60, 61, 62)}
    together = said_by(runner_of(attentive), (1, 2, 3), drawn, prompts)
    for uid in prompts:
        assert said_by(runner_of(attentive), (uid,), drawn, prompts)[uid] == together[uid]


def test_only_the_logits_that_a_choice_needs_are_gathered(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that draw, and no more of their positions than the longest of them has."""
    begun(runner, PROMPT, OTHER, PROMPT)
    shapes, choose = list[Any](), Chooser.choose

    def note(chooser: Chooser, logits: mx.array, rows: Any, widths: Any, *more: Any, **how: Any) -> Any:
        shapes.append((logits.shape, rows, widths))
        return choose(chooser, logits, rows, widths, *more, **how)

    monkeypatch.setattr(Chooser, "choose", note)
    at = {1: 8, 2: 5, 3: 8}
    step(runner, at)
    step(runner, {uid: place + 1 for uid, place in at.items()}, gathered=(2,))
    places = {uid: place + 2 for uid, place in at.items()}
    step(runner, places, widths=(2, 1, 5), tokens=(7,) * 8, gathered=(1, 2))
    assert shapes == [((1, 1, 512), (2,), (1,)), ((2, 2, 512), (1, 2), (2, 1))]


@pytest.mark.parametrize("take", [True, False])
def test_a_kept_cache_is_started_from(folder: Path, runner: Runner, take: bool) -> None:
    prefill(runner, 1, PROMPT)
    decode(runner, 1, 8, 4)
    assert runner.stop(1, 12) == 5
    longer = (*PROMPT, *reference(PROMPT, 4, folder), 33, 44)
    token = prefill(runner, 2, longer, offset=12, source=1, take=take)
    assert (token, *decode(runner, 2, len(longer), 4)) == reference(longer, 5, folder)
    if take:
        with pytest.raises(KeyError):
            runner.evict((1,))
    else:
        branch = (*PROMPT[:6], 55)
        assert prefill(runner, 3, branch, offset=6, source=1) == reference(branch, 1, folder)[0]
        runner.evict((1,))


def test_a_running_row_is_started_from(folder: Path, runner: Runner) -> None:
    prefill(runner, 1, PROMPT)
    decode(runner, 1, 8, 2)
    branch = (*PROMPT[:7], 55, 66)
    assert prefill(runner, 2, branch, offset=7, source=1) == reference(branch, 1, folder)[0]
    one, two = step(runner, {1: 10, 2: 9})
    assert (one[0], two[0]) == (reference(PROMPT, 4, folder)[3], reference(branch, 2, folder)[1])


def test_a_prompt_that_is_given_up_can_be_kept(folder: Path, runner: Runner) -> None:
    runner.run(of_prompt(1, 0, 8, PROMPT[:5]))
    assert runner.stop(1, 4) == 1
    assert prefill(runner, 2, PROMPT, offset=4, source=1, take=True) == reference(PROMPT, 1, folder)[0]


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "qwen3_5"])
def test_a_copy_is_kept_of_a_prompt_that_goes_on(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, model_type=family, **FAMILIES[family])
    runner = runner_of(folder)
    runner.run(of_prompt(1, 0, 8, PROMPT[:5], save=2))
    assert (prefill(runner, 1, PROMPT, offset=5), *decode(runner, 1, 8, 4)) == reference(PROMPT, 5, folder)
    branch, others = (*PROMPT[:5], 55, 66), {1: 12}
    for uid, take in ((3, False), (4, True)):
        token = prefill(runner, uid, branch, offset=5, source=2, take=take)
        assert (token, *decode_beside(runner, others, uid, 7, 3)) == reference(branch, 4, folder)
        runner.stop(uid, 0)
    with pytest.raises(KeyError):
        runner.evict((2,))


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5"])
def test_copies_share_the_arrays_of_a_longer_one_until_it_goes(tmp_path: Path, family: str) -> None:
    folder = write_model(tmp_path, model_type=family, **FAMILIES[family])
    runner, prompt = runner_of(folder), tuple(range(10, 310))
    runner.run(of_prompt(1, 0, 300, prompt[:200], save=2))
    one = runner.cache_use()["kept_bytes"]
    runner.run(of_prompt(1, 200, 300, prompt[200:290], save=3, covers=(2,)))
    fixed = runner.cache_use()["kept_bytes"] - one * 290 // 200  # what does not grow, of one of them
    assert 0 < fixed < one / 2
    token = prefill(runner, 1, prompt, offset=290)
    said = (token, *decode(runner, 1, 300, 9))
    assert said == reference(prompt, 10, folder)
    running = active_bytes()
    runner.stop(1, 309, (2, 3))
    kept, held = runner.cache_use()["kept_bytes"], active_bytes()
    assert held < running - one
    assert kept < one * capacity(310) // 200 + 3 * fixed
    runner.evict((1,))
    assert kept - one < runner.cache_use()["kept_bytes"] < kept
    assert active_bytes() < held - one / 20
    for uid, source, length in ((4, 2, 200), (5, 3, 290), (6, 2, 200)):
        branch = (*prompt[:length], 55, 66)
        assert prefill(runner, uid, branch, offset=length, source=source) == reference(branch, 1, folder)[0]
        runner.stop(uid, 0)
        if uid == 5:
            runner.evict((3,))  # what is left gets its own
            assert runner.cache_use()["kept_bytes"] == one
    runner.evict((2,))
    assert runner.kv_bytes() == 0


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_5"])
def test_caches_that_cannot_be_cut_are_kept_and_started_from_whole_or_not_at_all(
    tmp_path: Path, family: str
) -> None:
    folder = write_model(tmp_path, model_type=family, **FAMILIES[family])
    runner = runner_of(folder)
    runner.run(of_prompt(1, 0, 8, PROMPT[:5]))
    with refused(
        GroupError, Code.DESYNC, "sequence 1: 4 tokens to keep, but this rank holds 5, not to be cut"
    ):
        runner.stop(1, 4)
    prefill(runner, 2, PROMPT)
    decode(runner, 2, 8, 2)
    with pytest.raises(GroupError, match="sequence 2: 9 tokens to keep, but this rank holds 10"):
        runner.stop(2, 9)
    runner = runner_of(folder)
    prefill(runner, 3, PROMPT)
    runner.stop(3, 8)
    with pytest.raises(GroupError, match="after 7 tokens of sequence 3; this rank keeps 8"):
        prefill(runner, 4, PROMPT, offset=7, source=3)


def test_the_use_of_kept_caches_is_counted(runner: Runner) -> None:
    prefill(runner, 1, PROMPT)
    none = {"graphs": 0}
    assert runner.cache_use() == {"kv_bytes": runner.kv_bytes(), "kept_bytes": 0, **none}
    runner.stop(1, 8)
    kept = runner.kv_bytes()
    assert runner.cache_use() == {"kv_bytes": kept, "kept_bytes": kept, **none}
    prefill(runner, 2, PROMPT, offset=4, source=1)
    prefill(runner, 3, PROMPT, offset=5, source=2)
    held = runner.kv_bytes()
    reused = {"reused": 2, "reused_tokens": 9, **none}
    assert runner.cache_use() == {"kv_bytes": held, "kept_bytes": kept, **reused}
    runner.evict((1,))
    freed = {"kept_bytes": 0, "evicted_bytes": kept}
    assert runner.cache_use() == {"kv_bytes": runner.kv_bytes(), **freed, **reused}


def test_rows_are_laid_out_on_command_and_say_the_same(folder: Path, runner: Runner) -> None:
    long = tuple(range(10, 210))
    begun(runner, PROMPT, OTHER, long, OTHER)
    lengths = {1: 8, 2: 5, 3: 200, 4: 5}
    said = {uid: [reference(prompt, 1, folder)[0]] for uid, prompt in ((1, PROMPT), (2, OTHER), (3, long))}

    def go_on(steps: int) -> None:
        for _ in range(steps):
            for uid, (token,) in zip(tuple(lengths), step(runner, lengths), strict=True):
                said.setdefault(uid, [reference(OTHER, 1, folder)[0]]).append(token)
                lengths[uid] += 1

    runner.arrange((256,) * 4)
    go_on(5)
    assert runner.room == [(4, 256)]
    runner.arrange((64, 64, 256, 64))
    go_on(5)
    assert runner.room == [(3, 64), (1, 256)]
    runner.arrange((64, 96, 256, 64, 64))
    go_on(STEPS_BEFORE_TRACE + 1)
    assert runner.room == [(3, 64), (1, 96), (1, 256)]
    runner.arrange((256,) * 4)
    go_on(2)
    for uid, prompt in ((1, PROMPT), (2, OTHER), (3, long), (4, OTHER)):
        assert tuple(said[uid]) == reference(prompt, len(said[uid]), folder)


@pytest.mark.parametrize("rooms", [(64,), (64, 128), (128, 7)])
def test_a_layout_without_room_for_what_a_rank_holds_is_refused(
    runner: Runner, rooms: tuple[int, ...]
) -> None:
    prefill(runner, 1, tuple(range(10, 90)))
    prefill(runner, 2, PROMPT)
    with refused(GroupError, Code.DESYNC, r"but this rank holds \[80, 8\]"):
        runner.arrange(rooms)
    runner.arrange((80, 8))


def test_a_prompt_in_chunks_has_the_room_that_is_counted(runner: Runner) -> None:
    """mlx-lm's own caches grow by 256 tokens at least."""
    prompt = tuple(range(10, 310))
    token_bytes = 2 * 2 * 2 * 16 * 4  # layers, keys and values, heads, numbers of four bytes

    def held() -> float:
        return (runner.kv_bytes() - runner.cache_use()["kept_bytes"]) / token_bytes

    for start in range(0, 290, 29):
        runner.run(of_prompt(1, start, 300, prompt[start : start + 29]))
        assert held() == capacity(300)
    prefill(runner, 1, prompt, offset=290)
    assert held() == capacity(300)
    runner.stop(1, 200)
    for take in (False, True):
        prefill(runner, 2 + take, prompt, offset=150, source=1, take=take)
        assert held() == capacity(300)
        runner.stop(2 + take, 0)


def test_memory_that_no_row_needs_is_given_back_on_command(folder: Path, runner: Runner) -> None:
    begun(runner, PROMPT, OTHER, OTHER)
    runner.arrange((512,) * 4)
    runner.stop(3, 0)
    step(runner, {1: 8, 2: 5})
    held, before = runner.kv_bytes(), mx.get_active_memory()
    runner.arrange((64, 64), trim=True)
    assert runner.room == [(2, 64)]
    assert held - runner.kv_bytes() == before - mx.get_active_memory() > 0
    assert mx.get_cache_memory() == 0
    said = step(runner, {1: 9, 2: 6})
    assert [row[0] for row in said] == [reference(PROMPT, 3, folder)[2], reference(OTHER, 3, folder)[2]]
    runner.stop(1, 0)
    runner.stop(2, 0)
    runner.arrange((), trim=True)
    assert runner.kv_bytes() == 0


@pytest.mark.parametrize("metal", [True, False])
def test_the_pool_is_emptied_between_chunks_and_once_nothing_runs(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, metal: bool
) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(runner.forwards))
    long = tuple(range(10, 22))
    for start in range(0, 8, 4):
        runner.run(of_prompt(1, start, 12, long[start : start + 4]))
    prefill(runner, 1, long, offset=8)
    prefill(runner, 2, OTHER)
    step(runner, {1: 12, 2: 5})
    runner.stop(1, 12)
    assert cleared == [1, 2] * metal
    runner.run(of_prompt(3, 0, 12, long[:4]))
    runner.stop(2, 0)
    assert cleared == [1, 2, 6] * metal, "a prompt is on its way"
    runner.stop(3, 0)
    assert cleared == [1, 2, 6, 6] * metal


def test_what_kept_caches_hold_is_the_sum_of_their_arrays(runner: Runner) -> None:
    def same() -> bool:
        kept = [runner.kept.held(uid)[0] for uid in range(1, 6)]
        return runner.kept.size_bytes == sum(array.nbytes for each in kept for array in arrays_of(each))

    for uid in (1, 2, 3):
        prefill(runner, uid, PROMPT)
        runner.stop(uid, 4 + uid)
        assert same()
    prefill(runner, 4, (*PROMPT[:5], 55), offset=5, source=1)
    prefill(runner, 5, (*PROMPT[:5], 66), offset=5, source=2, take=True)
    assert same()
    assert [runner.kept.held(uid)[1] for uid in range(1, 6)] == [5, 0, 7, 0, 0]
    runner.stop(4, 5)
    runner.evict((1,))
    assert same()
    assert [runner.kept.held(uid)[1] for uid in range(1, 6)] == [0, 0, 7, 5, 0]


def test_other_rows_are_refused(runner: Runner) -> None:
    begun(runner, PROMPT, OTHER)
    for positions in ({1: 8}, {2: 5, 1: 8}, {1: 8, 3: 5}):
        with refused(GroupError, Code.DESYNC, r"but this rank runs \(1, 2\)"):
            step(runner, positions)


@pytest.mark.parametrize("position", [0, 7, 9, 64])
def test_another_position_is_refused(runner: Runner, position: int) -> None:
    prefill(runner, 1, PROMPT)
    with refused(GroupError, Code.DESYNC, f"at position {position}, .* from 8 to 8"):
        step(runner, {1: position})
    step(runner, {1: 8})


@pytest.mark.parametrize(
    ("position", "is_legal"), [(8, False), (9, True), (10, True), (11, True), (12, False)]
)
def test_at_most_what_the_last_step_fed_is_rolled_back(runner: Runner, position: int, is_legal: bool) -> None:
    token = prefill(runner, 1, PROMPT)
    step(runner, {1: 8}, widths=(3,), tokens=(token, 1, 2))
    if is_legal:
        step(runner, {1: position}, widths=(1,), tokens=(3,))
    else:
        with pytest.raises(GroupError, match="from 9 to 11"):
            step(runner, {1: position}, widths=(1,), tokens=(3,))


@pytest.mark.parametrize("seed", range(3))
def test_a_compiled_runner_and_one_that_is_not_say_the_same(folder: Path, seed: int) -> None:
    """Joins, leaves, drafts, right and wrong, at random."""
    random = Random(seed)
    runners = [runner_of(folder, compiled=compiled) for compiled in (True, False)]
    positions: dict[int, int] = {}
    order: list[int] = []
    for uid in range(1, 60):
        if not order or (random.random() < 0.25 and len(order) < 4):
            prompt = tuple(random.choices(range(6, 512), k=random.randint(1, 70)))
            assert len({prefill(each, uid, prompt) for each in runners}) == 1
            order.append(uid)
            positions[uid] = len(prompt)
        elif random.random() < 0.15:
            leaving = random.choice(order)
            assert len({each.stop(leaving, 0) for each in runners}) == 1
            order[order.index(leaving)] = order[-1]
            order.pop()
            del positions[leaving]
        elif random.random() < 0.2:
            labels = [random.randrange(3) for _ in order]
            longest = max(positions.values())
            for each in runners:
                each.arrange(tuple(capacity(longest + 3) + 32 * label for label in labels))
        else:
            widths = tuple(random.choice((0, 1, 3)) for _ in order) if random.random() < 0.5 else ()
            fed = tuple(random.choices(range(6, 512), k=sum(widths)))
            rows = {uid: positions[uid] for uid in order}
            one, other = (step(each, rows, widths=widths, tokens=fed) for each in runners)
            assert one == other
            for row, width in zip(order, widths or (0,) * len(order), strict=True):
                positions[row] += random.randint(1, width) if width else 1


@pytest.fixture(params=["compiler", "no compiler"])
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "no compiler":
        mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("machine")
def test_a_graph_that_comes_again_counts_its_collectives_once() -> None:
    """So a rank with a compiler and one without keep equal ledgers in a group."""
    counter = CollectiveCounter()

    def body(x: mx.array) -> mx.array:
        counter.count += 2
        return x + 1

    graphs, shape = DecodeGraphs(body, counter, traces=True), ((1, 1, 256, 256, 1),)
    assert [graphs.run(shape, (), (mx.array(n),), again=True).item() for n in range(4)] == [1, 2, 3, 4]
    assert counter.count == 8
