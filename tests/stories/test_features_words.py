"""Words that clients forbid, on two real ranks, against mlx-lm's own loop with a processor of logits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import mlx.core as mx
import openai
import pytest
from mlx_lm.generate import generate_step

from mlxtp.wire.messages import Generate, Shaping

from ..live_cluster import WAIT_S, Cluster
from ..reference import TINY, endless_prompt, expected, model_of, prompt_ids, reference, spoken, text

pytestmark = pytest.mark.group

ASKED = "Repeat exactly: FALCON-MERCURY-7749-FALCON-MERCURY-7749"


def without(prompt: tuple[int, ...], words: list[tuple[int, ...]], most: int) -> tuple[int, ...]:
    """The visible tokens of the right answer."""

    def forbid(tokens: mx.array, logits: mx.array) -> mx.array:
        answer = tokens.tolist()[len(prompt) :]
        for *before, last in words:
            if answer[len(answer) - len(before) :] == before:
                logits[:, last] = -mx.inf
        return logits

    model, eos = model_of(TINY)
    steps = generate_step(mx.array(prompt), model, max_tokens=most, logits_processors=[forbid])
    found = [int(token) for token, _ in steps]
    ends = [at for at, token in enumerate(found) if token in eos]
    return tuple(found[: ends[0]] if ends else found)


@pytest.mark.parametrize("bad", [["MERCURY-77", "49-F", "zebra"], [" MERCURY", "\tFALCON"], ["-"]])
def test_no_bad_word_is_said_with_drafts_as_without(two_ranks: Cluster, bad: list[str]) -> None:
    client = openai.OpenAI(base_url=f"{two_ranks.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S)
    body: Any = {"model": "default", "messages": [{"role": "user", "content": ASKED}], "temperature": 0}
    answer = client.chat.completions.create(**body, max_tokens=60, extra_body={"bad_words": bad})
    words = [text().encoded(f"{blank}{word.lstrip()}", special=False) for word in bad for blank in ("", " ")]
    said = answer.choices[0].message.content
    assert said == spoken(without(prompt_ids(ASKED), words, 60))
    assert not any(word.strip() in said for word in bad)
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens + details.rejected_prediction_tokens > 0


@pytest.mark.fault
def test_what_a_dead_group_said_of_a_word_counts(tmp_path: Path) -> None:
    prompt = endless_prompt()
    word = reference(prompt, 400)[:32]
    wanted = Generate(0, prompt, 60, shaping=Shaping(bad_tokens=word, bad_lengths=(32,)), ignore_eos=True)
    right = expected(wanted).tokens
    assert right[:31] == word[:31]
    assert right[31] != word[31]
    with Cluster(tmp_path) as cluster:
        answer = cluster.ask(wanted)
        answer.take(3)
        os.kill(cluster.pids()[-1], signal.SIGKILL)
        assert answer.finish()[0] == right
