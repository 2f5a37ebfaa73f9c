"""Little room for KV caches, quantized ones, and caches of other kinds, on two real ranks and on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from mlxtp.api.backend import Sampling, Shaping
from mlxtp.errors import Code, ModelError, RequestError
from mlxtp.wire.messages import Generate

from ..engine.small_models import write_model
from ..live_cluster import Cluster, Request
from ..reference import expected
from .test_features_choice import assert_right, prompt

pytestmark = [pytest.mark.group, pytest.mark.fault]

LAYERS, HEADS, HEAD_SIZE, NUMBER_BYTES = 2, 2, 16, 4
WHOLE_TOKEN_BYTES = LAYERS * 2 * HEADS * HEAD_SIZE * NUMBER_BYTES


GROUPS = {"one": {"ranks": 1}, "two": {"ranks": 2}, "stages": {"parallel": "pipeline", "split": "1,1"}}


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(name, marks=pytest.mark.chaos) for name in ("one", "stages")), "two"],
)
def cluster(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    home = tmp_path_factory.mktemp(request.param)
    with Cluster(home, model=folder, **GROUPS[request.param]) as cluster:
        yield cluster


def room_for(cluster: Cluster, tokens: int) -> int:
    """Bytes of one rank's share of so many tokens."""
    return tokens * WHOLE_TOKEN_BYTES // cluster.settings.ranks


def refused(cluster: Cluster, wanted: Generate) -> RequestError:
    request = cluster.ask(wanted)
    with pytest.raises(RequestError) as error:
        request.accepted()
    assert error.value.code is Code.CONTEXT_OVERFLOW
    assert error.value.status == 400
    return error.value


def test_what_can_never_fit_is_refused_with_the_numbers(cluster: Cluster, folder: Path) -> None:
    cluster.load(folder, kv_bytes=room_for(cluster, 300))
    before = cluster.idle()
    error = refused(cluster, Generate(0, prompt(1, 250), 100))
    for number in ("250 prompt tokens", "100 new ones", "room for 352", "room for 300"):
        assert number in error.detail
    assert set((cluster.idle() - before).forwards) == {0}
    fits = Generate(0, prompt(1, 150), 40)
    assert_right(cluster.ask_all([fits]), [fits], folder)


def test_what_will_fit_later_waits_and_is_right(cluster: Cluster, folder: Path) -> None:
    cluster.load(folder, kv_bytes=room_for(cluster, 400))
    random = Random(2)
    wanted = [Generate(0, prompt(seed, random.randint(5, 120)), random.randint(1, 60)) for seed in range(12)]
    assert_right(cluster.ask_all(wanted), wanted, folder)


def test_who_outgrows_the_room_is_put_off_and_comes_back_right(cluster: Cluster, folder: Path) -> None:
    """Two fit while they are short. The younger one is prefilled again when the older one is through."""
    cluster.load(folder, kv_bytes=room_for(cluster, 300))
    wanted = [
        Generate(0, prompt(5, 20), 150, Sampling(temperature=20.0, seed=5), ignore_eos=True),
        Generate(0, prompt(6, 20), 150, shaping=Shaping(presence_penalty=40.0), logprobs=1, ignore_eos=True),
    ]
    before = cluster.idle()
    outcomes = cluster.ask_all(wanted)
    work = cluster.idle() - before
    assert_right(outcomes, wanted, folder)
    assert len(outcomes[1].scores) == 150
    together, apart = 151, 300
    assert together < work.forwards[0] < apart  # drafts save some of them
    assert len(set(work.forwards)) == 1


def resize(cluster: Cluster, tokens: int) -> int:
    """Change the room for KV caches; returns the tokens that the ranks now have room for."""
    cluster.call(cluster.supervisor.kv.limit(room_for(cluster, tokens)))
    return cluster.supervisor.kv.tokens


def most_kv_bytes(cluster: Cluster) -> int:
    """Bytes of the KV caches of the rank that reports the most of them now."""
    cluster._hear_from_all()  # these answers may have left before we asked
    return max(pong.stats.kv_bytes for pong in cluster._hear_from_all())


def test_less_room_in_mid_stream_changes_no_text_and_gives_memory_back(
    cluster: Cluster, folder: Path
) -> None:
    """The four have arrays of 256 tokens each when the room becomes too small for all of them."""
    cluster.load(folder, kv_bytes=room_for(cluster, 1600))
    wanted = [
        Generate(0, prompt(60, 200), 300, ignore_eos=True),
        Generate(0, prompt(61, 195), 300, Sampling(temperature=20.0, seed=5), ignore_eos=True),
        Generate(
            0, prompt(62, 190), 300, shaping=Shaping(presence_penalty=40.0), logprobs=1, ignore_eos=True
        ),
        Generate(0, prompt(63, 185), 300, ignore_eos=True),
    ]
    before = cluster.idle()
    streams = [cluster.ask(each) for each in wanted]

    async def shrink() -> None:
        for stream in streams:
            await stream.read(20)
        await cluster.supervisor.kv.limit(room_for(cluster, 800))

    cluster.call(shrink())
    assert cluster.supervisor.kv.tokens == 800
    assert most_kv_bytes(cluster) <= room_for(cluster, 800)
    streams[0].take(150)
    assert most_kv_bytes(cluster) <= room_for(cluster, 800)
    assert resize(cluster, 2048) == 1600, "no more than the setting says"
    for stream, each in zip(streams, wanted, strict=True):
        tokens, end = stream.finish()
        assert tokens == expected(each, folder).tokens
        assert (end.reason, end.generated) == ("length", 300)
    work = cluster.idle() - before
    assert len(set(work.forwards)) == 1
    assert len(set(work.collectives)) == 1


