"""Promises of the embedded model, through two ranks and HTTP: it repeats, it finds codes, it counts."""

from __future__ import annotations

import string
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from .live_cluster import Cluster
from .reference import prompt_ids

NAMES = ("Dorvan", "Kelmira", "Tasko", "Brenzo", "Lumida", "Pirrel")
FILLER = (
    "The river was quiet in the morning.",
    "A small boat came around the bend.",
    "Nobody in the village had seen the letter.",
    "The old clock struck nine.",
)
PRINTABLE = string.ascii_letters + string.digits + string.punctuation


def haystack(random: Random, tokens: int) -> tuple[str, dict[str, str]]:
    """About `tokens` tokens of facts among filler, and the codes that stand in it."""
    codes = {name: _code(random) for name in NAMES}
    facts = [f"The code for {name} is {code}." for name, code in codes.items()]
    sentences = list(facts)
    while len(prompt_ids(" ".join(sentences))) < tokens:
        sentences.append(random.choice(FILLER))
    random.shuffle(sentences)
    return " ".join(sentences), codes


def _code(random: Random) -> str:
    letters = "".join(random.choice(string.ascii_uppercase) for _ in range(2))
    return f"{letters}-{random.randrange(1000, 10000)}"


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.chaos) for n in (2, 3))])
def test_a_code_is_found_among_a_thousand_tokens(two_ranks: Cluster, seed: int) -> None:
    random = Random(seed)
    text, codes = haystack(random, 970)
    name = random.choice(NAMES)
    question = f"{text} What is the code for {name}?"
    assert 950 <= len(prompt_ids(question)) <= 1100
    assert two_ranks.content(question, max_tokens=30) == codes[name]


def test_unseen_strings_of_all_printable_characters_come_back(two_ranks: Cluster) -> None:
    random = Random(20)
    wanted = ["".join(random.choices(PRINTABLE, k=1 + i % 40)) for i in range(60)]
    with ThreadPoolExecutor(8) as clients:
        said = list(
            clients.map(lambda text: two_ranks.content(f"Repeat exactly: {text}", max_tokens=60), wanted)
        )
    exact = sum(map(str.__eq__, said, wanted))
    assert exact >= 57, f"{exact} of {len(wanted)}"


def test_characters_of_several_bytes_come_back_whole(two_ranks: Cluster) -> None:
    for text in ("héllo wörld", "café 🙂 day", "你好 AB-12"):
        chunks = two_ranks.stream(f"Repeat exactly: {text}")
        pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) == text


def test_it_counts(two_ranks: Cluster) -> None:
    expected = " ".join(map(str, range(1, 61)))
    assert two_ranks.content("Count from 1 to 60.", max_tokens=300) == expected
