"""Anthropic's client library: an answer, the same as it comes, tools, tokens. `pip install anthropic`"""

import os

from anthropic import Anthropic

client = Anthropic(
    base_url=os.environ.get("MLXTP_URL", "http://127.0.0.1:52415"),  # without /v1
    api_key=os.environ.get("MLXTP_KEY", "none"),
)
MODEL = "default"  # whatever is loaded; so does every name that begins with claude-
REPEAT = [{"role": "user", "content": "Repeat exactly: FALCON-MERCURY-7749"}]


def answer() -> None:
    message = client.messages.create(model=MODEL, max_tokens=100, messages=REPEAT)
    print(message.content[0].text)


def stream() -> None:
    with client.messages.stream(model=MODEL, max_tokens=100, messages=REPEAT) as events:
        for text in events.text_stream:
            print(text, end="", flush=True)
        print(f"\n{events.get_final_message().usage.output_tokens} tokens")


def weather(city: str) -> str:
    return {"Lisbon": "24 degrees, sun", "Oslo": "7 degrees, rain", "Rome": "21 degrees, clouds"}[city]


TOOLS = [
    {
        "name": "weather",
        "description": "The weather in a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Lisbon", "Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    }
]


def tools() -> None:
    """Ask, call what the model wants to have called, tell it what came of that, until it has an answer."""
    messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
    choice = {"type": "any"}  # "auto" leaves it to the model; the embedded one would never call anything
    while True:
        message = client.messages.create(
            model=MODEL, max_tokens=200, messages=messages, tools=TOOLS, tool_choice=choice
        )
        if message.stop_reason != "tool_use":
            print(message.content[0].text)
            return
        results = []
        for block in message.content:
            if block.type == "tool_use":
                result = weather(**block.input)
                print(f"weather({block.input['city']!r}) = {result!r}")
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": result})
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        choice = {"type": "auto"}


def count() -> None:
    print(client.messages.count_tokens(model=MODEL, messages=REPEAT).input_tokens, "tokens of prompt")


for example in (answer, stream, tools, count):
    print(f"== {example.__name__}")
    example()
