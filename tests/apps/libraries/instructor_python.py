"""instructor: each of its modes that an OpenAI or Anthropic endpoint can have."""

import anthropic
import instructor
import openai
from checks import MODEL, NINE, URL, Answer, check, forced, values
from instructor import Mode

ELSEWHERE = (  # modes that other providers have
    "BEDROCK", "CEREBRAS", "COHERE", "FIREWORKS", "GEMINI", "GENAI", "MISTRAL", "OPENROUTER",
    "PERPLEXITY", "VERTEXAI", "WRITER", "XAI",
)  # fmt: skip
MODES = [mode.name for mode in Mode if not mode.name.startswith(ELSEWHERE)]
SCRIPTED = ("JSON", "JSON_O1", "PARALLEL_TOOLS")  # ends of modes in which only the prompt tells the schema


def extracted(mode: str):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": forced("Answer")}], "max_retries": 0}
    if mode.startswith("ANTHROPIC"):
        native = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
        client, asked["max_tokens"] = instructor.from_anthropic(native, mode=Mode[mode]), 1000
    else:
        native = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
        client = instructor.from_openai(native, mode=Mode[mode])
    if mode.endswith("PARALLEL_TOOLS"):
        from collections.abc import Iterable

        return values(next(iter(client.chat.completions.create(response_model=Iterable[Answer], **asked))))
    return values(client.chat.completions.create(response_model=Answer, **asked))


for mode in MODES:
    check(mode, lambda: extracted(mode), NINE, scripted=mode.endswith(SCRIPTED))  # noqa: B023