def test_what_outgrows_the_smaller_room_ends_with_the_numbers(cluster: Cluster, folder: Path) -> None:
    cluster.load(folder, kv_bytes=room_for(cluster, 512))

    async def begin() -> Any:
        answer = cluster.supervisor.gateway.generate(Generate(0, prompt(70, 100), 400, ignore_eos=True))
        await cluster.supervisor.kv.limit(room_for(cluster, 192))  # before the answer can be complete
        return answer

    stream = Request(cluster, cluster.call(begin()))
    assert cluster.supervisor.kv.tokens == 192
    words = r"100 prompt tokens and \d+ of 400 new ones outgrow .* room for 192"
    with pytest.raises(RequestError, match=words):
        stream.finish()
    assert "room for 320 in the KV cache" in refused(cluster, Generate(0, prompt(71, 100), 200)).detail
    assert resize(cluster, 0) == 512, "the setting's"
    fits = Generate(0, prompt(71, 100), 200, ignore_eos=True)
    assert_right(cluster.ask_all([fits]), [fits], folder)
    assert resize(cluster, 1) == 64, "room for the shortest sequence is left"
    short = Generate(0, prompt(72, 20), 40)
    assert_right(cluster.ask_all([short]), [short], folder)


@pytest.mark.parametrize("kv_bits", [0, pytest.param(8, marks=pytest.mark.chaos)])
def test_one_long_row_and_many_short_ones_run_together_in_the_room_of_their_lengths(
    cluster: Cluster, folder: Path, tmp_path: Path, kv_bits: int
) -> None:
    """In arrays of the longest for all, no more than three would fit. Some draft, some join together."""
    if kv_bits:
        folder = write_model(tmp_path / "wide", head_dim=64)
    tokens = 1350
    wide = tokens * LAYERS * 2 * HEADS * 64 * 4 // cluster.settings.ranks
    kv_bytes = wide * (8 + 2 * 16 / 64) / 32 if kv_bits else room_for(cluster, tokens)
    cluster.load(folder, kv_bytes=int(kv_bytes), kv_bits=kv_bits)
    random = Random(8)
    again = prompt(80, 10) * 3
    wanted = [
        Generate(0, prompt(81, 350), 90, ignore_eos=True),
        Generate(0, again, 80, ignore_eos=True),
        *[
            Generate(
                0,
                prompt(seed, random.randint(5, 30)),
                80,
                Sampling(temperature=20.0 * (seed % 2), seed=seed),
                ignore_eos=True,
            )
            for seed in range(82, 86)
        ],
    ]
    before = cluster.idle()
    streams = [cluster.ask(each) for each in wanted]
    for stream in streams:
        stream.take(20)
    assert most_kv_bytes(cluster) <= kv_bytes
    for stream, each in zip(streams, wanted, strict=True):
        found, end = stream.finish()
        assert found == expected(each, folder).tokens
        assert (end.reason, end.generated) == ("length", each.max_tokens)
    work = cluster.idle() - before
    lanes = 2 if cluster.settings.split != "auto" else 1
    assert work.forwards[0] < 160 * lanes, "all six ran together"
    assert len(set(work.forwards)) == len(set(work.collectives)) == 1


def test_the_context_can_be_made_shorter(cluster: Cluster, folder: Path) -> None:
    cluster.load(folder, max_context=64)
    assert "context of 64" in refused(cluster, Generate(0, prompt(1, 60), 5)).detail
    fits = Generate(0, prompt(1, 60), 4)
    assert_right(cluster.ask_all([fits]), [fits], folder)
    assert cluster.client.get("/v1/models").json()["data"][0]["context_length"] == 64


def test_a_context_longer_than_the_models_own_changes_nothing(cluster: Cluster, folder: Path) -> None:
    cluster.load(folder, max_context=100_000)
    assert "context of 512" in refused(cluster, Generate(0, prompt(1, 500), 13)).detail


@pytest.mark.parametrize("requests", [2, pytest.param(6, marks=pytest.mark.chaos)])
def test_quantized_caches_answer_many_at_once(cluster: Cluster, tmp_path: Path, requests: int) -> None:
    """This model's most likely tokens are so by far: 8 bits are enough for them."""
    folder = write_model(tmp_path / "wide", head_dim=64)
    cluster.load(folder, kv_bits=8)
    wanted = [Generate(0, prompt(seed, 40), 12, ignore_eos=True) for seed in range(40, 40 + requests)]
    before = cluster.idle()
    outcomes = cluster.ask_all(wanted)
    assert_right(outcomes, wanted, folder)
    assert (cluster.idle() - before).forwards[0] < requests * 12
    again = cluster.ask_all(wanted[:1])
    assert again[0].whole().cached == 39
    assert_right(again, wanted[:1], folder)


def test_keys_that_cannot_be_quantized_are_refused_at_load(cluster: Cluster, folder: Path) -> None:
    epoch = cluster.epoch
    with pytest.raises(ModelError, match=r"--kv-bits 8: .* do not divide by 32; leave it out"):
        cluster.load(folder, kv_bits=8)
    cluster.load(folder)
    fits = Generate(0, prompt(1, 60), 4)
    assert_right(cluster.ask_all([fits]), [fits], folder)
    assert cluster.epoch == epoch
