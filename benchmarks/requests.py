"""Cost of a chat request at the agent, besides its template, its tokens and its HTTP."""

from __future__ import annotations

import json
import random
import time

from mlxtp.text.answers import AnswerParser, ReadingPlan
from mlxtp.text.calls import CallReader
from mlxtp.text.chat_template import TemplateTraits, left_out, template_messages
from mlxtp.text.conversation import Call, ChatMessage, Conversation, Tool, tool_json
from mlxtp.text.markups import JSON_CALLS, Markup

from .measures import Row, absolute
from .stage import Stage

_ROUNDS = 200
_TURNS = 7  # of four messages, behind two


async def measure(stage: Stage) -> list[Row]:
    """The time to make a request's messages, to check its prompt, and to get ready for its answer."""
    stage.say("requests")
    conversation = _conversation(random.Random(1))
    tools = [tool_json(tool) for tool in conversation.tools]
    traits = TemplateTraits(tools=True)
    messages_ms, reading_ms = [], []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        messages = template_messages(conversation, traits, JSON_CALLS.written)
        made = time.perf_counter()
        prompt = _prompt(tools, messages)
        checked = time.perf_counter()
        assert not left_out(prompt, messages, tools)
        ended = time.perf_counter()
        messages_ms.append((ended - checked + made - began) * 1e3)
        plan = ReadingPlan(Markup(("<think>", "</think>")), calls=CallReader(JSON_CALLS, conversation.tools))
        parser = AnswerParser(plan)
        assert not [*parser.push("<tool_call>"), *parser.push('{"name": "tool_3"')]
        reading_ms.append((time.perf_counter() - ended) * 1e3)
    return [
        absolute("a chat of 30 messages and 20 tools, its messages and their check", messages_ms),
        absolute("its parser, up to the first call", reading_ms),
    ]


def _conversation(dice: random.Random) -> Conversation:
    def words(count: int) -> str:
        return " ".join(f"w{dice.randrange(5000)}" for _ in range(count))

    fields = {f"field_{n}": {"type": "string", "description": words(8)} for n in range(6)}
    tools = [
        Tool(f"tool_{n}", words(60), {"type": "object", "properties": fields, "required": ["field_0"]})
        for n in range(20)
    ]
    turns = [ChatMessage("system", words(1500)), ChatMessage("user", words(40))]
    for n in range(_TURNS):
        call = Call(f"call_{n}", f"tool_{n}", json.dumps({"field_0": words(60)}))
        turns += [
            ChatMessage("assistant", words(20), words(60), (call,)),
            ChatMessage("tool", words(400), call_id=call.id),
            ChatMessage("assistant", words(80)),
            ChatMessage("user", words(40)),
        ]
    return Conversation(tuple(turns), tuple(tools))


def _prompt(tools: list[dict[str, object]], messages: list[dict[str, object]]) -> str:
    """Return what a template writes, roughly."""
    calls = [f"{message['content']}{json.dumps(message.get('tool_calls', ''))}" for message in messages]
    return "\n".join([*map(json.dumps, tools), *calls])
