"""Choice of tokens, on two real ranks and on one, against one process: every parameter, every way.

The model has random weights in 32-bit numbers. Sums of other shapes (two ranks, several rows, several tokens
at once) differ from one process's in the last bits, so that a choice between two as good as equal could tip:
of greedy rows where two logits agree to six digits, of draws where a random number falls within as little of
a token's border. These seeds meet neither, and there are enough of them to see anything larger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from random import Random

import mlx.core as mx
import pytest

from mlxtp.api.backend import PLAIN, Sampling, Shaping
from mlxtp.wire.messages import Generate

from ..engine.small_models import change_weights, write_model
from ..live_cluster import Cluster, Outcome
from ..reference import TINY, Expected, expected, model_of, prompt_ids, random_text

pytestmark = [pytest.mark.group, pytest.mark.fault]

HOT = 1.0
"""A temperature at which this model's answers depend on chance."""
MARGIN = 1e-3
SETTINGS = {
    "rich": {},
    "plain": {"compiled": False, "speculation": "off", "prefix_cache": False, "agreement": "broadcast"},
    "lockstep": {"run_ahead": 0},
    "alone": {"ranks": 1},
    "pipeline": {"parallel": "pipeline", "split": "1,1", "repeatable": False},
}
"""Everything on; everything off that can be; no run-ahead; no group; stages, with drafts of any length."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Logits of the order of 3, so that temperatures and penalties of everyday size matter."""
    folder = write_model(tmp_path_factory.mktemp("model") / "small", tie_word_embeddings=False)
    head = mx.load(str(folder / "model.safetensors"))["lm_head.weight"]
    change_weights(folder, lm_head__weight=5 * head)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        "rich",
        "pipeline",
        *(pytest.param(name, marks=pytest.mark.chaos) for name in ("alone", "plain", "lockstep")),
    ],
)
def cluster(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp(request.param)
    with Cluster(home, model=folder, **SETTINGS[request.param]) as cluster:
        yield cluster


def prompt(seed: int, length: int = 12) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(6, 512) for _ in range(length))


def copying(folder: Path, temperature: float = 0.0) -> list[Generate]:
    """Prompts that hold what this model likes to say: some of it comes again, and some only begins to."""
    wanted = []
    for seed in range(20, 26):
        start = prompt(seed, 6)
        said = expected(Generate(0, start, 60, ignore_eos=True), folder).tokens
        sampling = Sampling(temperature=temperature, seed=seed)
        wanted.append(Generate(0, (*start, *said), 40, sampling, ignore_eos=True))
    return wanted


