"""The draft model: what it proposes, how it reads a long prompt, and how much memory it takes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from mlxtp.engine import decode_loop
from mlxtp.engine.draft_model import CHUNK, DraftModel
from mlxtp.wire.messages import Loaded

from ..reference import reference
from .families import FAMILIES, PIPELINE
from .small_models import remember, write_model

pytestmark = pytest.mark.fault

PROMPT = [n % 500 for n in range(2 * CHUNK + 100)]
SHORT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture
def drafter(folder: Path) -> DraftModel:
    return DraftModel(folder, 512)


def proposed(drafter: DraftModel, tokens: list[int], limit: int) -> tuple[int, ...]:
    return drafter.propose({1: tokens}, limit).get(1, ())


def test_it_proposes_what_it_would_say(drafter: DraftModel, folder: Path) -> None:
    said = reference(tuple(SHORT), 6, folder)
    assert proposed(drafter, SHORT, 4) == said[:4]
    assert proposed(drafter, [*SHORT, *said[:2]], 4) == said[2:6]


def test_it_reads_one_chunk_of_a_long_prompt_each_time(drafter: DraftModel, folder: Path) -> None:
    assert proposed(drafter, PROMPT, 3) == ()
    assert proposed(drafter, PROMPT, 3) == ()
    assert proposed(drafter, PROMPT, 3) == reference(tuple(PROMPT), 3, folder)


@pytest.mark.parametrize(
    "family",
    ["llama", "qwen3_5", *(pytest.param(name, marks=pytest.mark.chaos) for name in ("lfm2", "nemotron_h"))],
)
def test_rows_together_get_what_each_would_get_alone(folder: Path, tmp_path: Path, family: str) -> None:
    """Rows join, leave and come back; some drafts were right, some answers have outrun the drafts."""
    if family != "llama":
        folder = remember(
            write_model(tmp_path, model_type=family, attentive=True, **{**PIPELINE, **FAMILIES}[family])
        )
    rng = random.Random(5)
    together, alone = DraftModel(folder, 512), DraftModel(folder, 512)
    rows = {row: [rng.randrange(512) for _ in range(rng.choice([1, 3, 40, 90]))] for row in range(5)}
    model, fed, forwards = together._model, list[int](), list[int]()
    together._model = lambda *args, **given: (fed.append(1), model(*args, **given))[1]
    for _ in range(15):
        running = {row: rows[row] for row in rows if rng.random() < 0.9}
        fed.clear()
        drafts = together.propose(running, 3)
        forwards.append(len(fed))
        each = {row: proposed(alone, tokens, 3) for row, tokens in running.items()}
        assert drafts == {row: draft for row, draft in each.items() if draft}
        for row, draft in drafts.items():
            assert not draft or draft == DraftModel(folder, 512).propose({1: rows[row]}, 3)[1]
            right = rng.randrange(4)
            rows[row] += draft[:right]
            rows[row] += [rng.randrange(512) for _ in range(rng.choice([1, 1, 1, 6, 40]))]
    assert all(len(tokens) < CHUNK for tokens in rows.values())
    assert forwards.count(3) >= 3, "one for each place where no row has much to read"


def test_windows_are_rolled_back_far_behind_their_beginning(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "windows", model_type="gpt_oss", **FAMILIES["gpt_oss"])
    drafter, tokens = DraftModel(folder, 512), [n % 500 for n in range(40)]
    for _ in range(3):
        said = reference(tuple(tokens), 4, folder)
        assert proposed(drafter, tokens, 4) == said
        tokens += [said[0], 9]  # the second draft was wrong


def test_another_turn_of_a_conversation_is_not_read_from_its_beginning(drafter: DraftModel) -> None:
    drafter.propose({1: PROMPT[:400]}, 2)
    drafter.propose({}, 2)
    (kept,) = drafter._kept
    assert len(kept[0]) == 401, "with the draft that was fed"
    drafter.propose({2: [*PROMPT[:390], 7, 7]}, 2)
    assert drafter._kept == []


def test_it_keeps_at_most_what_it_may(drafter: DraftModel) -> None:
    drafter.propose({1: SHORT}, 2)
    one = drafter._held()
    drafter.bound(2 * one)
    for first in range(4):
        assert drafter.propose({first: [first, *SHORT[1:]]}, 2)
    assert drafter._held() == 2 * one
    rows = {row: [row, *SHORT] for row in range(4)}
    assert len(drafter.propose(rows, 2)) == 2, "as many rows as there is room for"
    assert drafter.propose({1: PROMPT}, 2) == {}, "it has no room for so long a prompt"
    drafter.bound(1)
    assert drafter._held() == 0, "its caches are freed at once"
    assert drafter.propose({1: SHORT}, 2) == {}


def test_its_memory_is_taken_from_the_room_for_kv_caches(drafter: DraftModel) -> None:
    room = 9 * drafter.weight_bytes
    found = Loaded(512, 512, 0, (), kv_token_bytes=1, kv_bytes=room)
    left = decode_loop._beside(drafter, found).kv_bytes
    assert left + drafter._room_bytes + drafter.weight_bytes == room
    assert drafter._room_bytes == drafter.weight_bytes
    assert decode_loop._beside(drafter, replace(found, kv_bytes=10)).kv_bytes == 0
    assert decode_loop._beside(None, found) == found
