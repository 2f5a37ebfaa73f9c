"""The servers of the ring: an agent with the embedded model, and an actor that calls the offered tools."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mlxtp.api.backend import ModelInfo

from ..apps import actor
from ..apps.bench import end, free_port, node, wait_for

MODEL = "tiny"
#: Values of arguments by their names, as the suites' questions name them.
VALUES = {"city": "Dallas", "state": "TX", "unit": "fahrenheit", "location": "San Francisco, CA"}
#: Questions of the suites that follow a conversation, anywhere in the prompt, and the right answers.
ANSWERS = {
    r"13 \* 24|Multiply 13": "312", r"1 ?\+ ?1\b": "2",
    r"5 \* 3|6 \* 5|15 \* 2": "30", r"name is (\w+)": "Your name is NAME.",
    r"[Ss]cience fair": '{"name": "science fair", "date": "Friday", "participants": ["Alice", "Bob"]}',
}  # fmt: skip


def arguments(schema: dict[str, Any], turn: int) -> Any:
    """Return a value of a schema: the first of an enum, the known value of a name, another in each turn."""
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type", "object")
    if kind == "object":
        return {
            name: VALUES.get(name, arguments(each, turn))
            for name, each in schema.get("properties", {}).items()
            if name in schema.get("required", schema.get("properties", {}))
        }
    if kind == "array":
        return [arguments(schema.get("items", {}), turn)] * schema.get("minItems", 0)
    return {"string": "x" * (turn + 1), "integer": turn + 1, "number": turn + 1, "boolean": True}.get(kind)


def wish(prompt: str) -> list[str]:
    """Return ways to say the next answer: calls of what is offered, their results, or the right answer."""
    turns = actor.TURN.findall(prompt)
    last = next((text for role, text in reversed(turns) if role != "assistant"), prompt)
    if results := actor.RESULT.findall(last):
        return [f"The tools returned: {' '.join(results)}"]
    for pattern, answer in ANSWERS.items():
        if found := re.findall(pattern, prompt):
            return [answer.replace("NAME", found[-1]) + " QED" * ("QED" in prompt), '{"result": 2}']
    offered = [json.loads(line) for each in actor.OFFERED.findall(prompt) for line in each.splitlines()]
    calls = [
        json.dumps({"name": tool["name"], "arguments": arguments(tool.get("parameters") or {}, len(turns))})
        for tool in (each["function"] for each in offered)
    ]
    if not calls:
        return ["I am a tiny test model."]
    marked = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    if "Orlando" in last:  # two cities are two calls
        marked[0] += f"\n{marked[0].replace('Dallas', 'Orlando').replace('TX', 'FL')}"
    return [*marked, *calls, f"[{calls[0]}]"]


class Player(actor.Actor):
    """The actor, under the embedded model's name."""

    wishes = staticmethod(wish)

    def models(self) -> tuple[ModelInfo, ...]:
        return tuple(replace(each, id=MODEL) for each in super().models())


@contextlib.contextmanager
def servers() -> Iterator[tuple[str, str]]:
    """The addresses of the agent and of the player."""
    with tempfile.TemporaryDirectory() as home, actor.stage(make=Player, context=32768) as found:
        at = f"127.0.0.1:{free_port()}"
        words = list(map(str, node(home, at)))
        process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            wait_for(f"http://{at}/v1/models", 120)
            yield f"http://{at}", found.url
        finally:
            end(process)