BAD_WORDS = Shaping(bad_tokens=(456, 103, 444, 334, 116, 206), bad_lengths=(1, 2, 3))
"""Some of what the model says to `prompt(60)`."""
GREEDY = [Generate(0, prompt(seed, 1 + 7 * seed), 24) for seed in range(10)]
SAMPLED = [Generate(0, prompt(seed), 24, Sampling(temperature=HOT, seed=seed)) for seed in range(30, 45)]
EFFECTS: dict[str, tuple[Sampling, Shaping]] = {
    "temperature": (Sampling(temperature=2 * HOT, seed=1), PLAIN),
    "top_p": (Sampling(temperature=HOT, seed=1, top_p=0.6), PLAIN),
    "top_k": (Sampling(temperature=HOT, seed=1, top_k=2), PLAIN),
    "min_p": (Sampling(temperature=HOT, seed=1, min_p=0.3), PLAIN),
    "xtc": (Sampling(temperature=HOT, seed=1, xtc_probability=0.9, xtc_threshold=0.05), PLAIN),
    "seed": (Sampling(temperature=HOT, seed=2), PLAIN),
    "repetition": (Sampling(temperature=HOT, seed=1), Shaping(repetition_penalty=1.7)),
    "presence": (Sampling(temperature=HOT, seed=1), Shaping(presence_penalty=2.0)),
    "frequency": (Sampling(temperature=HOT, seed=1), Shaping(frequency_penalty=1.5)),
    "bias": (Sampling(temperature=HOT, seed=1), Shaping(bias_tokens=(77, 99), bias_values=(5.0, -100.0))),
    "all": (
        Sampling(
            temperature=HOT, top_p=0.9, top_k=50, min_p=0.01, xtc_probability=0.3, xtc_threshold=0.2, seed=3
        ),
        Shaping(1.2, 2.0, 1.0, (77, 99), (5.0, -100.0), 3),
    ),
    "greedy repetition": (Sampling(), Shaping(repetition_penalty=1.7)),
    "greedy presence": (Sampling(), Shaping(presence_penalty=2.0)),
    "greedy frequency": (Sampling(), Shaping(frequency_penalty=1.5)),
    "bad words": (
        Sampling(temperature=HOT, seed=1),
        Shaping(bad_tokens=(192, 44, 70, 431), bad_lengths=(1, 3)),
    ),
    "greedy bad words": (Sampling(), BAD_WORDS),
    "greedy bias": (Sampling(), Shaping(bias_tokens=(77,), bias_values=(6.0,))),
}
SHAPED = [Generate(0, prompt(60), 30, *how, ignore_eos=True) for how in EFFECTS.values()]
SCORED = [
    Generate(0, prompt(70), 20, logprobs=0),
    Generate(0, prompt(71), 20, logprobs=5, ignore_eos=True),
    Generate(0, prompt(72), 20, Sampling(temperature=HOT, seed=7), logprobs=20, ignore_eos=True),
    Generate(0, prompt(73), 20, shaping=Shaping(presence_penalty=2.0), logprobs=2, ignore_eos=True),
]


def kinds(folder: Path) -> list[list[Generate]]:
    """Greedy rows exchange winners only; drafts and draws go by `verify`, shapes by `broadcast`."""
    return [GREEDY, SAMPLED, SHAPED, SCORED, copying(folder), copying(folder, 0.2)]


def everything(folder: Path) -> list[Generate]:
    return [wanted for kind in kinds(folder) for wanted in kind]


def assert_right(outcomes: Sequence[Outcome], wanted: Sequence[Generate], folder: Path) -> None:
    for outcome, each in zip(outcomes, wanted, strict=True):
        right = expected(each, folder)
        assert outcome.tokens == right.tokens, each
        end = outcome.whole()
        assert (end.reason, end.generated) == (right.reason, right.generated)
        assert 0 <= end.accepted <= end.drafted
        assert end.accepted < end.generated
        assert 0 <= end.cached < len(each.tokens)
        assert_scored(outcome, right)


def assert_scored(outcome: Outcome, right: Expected) -> None:
    assert len(outcome.scores) == len(right.scores)
    for got, reference in zip(outcome.scores, right.scores, strict=True):
        assert got.logprob == pytest.approx(reference.logprob, abs=MARGIN)
        assert [token for token, _ in got.top] == [token for token, _ in reference.top]
        assert [logprob for _, logprob in got.top] == pytest.approx(
            [logprob for _, logprob in reference.top], abs=MARGIN
        )


@pytest.mark.chaos
def test_everything_is_right_one_after_the_other(cluster: Cluster, folder: Path) -> None:
    some = everything(folder)[::4]
    assert_right(cluster.ask_all(some, at_once=1), some, folder)


def test_everything_is_right_in_company(cluster: Cluster, folder: Path) -> None:
    """Greedy, drawn, shaped and scored rows of many lengths in one batch, in any order."""
    mixed = Random(1).sample(all_ := everything(folder), len(all_))
    before = cluster.idle()
    outcomes = cluster.ask_all(mixed)
    assert_right(outcomes, mixed, folder)
    work = cluster.idle() - before
    assert len(set(work.forwards)) == 1
    assert work.forwards[0] < sum(outcome.whole().generated for outcome in outcomes) / 3


