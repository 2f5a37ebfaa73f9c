"""The draft model: what it proposes, how it reads a long prompt, and how much memory it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mlxtp.engine import decode_loop
from mlxtp.engine.draft_model import CHUNK, DraftModel
from mlxtp.wire.messages import Loaded

from ..reference import reference
from .small_models import write_model

PROMPT = [n % 500 for n in range(2 * CHUNK + 100)]
SHORT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture
def drafter(folder: Path) -> DraftModel:
    return DraftModel(folder, 512)


def test_it_proposes_what_it_would_say(drafter: DraftModel, folder: Path) -> None:
    said = reference(tuple(SHORT), 6, folder)
    assert drafter.propose(SHORT, 4) == said[:4]
    assert drafter.propose([*SHORT, *said[:2]], 4) == said[2:6]


def test_it_reads_one_chunk_of_a_long_prompt_each_time(drafter: DraftModel, folder: Path) -> None:
    assert drafter.propose(PROMPT, 3) == ()
    assert drafter.propose(PROMPT, 3) == ()
    assert drafter.propose(PROMPT, 3) == reference(tuple(PROMPT), 3, folder)


def test_it_keeps_at_most_what_it_may(drafter: DraftModel) -> None:
    one = drafter._bytes(len(SHORT))
    drafter.bound(2 * one)
    for first in range(4):
        assert drafter.propose([first, *SHORT[1:]], 2)
    assert len(drafter._fed) == 2
    assert drafter.propose(PROMPT, 2) == (), "it has no room for so long a prompt"
    drafter.bound(one - 1)
    assert drafter._fed == [], "its caches are freed at once"
    assert drafter.propose(SHORT, 2) == ()


def test_its_memory_is_taken_from_the_room_for_kv_caches(drafter: DraftModel) -> None:
    room = 9 * drafter.weight_bytes
    found = Loaded(512, 512, 0, (), kv_token_bytes=1, kv_bytes=room)
    left = decode_loop._beside(drafter, found).kv_bytes
    assert left + drafter._room_bytes + drafter.weight_bytes == room
    assert drafter._room_bytes == drafter.weight_bytes
    assert decode_loop._beside(drafter, replace(found, kv_bytes=10)).kv_bytes == 0
    assert decode_loop._beside(None, found) == found
