"""OpenAI's client library: an answer, the same as it comes, tools, and JSON. `pip install openai`"""

import json
import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("MLXTP_URL", "http://127.0.0.1:52415") + "/v1",
    api_key=os.environ.get("MLXTP_KEY", "none"),
)
MODEL = "default"  # whatever is loaded
REPEAT = [{"role": "user", "content": "Repeat exactly: FALCON-MERCURY-7749"}]


def answer() -> None:
    completion = client.chat.completions.create(model=MODEL, messages=REPEAT)
    print(completion.choices[0].message.content)


def stream() -> None:
    chunks = client.chat.completions.create(
        model=MODEL, messages=REPEAT, stream=True, stream_options={"include_usage": True}
    )
    for chunk in chunks:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print(f"\n{chunk.usage.completion_tokens} tokens")


def weather(city: str) -> str:
    return {"Lisbon": "24 degrees, sun", "Oslo": "7 degrees, rain", "Rome": "21 degrees, clouds"}[city]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Lisbon", "Oslo", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def tools() -> None:
    """Ask, call what the model wants to have called, tell it what came of that, until it has an answer."""
    messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
    choice = "required"  # "auto" leaves it to the model; the embedded one would never call anything
    while True:
        message = (
            client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, tool_choice=choice)
            .choices[0]
            .message
        )
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message)
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = weather(**arguments)
            print(f"weather({arguments['city']!r}) = {result!r}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        choice = "auto"


def structured() -> None:
    schema = {
        "type": "object",
        "properties": {"wet": {"type": "boolean"}},
        "required": ["wet"],
        "additionalProperties": False,
    }
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Is water wet?"}],
        response_format={"type": "json_schema", "json_schema": {"name": "verdict", "schema": schema}},
    )
    print(json.loads(completion.choices[0].message.content))


for example in (answer, stream, tools, structured):
    print(f"== {example.__name__}")
    example()
