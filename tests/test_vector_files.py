from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtp.errors import Code, ModelError
from mlxtp.models.inspect import check_servable, described, vectors_in
from mlxtp.vector_files import EMBED, RERANK, VectorModel, headless, vector_model

from .engine.small_models import CONFIG

QWEN = {**CONFIG, "model_type": "qwen3", "eos_token_id": 7, "architectures": ["Qwen3ForCausalLM"]}
TASK = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
POOLING, SETTINGS = "1_Pooling/config.json", "config_sentence_transformers.json"


def modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": n, "name": str(n), "path": f"{n}_{kind}" if n else "", "type": f"a.models.{kind}"}
        for n, kind in enumerate(kinds)
    ]


def write(folder: Path, files: dict[str, Any], config: dict[str, Any] = QWEN) -> Path:
    for name, told in {**files, "config.json": config}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(told))
    return folder


ALL = modules("Transformer", "Pooling", "Normalize")
LOGIT, LOGIT_FILE = modules("Transformer", "LogitScore"), "1_LogitScore/config.json"
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "word_embedding_dimension": 64}


@pytest.mark.parametrize(
    ("name", "files", "expected"),
    [
        ("chat", {}, None),
        ("Qwen3-Embedding-0.6B-4bit", {}, VectorModel(EMBED, prompts={"query": TASK, "document": ""}, end=7)),
        ("models--Qwen--Qwen3-Reranker-4B/snapshots/c0ffee", {}, VectorModel(RERANK)),
        ("any", {"modules.json": ALL, POOLING: LAST}, VectorModel(EMBED)),
        ("any", {"modules.json": ALL[:2], POOLING: LAST}, VectorModel(EMBED, normalized=False)),
        ("any", {POOLING: {"pooling_mode": "mean"}}, VectorModel(EMBED, "mean")),
        ("any", {POOLING: {"pooling_mode_cls_token": True}}, VectorModel(EMBED, "cls")),
        (
            "any",
            {
                "modules.json": ALL,
                POOLING: LAST,
                "sentence_bert_config.json": {"max_seq_length": 99},
                SETTINGS: {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
            },
            VectorModel(EMBED, context=99, prompts={"query": "q: "}, default_prompt="query"),
        ),
        (
            "qwen3_reranker",
            {"modules.json": LOGIT, LOGIT_FILE: {"true_token_id": 5, "false_token_id": 6}},
            VectorModel(RERANK, scored=(6, 5), normalized=False),
        ),
    ],
)
def test_files_and_names_say_how_a_model_makes_vectors(
    tmp_path: Path, name: str, files: dict[str, Any], expected: VectorModel | None
) -> None:
    found = vector_model(write(tmp_path / name, files), QWEN)
    assert found == (expected and replace(expected, width=64))
    if found is not None:
        check_servable({**QWEN, "architectures": ["Qwen3Model"]} if found.kind == EMBED else QWEN, found)
        assert bool(headless(found)) == (found.kind == EMBED)


@pytest.mark.parametrize(
    ("files", "config", "why"),
    [
        ({POOLING: {"pooling_mode_max_tokens": True}}, {}, "it pools by max; mlxtp knows"),
        ({POOLING: {"pooling_mode": ["cls", "mean"]}}, {}, "it pools by cls and mean"),
        ({POOLING: {}}, {}, "it pools by nothing"),
        ({POOLING: {**LAST, "include_prompt": False}}, {}, "leaves the prompt's tokens out"),
        ({"modules.json": modules("Transformer", "Pooling", "Dense"), POOLING: LAST}, {}, "a Dense, which"),
        ({"modules.json": modules("Transformer")}, {}, "names no pooling"),
        ({"modules.json": LOGIT, LOGIT_FILE: {}}, {}, "a prompt that is not known"),
        ({POOLING: LAST}, {"use_bidirectional_attention": True}, "in both directions"),
        ({POOLING: LAST}, {"model_type": "bert"}, "an encoder; serve an embedding model that is a decoder"),
        ({}, {"model_type": "xlm-roberta"}, "an encoder; serve an embedding model that is a decoder"),
        ({POOLING: LAST}, {"architectures": ["Qwen3ForTokenClassification"]}, "writes no text"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    tmp_path: Path, files: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    told = {**QWEN, **config}
    with pytest.raises(ModelError) as refused:
        check_servable(told, vectors_in(write(tmp_path, files, told)))
    assert (refused.value.code, why in refused.value.detail) == (Code.MODEL_UNSUPPORTED, True), refused.value


@pytest.mark.parametrize(
    "damaged",
    [{"x": 1}, [1], [{"type": "Pooling"}], *([{"type": "Pooling", "path": at}] for at in ("..", "a/b"))],
)
def test_damaged_files_are_named(tmp_path: Path, damaged: Any) -> None:
    write(tmp_path, {"modules.json": damaged})
    with pytest.raises(ModelError, match=r"modules\.json"):
        vectors_in(tmp_path)


def test_it_stays_on_one_mac(tmp_path: Path) -> None:
    found = described(write(tmp_path / "Qwen3-Embedding-0.6B", {}), QWEN)
    assert found.unsharable == found.uncuttable == "one rank computes the vectors of texts"
    assert found.tied
