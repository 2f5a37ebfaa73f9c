"""A model that thinks and calls tools."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from mlxtp.api.backend import StreamEnd, TokenEvent, Tokens, TokenScore
from mlxtp.text.renderer import LocalRenderer
from mlxtp.text.tokenizer import Text

from ..conftest import SPECIAL, VOCABULARY, Server, save

# a model that thinks aloud, and whose template shows all that it is given
TEMPLATE = (
    "{# <tool_call> #}{% for t in tools or [] %}{{ t.function.description }}"
    "{{ t.function.parameters.properties | join }}{% endfor %}{{ bos_token }}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{% for t in tools or [] %}+{{ t.function.name }}{% endfor %}"
    "{% if enable_thinking is defined %}={{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort is defined %}~{{ reasoning_effort }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


async def impossible() -> AsyncIterator[TokenEvent]:
    """An answer whose token, and one beside it, could not be."""
    yield Tokens((70,), (TokenScore(-math.inf, ((71, -math.inf), (72, 0.1))),))
    yield StreamEnd("stop", 1)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Text]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[*SPECIAL, "<think>", "</think>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello wide world, 日本語 😀 weather city arguments"] * 3, trainer)
    folder: Path = save(tokenizer, tmp_path_factory.mktemp("thinking"), TEMPLATE)
    return tokenizer, Text(LocalRenderer.load(folder))


@pytest.fixture
def thinker(server: Server, thinking: tuple[Tokenizer, Text]) -> Iterator[Server]:
    """The server with a model that thinks and calls tools."""
    tokenizer, text = thinking
    plain = server.backend.loaded_text
    server.backend.loaded_text = text
    yield Server(server.backend, server.port, tokenizer)
    server.backend.loaded_text = plain
