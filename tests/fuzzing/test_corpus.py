"""Inputs that once broke a parser, and those that the search for more (`make fuzz`) begins with."""

from __future__ import annotations

import pytest

from .targets import CORPUS, TARGETS, kept


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_that_was_found_breaks_it_again(name: str) -> None:
    target = TARGETS[name]
    inputs = {f"seed {n}": seed for n, seed in enumerate(target.seeds)}
    inputs |= {path.name: path.read_bytes() for path in kept(name)}
    broken = {what: error for what, data in inputs.items() if (error := target.broken_by(data)) is not None}
    assert broken == {}


@pytest.mark.parametrize("name", TARGETS)
def test_a_seed_leads_further_than_to_a_refusal(name: str) -> None:
    """Else the fuzzer begins with nothing."""

    def taken(data: bytes) -> bool:
        try:
            TARGETS[name].run(data)
        except TARGETS[name].allowed:
            return False
        return True

    assert any(map(taken, TARGETS[name].seeds))


def test_every_folder_of_the_corpus_has_a_target() -> None:
    assert {path.name for path in CORPUS.glob("*")} <= TARGETS.keys()
