from __future__ import annotations

import pytest

from mlxtp.api.adapter import in_words_of
from mlxtp.api.dialects.anthropic import ANTHROPIC
from mlxtp.api.dialects.completions import Completions
from mlxtp.api.dialects.ollama import Ollama
from mlxtp.api.dialects.responses import Responses
from mlxtp.api.generation import Adapter
from mlxtp.errors import RequestError


@pytest.mark.parametrize(
    ("dialect", "detail", "param", "said", "named"),
    [
        (ANTHROPIC, "stop has 17 strings", "stop", "stop_sequences has 17 strings", "stop_sequences"),
        (
            ANTHROPIC, "tools[1].function.parameters: no", "tools[1].function.parameters",
            "tools[1].input_schema: no", "tools[1].input_schema",
        ),
        (
            Ollama(), "response_format.pattern should be a string", "response_format.pattern",
            "format.pattern should be a string", "format.pattern",
        ),
        (Responses(), "max_tokens 9 and", "max_tokens", "max_output_tokens 9 and", "max_output_tokens"),
        (Completions(), "the prompt is empty", "messages", "the prompt is empty", "prompt"),
    ],
)  # fmt: skip
def test_the_field_that_an_error_is_about_has_the_dialects_name(
    dialect: Adapter, detail: str, param: str, said: str, named: str
) -> None:
    found = in_words_of(dialect, RequestError(detail, param=param))
    assert isinstance(found, RequestError)
    assert (found.detail, found.param) == (said, named)


@pytest.mark.parametrize(
    ("dialect", "detail", "param"),
    [
        (Responses(), 'the model "messages" does not exist here', "model"),
        (ANTHROPIC, 'temperature should be a number, got "stop"', "temperature"),
        (Responses(), "metadata.max_tokens should be a string, got 5", "metadata.max_tokens"),
        (Ollama(), "tool_choice: there is no tool named 'max_tokens'", "tool_choice"),
    ],
)
def test_the_clients_own_words_stay(dialect: Adapter, detail: str, param: str) -> None:
    found = in_words_of(dialect, RequestError(detail, param=param))
    assert isinstance(found, RequestError)
    assert (found.detail, found.param) == (detail, param)


def test_a_word_that_a_client_sent_with_a_wrong_field_stays() -> None:
    error = RequestError('stop has "stop" twice', param="stop")
    assert in_words_of(ANTHROPIC, error).detail == 'stop_sequences has "stop" twice'
