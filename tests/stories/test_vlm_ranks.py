"""Families of mlx-vlm on two ranks of an agent: several requests at once, as one rank answers each."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from mlxtp.api.backend import Sampling
from mlxtp.wire.messages import Generate

from ..engine.small_models import write_model
from ..engine.vlm_families import DIVIDED, NEEDS_VLM, VLM
from ..live_cluster import Cluster
from ..reference import expected

pytestmark = [pytest.mark.group, pytest.mark.fault, NEEDS_VLM]


@pytest.mark.parametrize(
    ("parallel", "families"),
    [("pipeline", ["deepseek_v4", "glm5_next", "qwen4_exp"]), ("tensor", sorted(DIVIDED))],
)
def test_two_ranks_answer_as_one_does(tmp_path: Path, parallel: str, families: list[str]) -> None:
    folders = [
        write_model(
            tmp_path / family,
            model_type=family,
            attentive=True,
            **{"vocab_size": 512, "tie_word_embeddings": False, "torch_dtype": "float32", **VLM[family]},
        )
        for family in families
    ]
    random = Random(1)
    options = {"parallel": parallel, **({"split": "2,2"} if parallel == "pipeline" else {})}
    with Cluster(tmp_path / "home", ranks=2, model=folders[0], **options) as cluster:
        for folder in folders:
            cluster.load(folder)
            prompts = [tuple(random.randrange(6, 500) for _ in range(length)) for length in (150, 40, 9)]
            wanted = [
                Generate(0, each, 16, how)
                for each in prompts
                for how in (Sampling(), Sampling(temperature=1.5, seed=11))
            ]
            outcomes = cluster.ask_all(wanted)
            assert [one.tokens for one in outcomes] == [expected(one, folder).tokens for one in wanted], (
                folder
            )
