"""Ollama's own library: models, chat, stream, generate, tools, format."""

import ollama
from checks import CALL, JSON, MODEL, NINE, SAY, URL, Answer, check, values

client = ollama.Client(host=URL)
user = lambda text: [{"role": "user", "content": text}]  # noqa: E731


def look_up(n: int) -> str:
    """Look a number up.

    Args:
        n: the number
    """
    return f"FALCON-{n}"


def tool() -> str:
    first = client.chat(MODEL, messages=user(CALL), tools=[look_up]).message
    [call] = first.tool_calls
    result = {"role": "tool", "tool_name": "look_up", "content": look_up(**call.function.arguments)}
    return client.chat(MODEL, messages=[*user(CALL), first, result], tools=[look_up]).message.content


def formatted() -> str:
    found = client.chat(MODEL, messages=user(JSON), format=Answer.model_json_schema())
    return values(Answer.model_validate_json(found.message.content))


check("list and show", lambda: client.list().models and client.show(MODEL).template is not None)
check("chat", lambda: client.chat(MODEL, messages=user(SAY)).message.content, "blue")
check(
    "stream", lambda: "".join(p.message.content for p in client.chat(MODEL, user(SAY), stream=True)), "blue"
)
check("generate", lambda: client.generate(MODEL, SAY).response, "blue")
check("tool loop", tool, "FALCON-5", scripted=True)
check("format", formatted, NINE)
