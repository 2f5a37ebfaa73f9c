"""instructor: each mode that an OpenAI or Anthropic endpoint can have."""

import anthropic
import instructor
import openai
from checks import MODEL, NINE, URL, check, forced, values
from instructor import Mode
from pydantic import BaseModel


class Answer(BaseModel):
    """An answer."""

    answer: int
    word: str


CHAT = ("TOOLS", "TOOLS_STRICT", "PARALLEL_TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON")
SCRIPTED = ("JSON", "MD_JSON", "ANTHROPIC_JSON", "PARALLEL_TOOLS")  # only the prompt tells the schema


def extracted(mode: str):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": forced("Answer")}], "max_retries": 0}
    if mode.startswith("ANTHROPIC"):
        native = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
        client, asked["max_tokens"] = instructor.from_anthropic(native, mode=Mode[mode]), 1000
    else:
        native = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
        client = instructor.from_openai(native, mode=Mode[mode])
    if mode == "PARALLEL_TOOLS":
        from collections.abc import Iterable

        return values(next(iter(client.chat.completions.create(response_model=Iterable[Answer], **asked))))
    return values(client.chat.completions.create(response_model=Answer, **asked))


for mode in (*CHAT, "RESPONSES_TOOLS", "ANTHROPIC_TOOLS", "ANTHROPIC_JSON"):
    check(mode, lambda: extracted(mode), NINE, scripted=mode in SCRIPTED)  # noqa: B023