def test_drafts_are_counted(cluster: Cluster, folder: Path) -> None:
    """Text that repeats itself by the rules, and text that repeats itself until chance has it otherwise."""
    wanted = [*copying(folder)[:3], *copying(folder, 0.2)[:3]]
    before = cluster.idle()
    ends = [outcome.whole() for outcome in cluster.ask_all(wanted, at_once=1)]
    work = cluster.idle() - before
    drafted, accepted = sum(end.drafted for end in ends), sum(end.accepted for end in ends)
    generated = sum(end.generated for end in ends)
    if cluster.settings.speculation != "off":
        assert 0 < accepted < drafted
        assert work.forwards[0] < generated - accepted + len(ends)
    else:
        assert drafted == accepted == 0
        assert work.forwards[0] >= generated


@pytest.mark.parametrize("name", EFFECTS)
def test_each_parameter_has_an_effect(folder: Path, name: str) -> None:
    """The reference, so that being equal to it means something."""
    sampling, shaping = EFFECTS[name]
    base = Sampling(temperature=HOT, seed=1) if sampling.temperature else Sampling()
    without = expected(Generate(0, prompt(60), 30, base, ignore_eos=True), folder)
    assert expected(Generate(0, prompt(60), 30, sampling, shaping, ignore_eos=True), folder) != without


def test_xtc_never_takes_out_an_end_token(cluster: Cluster, folder: Path) -> None:
    end = min(model_of(folder)[1])
    shaping = Shaping(bias_tokens=(end, 77), bias_values=(1001.0, 1000.0))
    sampling = Sampling(temperature=0.01, xtc_probability=1.0, xtc_threshold=0.1, seed=1)
    (outcome,) = cluster.ask_all([Generate(0, prompt(82), 9, sampling, shaping)])
    assert outcome.tokens == ()
    assert outcome.whole().reason == "stop"


def drawn(seed: int) -> Generate:
    return Generate(0, prompt(90), 20, Sampling(temperature=HOT, seed=seed), ignore_eos=True)


def test_a_seed_is_a_text_and_another_seed_is_another(cluster: Cluster, folder: Path) -> None:
    seeds = (0, 1, 2**32, 2**63 - 1)
    alone = cluster.ask_all([drawn(seed) for seed in seeds], at_once=1)
    together = cluster.ask_all([drawn(seed) for seed in reversed(seeds)])
    assert [outcome.tokens for outcome in alone] == [outcome.tokens for outcome in reversed(together)]
    assert len({outcome.tokens for outcome in alone}) == len(seeds)
    assert [outcome.tokens for outcome in alone] == [expected(drawn(seed), folder).tokens for seed in seeds]


def test_measured_steps_decide_for_rows_together_and_change_no_text(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Lookups and the model itself as its draft propose, for one row and for several."""
    random = Random(4)
    prompts = [prompt_ids(f"Repeat exactly: {random_text(random, 40)}") for _ in range(4)]
    wanted = [Generate(0, each, 40) for each in prompts]
    with Cluster(tmp_path_factory.mktemp("measured"), ranks=2, repeatable=False) as cluster:
        cluster.load("tiny", draft="tiny")
        outcomes: list[Outcome] = []
        for _ in range(8):  # drafts rest for some hundred steps where one of the first happened to be slow
            outcomes += [*cluster.ask_all(wanted, 1), *cluster.ask_all(wanted, 4)]
            cluster.idle()
            stats = {rank: pong.stats for rank, pong in cluster.supervisor.status.pongs.items()}
            if stats[0].right_at[1] and stats[0].draft_gain:
                break
    for outcome, each in zip(outcomes, cycle(wanted), strict=False):
        assert outcome.tokens == expected(each, TINY).tokens
    ends = [outcome.whole() for outcome in outcomes]
    assert sum(stats[0].drafted) >= sum(end.drafted for end in ends) > 0
    assert sum(stats[0].accepted) >= sum(end.accepted for end in ends) > 0
    assert stats[0].right_at[0] >= stats[0].right_at[1] > 0
    assert stats[0].decode_widths > stats[0].decode_steps > 0
    assert stats[0].draft_gain > 0
    assert sum(stats[1].drafted) == 0
