"""Client libraries that want embeddings, from an agent that serves models of three kinds on one Mac."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from mlxtp.engine.group import LoneGroup
from mlxtp.engine.loader import load
from mlxtp.engine.pooling import Pooler, PoolingRequests
from mlxtp.engine.telemetry import RankTelemetry
from mlxtp.text.renderer import LocalRenderer, WorkerQueue
from mlxtp.wire.messages import Generate, Pooling

from ..apps.replay import answered, recordings
from ..engine.record_vectors import SHAPE
from ..engine.small_models import write_model
from ..live_cluster import START_S, WAIT_S, Cluster, until
from ..test_vector_files import ALL, POOLING, SETTINGS, modules, write
from .test_examples import CLIENTS, sections

pytestmark = pytest.mark.slow

FOUND, RANKS = "mean-pooling", "qwen3-reranker-small"
TEXTS = ["The river was quiet in the morning.", "It.", "The code for Lumida is BT-9357. " * 6]
LONG = "far too long " * 200


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in (FOUND, RANKS):
        write_model(folder / name, seed=5, **SHAPE)  # type: ignore[arg-type]
    files: dict[str, Any] = {"modules.json": ALL, POOLING: {"pooling_mode": "mean"}}
    settings = {"prompts": {"query": "", "shout": "READ THIS: "}}
    write(folder / FOUND, {**files, SETTINGS: settings}, _config(folder / FOUND))
    scores = {"true_token_id": 40, "false_token_id": 41}
    judged = {"modules.json": modules("Transformer", "LogitScore"), "1_LogitScore/config.json": scores}
    write(folder / RANKS, judged, _config(folder / RANKS) | {"max_position_embeddings": 1024})
    return folder


def _config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.fixture(scope="module")
def mac(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    where: dict[str, Any] = {"control_host": "127.0.0.1", "control_port": 0, "discovery": False, "name": "a"}
    with Cluster(tmp_path_factory.mktemp("agent"), ranks=1, cluster=True, **where) as cluster:
        node, gateway = cluster.agent.parts.node, cluster.agent.parts.gateway

        async def serve() -> None:
            for name in (FOUND, RANKS):
                node.desired.serve(str(folders / name))

        cluster.call(serve())
        until(lambda: len(gateway.models()) == 3, "three models", START_S)
        yield cluster


@pytest.fixture
def client(mac: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{mac.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as found:
        yield found


def expected(folder: Path, texts: list[str]) -> Any:
    """Return what one rank computes of each text alone."""
    writer = LocalRenderer.load(folder)
    share, found = load(folder, LoneGroup(), lambda: None), []
    for text in texts:
        tokens = writer.encode(text, special=True)
        alone = PoolingRequests(Pooler(share, 4096), RankTelemetry())
        alone.add(Generate(1, tokens, 1, pooling=Pooling((len(tokens),), "mean", True)))
        step = alone.next()
        assert step is not None
        found.append(np.frombuffer(step.data, "<f4"))
    return np.stack(found)


def test_openai_s_library(client: openai.OpenAI, folders: Path) -> None:
    made = client.embeddings.create(model=FOUND, input=TEXTS)  # it asks for base64
    assert np.abs([each.embedding for each in made.data] - expected(folders / FOUND, TEXTS)).max() < 1e-5
    assert made.usage.prompt_tokens == made.usage.total_tokens > len(TEXTS)
    assert ([each.index for each in made.data], made.model) == ([0, 1, 2], FOUND)
    [plain] = client.embeddings.create(model=FOUND, input=TEXTS[0], encoding_format="float").data
    assert plain.embedding == pytest.approx(made.data[0].embedding, abs=1e-6)
    [short] = client.embeddings.create(model=FOUND, input=TEXTS[0], dimensions=4).data
    whole = np.array(plain.embedding[:4])
    assert short.embedding == pytest.approx(list(whole / np.linalg.norm(whole)), abs=1e-5)
    ids = client.embeddings.create(model=FOUND, input=[[5, 6], [7]])
    assert (len(ids.data), ids.usage.prompt_tokens) == (2, 3)
    shouted = client.embeddings.create(model=FOUND, input=TEXTS[0], extra_body={"prompt_name": "shout"})
    [said] = client.embeddings.create(model=FOUND, input=f"READ THIS: {TEXTS[0]}").data
    assert shouted.data[0].embedding == said.embedding


def test_ollama_s_library(mac: Cluster, client: openai.OpenAI) -> None:
    library = ollama.Client(host=mac.url, timeout=WAIT_S)
    made = library.embed(f"{FOUND}:latest", TEXTS)
    theirs = [each.embedding for each in client.embeddings.create(model=FOUND, input=TEXTS).data]
    assert np.abs(np.array(made.embeddings) - theirs).max() < 1e-6
    assert (made.prompt_eval_count or 0) > 3
    assert (made.total_duration or 0) >= (made.load_duration or 0) > 0
    older = library.embeddings(FOUND, TEXTS[0])
    assert list(older.embedding) == pytest.approx(list(made.embeddings[0]), abs=1e-6)
    assert len(library.embed(FOUND, LONG).embeddings) == 1  # cut, as Ollama does
    with pytest.raises(ollama.ResponseError, match=r"input has .* takes at most 512"):
        library.embed(FOUND, LONG, truncate=False)


def test_a_ranking_in_every_path(mac: Cluster) -> None:
    body = {"model": RANKS, "query": "the code", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    found = []
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        told = mac.client.post(path, json=body).raise_for_status().json()
        found.append([(each["index"], each["relevance_score"]) for each in told["results"]])
        assert told["usage"]["total_tokens"] > 30
    assert found[0] == found[1] == found[2]
    assert sorted(place for place, _ in found[0]) == [0, 1, 2]
    assert [score for _, score in found[0]] == sorted((score for _, score in found[0]), reverse=True)
    [best] = mac.client.post("/rerank", json=body | {"top_n": 1, "return_documents": True}).json()["results"]
    assert (best["index"], best["document"]["text"]) == (found[0][0][0], TEXTS[found[0][0][0]])
    [alone] = mac.client.post("/rerank", json=body | {"documents": [TEXTS[2]]}).json()["results"]
    assert alone["relevance_score"] == pytest.approx(dict(found[0])[2], abs=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/embeddings", {"model": "tiny", "input": "x"}, "tiny writes text, and embeddings need"),
        ("/api/embed", {"model": RANKS, "input": "x"}, "scores documents, and embeddings need"),
        ("/v1/rerank", {"model": FOUND, "query": "q", "documents": ["x"]}, "and a ranking needs"),
        ("/v1/completions", {"model": FOUND, "prompt": "x"}, "an answer"),
        ("/v1/embeddings", {"input": ["x", LONG]}, "has 2000 tokens, and mean-pooling takes at most 512"),
        ("/v1/rerank", {"query": "q", "documents": ["x", 5]}, "documents[1]: expected a string"),
        ("/v1/rerank", {"documents": ["x"]}, "query is missing"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_what_cannot_be_is_a_400(mac: Cluster, path: str, body: dict[str, Any], words: str) -> None:
    refused = mac.client.post(path, json=body)
    assert (refused.status_code, words in refused.text) == (400, True), refused.text


def test_the_example_finds_a_passage_and_answers_from_it(mac: Cluster) -> None:
    found = sections([sys.executable, str(CLIENTS / "openai_rag.py")], mac.url)
    assert found == {"nearest": "The code for Lumida is BT-9357.", "answer": "BT-9357"}


@pytest.mark.parametrize("recording", recordings("vectors"))
def test_documents_of_open_webui(mac: Cluster, recording: dict[str, Any]) -> None:
    assert answered(mac.url, recording) == recording["expected"]


def test_a_query_does_not_wait_for_the_tokens_of_many_texts(
    mac: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    queues, run = list[WorkerQueue](), WorkerQueue.run

    async def noted(queue: WorkerQueue, *work: Any) -> Any:
        queues.append(queue)
        return await run(queue, *work)

    monkeypatch.setattr(WorkerQueue, "run", noted)
    for texts in (["It."] * 500, ["It."]):
        mac.client.post("/v1/embeddings", json={"model": FOUND, "input": texts}).raise_for_status()
    many, one = queues
    assert many is not one


def test_a_killed_rank_is_a_pause(mac: Cluster, client: openai.OpenAI) -> None:
    before = client.embeddings.create(model=FOUND, input=TEXTS)
    groups = mac.agent.parts.groups
    [group] = groups.replicas_of(FOUND)
    ranks = group.supervisor.status.ranks
    assert ranks is not None
    os.kill(ranks.processes[0].pid, signal.SIGKILL)
    # One that comes just then is told to come again, which the library does.
    patient = client.with_options(max_retries=5, timeout=START_S)
    after = patient.embeddings.create(model=FOUND, input=TEXTS)
    assert [each.embedding for each in after.data] == [each.embedding for each in before.data]


def test_status_and_the_list_of_models_name_it(mac: Cluster) -> None:
    assert {model["id"] for model in mac.client.get("/v1/models").json()["data"]} == {"tiny", FOUND, RANKS}
    shown = mac.client.post("/api/show", json={"model": FOUND}).json()
    assert shown["capabilities"] == ["embedding"]
