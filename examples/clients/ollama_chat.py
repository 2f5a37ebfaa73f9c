"""Ollama's client library: models, an answer, the same as it comes, tools, and JSON. `pip install ollama`"""

import json
import os

from ollama import Client

client = Client(
    host=os.environ.get("MLXTP_URL", "http://127.0.0.1:52415"),
    headers={"Authorization": f"Bearer {os.environ.get('MLXTP_KEY', 'none')}"},
)
MODEL = "default"  # whatever is loaded
REPEAT = [{"role": "user", "content": "Repeat exactly: FALCON-MERCURY-7749"}]


def models() -> None:
    for model in client.list().models:
        print(model.model)


def answer() -> None:
    print(client.chat(model=MODEL, messages=REPEAT).message.content)


def stream() -> None:
    for part in client.chat(model=MODEL, messages=REPEAT, stream=True):
        print(part.message.content, end="", flush=True)
    print(f"\n{part.eval_count} tokens")


def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return {"Lisbon": "24 degrees, sun", "Oslo": "7 degrees, rain"}.get(city, f"{city}: 15 degrees, fog")


def tools() -> None:
    """The library makes a tool of the function. Whether it is called is up to the model."""
    messages = [{"role": "user", "content": "How is the weather in Oslo?"}]
    while True:
        message = client.chat(model=MODEL, messages=messages, tools=[weather]).message
        if not message.tool_calls:
            print(message.content)
            return
        messages.append(message)
        for call in message.tool_calls:
            result = weather(**call.function.arguments)
            print(f"{call.function.name}({call.function.arguments}) = {result!r}")
            messages.append({"role": "tool", "tool_name": call.function.name, "content": result})


def structured() -> None:
    schema = {
        "type": "object",
        "properties": {"wet": {"type": "boolean"}},
        "required": ["wet"],
        "additionalProperties": False,
    }
    response = client.chat(
        model=MODEL, messages=[{"role": "user", "content": "Is water wet?"}], format=schema
    )
    print(json.loads(response.message.content))


for example in (models, answer, stream, tools, structured):
    print(f"== {example.__name__}")
    example()
