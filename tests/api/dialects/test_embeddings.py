"""Vectors as JSON: the same numbers in pieces, encoded as they are read, and counted to their client."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from mlxtp.api import request_body
from mlxtp.api.backend import ModelInfo
from mlxtp.api.dialects import embeddings
from mlxtp.vector_files import EMBED, VectorModel

from ..conftest import BYTE_LEVEL, FakeAnswer, FakeBackend, Loaded, Server, says, serving
from ..test_server_connection import served

pytestmark = pytest.mark.slow

WIDTH = 1024


class Vectors(FakeBackend):
    """A model for embeddings, whose vectors are random."""

    def models(self) -> tuple[ModelInfo, ...]:
        return tuple([replace(each, vectors=VectorModel(EMBED, width=WIDTH)) for each in super().models()])

    def generate(self, request: Any, **whose: Any) -> FakeAnswer:
        answer: Any = super().generate(request, **whose)
        answer.vectors = {place: vector(place) for place in range(len(request.pooling.lengths))}
        return answer  # type: ignore[no-any-return]


def vector(place: int) -> bytes:
    return np.random.default_rng(place).standard_normal(WIDTH, np.float32).tobytes()


@pytest.fixture
def backend(loaded: dict[str, Loaded]) -> Vectors:
    return Vectors(loaded[BYTE_LEVEL].text, says([]))


@pytest.fixture
def server(backend: Vectors, loaded: dict[str, Loaded]) -> Iterator[Server]:
    with serving(backend, loaded[BYTE_LEVEL].tokenizer) as found:
        yield found


@pytest.mark.parametrize("count", [1, 2, 40])
def test_numbers_in_pieces_are_one_json(server: Server, count: int) -> None:
    def asked(path: str, **more: Any) -> Any:
        body = {"input": [[5]] * count, "rid": 1} | more
        answer = httpx.post(server.url + path, json=body, trust_env=False)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
        assert answer.headers["x-mlxtp-ignored"] == "rid"
        return answer.json()

    def bits(rows: Any) -> list[bytes]:
        return [struct.pack(f"<{WIDTH}f", *row) for row in rows]

    made = [vector(place) for place in range(count)]
    found = asked("/v1/embeddings")
    assert bits(row["embedding"] for row in found["data"]) == made
    assert [row["index"] for row in found["data"]] == list(range(count))
    assert found["usage"] == {"prompt_tokens": count, "total_tokens": count}
    rows = asked("/v1/embeddings", encoding_format="base64")["data"]
    assert [base64.b64decode(row["embedding"]) for row in rows] == made
    assert bits(asked("/api/embed")["embeddings"]) == made
    assert bits([asked("/api/embeddings")["embedding"]]) == made[:1]


def request(texts: int) -> bytes:
    body = json.dumps({"input": [[5]] * texts}).encode()
    head = "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: "
    return f"{head}{len(body)}\r\n\r\n".encode() + body


async def test_what_a_client_does_not_read_is_not_encoded_and_counts_until_it_leaves(
    backend: Vectors, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, encoded = 1000, list[bytes]()
    of_one = texts * WIDTH * 4
    monkeypatch.setattr(request_body, "MAX_BODIES_BYTES", of_one * 5 // 4)
    numbers = embeddings.numbers
    monkeypatch.setattr(embeddings, "numbers", lambda each: encoded.append(each) or numbers(each))
    async with served(backend) as connect:
        slow = connect()
        await slow.send(request(texts))
        read = b""
        while b'"data":[' not in read:
            part = await slow.read(100)
            assert part
            read += part

        async def status(texts: int, source: str = "127.0.0.1") -> int:
            await (client := connect(source)).send(request(texts))
            answered = await client.read(100)
            client.close()
            return int(answered.split(b" ", 2)[1])

        asked = len(backend.answers)
        assert await status(texts // 2) == 503
        assert len(backend.answers) == asked  # before ranks compute
        assert (await status(1), await status(texts // 8, "127.0.0.2")) == (200, 200)
        assert len(encoded) < texts // 2
        slow.close()
        for _try in range(100):
            if (last := await status(texts // 2)) == 200:
                break
        assert last == 200
