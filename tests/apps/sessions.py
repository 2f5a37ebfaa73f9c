"""One agent's session in each dialect by its official library: what is said, called and answered."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import openai

RULES = "Rule {n}: read before you write, run the tests, and say what you did, in one sentence.\n"
SYSTEM = "".join(RULES.format(n=n) for n in range(300))
"""More than 16,000 tokens, as coding agents send before the user's first word."""
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"command": {"type": "string"}},
    "required": ["command"],
}


class Session:
    """What was said so far, in the form of a dialect."""

    def __init__(self, *messages: Any) -> None:
        self._messages = [*messages]

    def say(self, text: str) -> None:
        self._messages.append({"role": "user", "content": text})


class Chat(Session):
    """OpenAI's chat completions, streamed."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        super().__init__({"role": "system", "content": SYSTEM})

    def answer(self, **more: Any) -> tuple[str, dict[str, Any] | None]:
        """The next text, and the arguments of a call."""
        tool: Any = {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}
        asked = {"model": "actor", "messages": self._messages, "tools": [tool], **more}
        with self._client.chat.completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
        self._messages.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        if not message.tool_calls:
            return message.content or "", None
        self._call = message.tool_calls[0]
        return message.content or "", json.loads(self._call.function.arguments)

    def returned(self, text: str) -> None:
        self._messages.append({"role": "tool", "tool_call_id": self._call.id, "content": text})


class Responses(Session):
    """OpenAI's responses, streamed and replayed item by item."""

    def __init__(self, url: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        super().__init__()

    def answer(self, **more: Any) -> tuple[str, dict[str, Any] | None]:
        """The next text, and the arguments of a call."""
        tool: Any = {"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False}
        asked: Any = {
            "model": "actor",
            "instructions": SYSTEM,
            "input": self._messages,
            "tools": [tool],
            **more,
        }
        with self._client.responses.stream(**asked) as stream:
            for _ in stream:
                pass
            response = stream.get_final_response()
        self._messages += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text, None
        self._id = calls[0].call_id
        return response.output_text, json.loads(calls[0].arguments)

    def returned(self, text: str) -> None:
        self._messages.append({"type": "function_call_output", "call_id": self._id, "output": text})


class Messages(Session):
    """Anthropic's messages, streamed."""

    def __init__(self, url: str) -> None:
        self._client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        super().__init__()

    def answer(self, **more: Any) -> tuple[str, dict[str, Any] | None]:
        """The next text, and the arguments of a call."""
        asked: Any = {"model": "actor", "system": SYSTEM, "messages": self._messages, "max_tokens": 1000,
                      "tools": [{"name": "bash", "input_schema": SCHEMA}], **more}  # fmt: skip
        with self._client.messages.stream(**asked) as stream:
            content = stream.get_final_message().content
        self._messages.append({"role": "assistant", "content": [block.to_dict() for block in content]})
        text = "".join(block.text for block in content if block.type == "text")
        calls = [block for block in content if block.type == "tool_use"]
        if not calls:
            return text, None
        self._id = calls[0].id
        return text, dict(calls[0].input)

    def returned(self, text: str) -> None:
        result = {"type": "tool_result", "tool_use_id": self._id, "content": text}
        self._messages.append({"role": "user", "content": [result]})


class Ollama(Session):
    """Ollama's chat, streamed."""

    def __init__(self, url: str) -> None:
        self._client = ollama.Client(host=url)
        super().__init__({"role": "system", "content": SYSTEM})

    def answer(self, **more: Any) -> tuple[str, dict[str, Any] | None]:
        """The next text, and the arguments of a call."""
        tool = {"type": "function", "function": {"name": "bash", "description": "", "parameters": SCHEMA}}
        text, calls = "", list[Any]()
        for part in self._client.chat("actor", self._messages, tools=[tool], stream=True, **more):
            text += part.message.content or ""
            calls += part.message.tool_calls or []
        message = {"role": "assistant", "content": text, "tool_calls": [call.model_dump() for call in calls]}
        self._messages.append(message if calls else {"role": "assistant", "content": text})
        return text, dict(calls[0].function.arguments) if calls else None

    def returned(self, text: str) -> None:
        self._messages.append({"role": "tool", "tool_name": "bash", "content": text})


DIALECTS = [Chat, Responses, Messages, Ollama]
