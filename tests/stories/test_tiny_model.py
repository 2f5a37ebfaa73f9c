"""Promises of the embedded model, through two ranks and HTTP: it repeats, it finds codes, it counts. Its head
drafts.
"""

from __future__ import annotations

import json
import string
from concurrent.futures import ThreadPoolExecutor
from random import Random

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from examples.tiny_model.drafting import right_drafts

from ..live_cluster import Cluster
from ..reference import TINY, answer, model_of, prompt_ids

pytestmark = pytest.mark.fault

NAMES = ("Dorvan", "Kelmira", "Tasko", "Brenzo", "Lumida", "Pirrel")
FILLER = (
    "The river was quiet in the morning.",
    "A small boat came around the bend.",
    "Nobody in the village had seen the letter.",
    "The old clock struck nine.",
)
HEAD = {f"model.layers.4.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm")}
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


@pytest.mark.chaos
def test_unseen_strings_of_all_printable_characters_come_back(two_ranks: Cluster) -> None:
    random = Random(20)
    wanted = ["".join(random.choices(PRINTABLE, k=1 + 4 * i % 40)) for i in range(30)]
    with ThreadPoolExecutor(8) as clients:
        said = list(
            clients.map(lambda text: two_ranks.content(f"Repeat exactly: {text}", max_tokens=60), wanted)
        )
    exact = sum(map(str.__eq__, said, wanted))
    assert exact >= 28, f"{exact} of {len(wanted)}"


def test_characters_of_several_bytes_come_back_whole(two_ranks: Cluster) -> None:
    for text in ("héllo wörld", "café 🙂 day", "你好 AB-12"):
        chunks = two_ranks.stream(f"Repeat exactly: {text}")
        pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) == text


def test_it_counts(two_ranks: Cluster) -> None:
    expected = " ".join(map(str, range(1, 61)))
    assert two_ranks.content("Count from 1 to 60.", max_tokens=300) == expected


@pytest.mark.parametrize(
    ("question", "least", "most"),
    [
        ("Count from 95 to 112.", 0.9, 1.0),
        ("Repeat exactly: FALCON-MERCURY-7749, RIVER-MOON-2308 and HARBOR-5196", 0.6, 0.85),
        ("Repeat exactly: The old boat waits behind the quiet harbor. It was a quiet day.", 0.45, 0.75),
    ],
)
def test_its_head_drafts_some_tokens_rightly_and_others_wrongly(
    question: str, least: float, most: float
) -> None:
    """By mlx-lm's layers alone."""
    model, _ = model_of(TINY)
    prompt = prompt_ids(question)
    tokens = list(answer(prompt, 100).tokens)
    drafted = right_drafts(model, TINY, list(prompt), tokens, 2)
    first = [right[0] for right in drafted]
    assert least <= sum(first) / len(first) <= most
    assert any(right[1] for right in drafted[:-1]), "no second draft is right"


def test_plain_mlx_lm_loads_the_model_without_its_head() -> None:
    assert json.loads((TINY / "config.json").read_text())["num_nextn_predict_layers"] == 1
    model, _ = load_model(TINY, strict=True)
    assert len(model.layers) == model.args.num_hidden_layers == 4
    weights = dict(tree_flatten(model.parameters()))
    head = mx.load(str(TINY / "mtp.safetensors"))
    assert {array.dtype for array in (*weights.values(), *head.values())} == {mx.float32}
    assert head.keys() == HEAD | {name.replace(".3.", ".4.") for name in weights if ".3." in name}
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 6_000_000
