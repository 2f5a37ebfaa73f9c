"""Anthropic's own library: text, stream, tools, structured output."""

import anthropic
from checks import CALL, JSON, MODEL, NINE, SAY, URL, Answer, check, forced, values

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
ask = {"model": MODEL, "max_tokens": 1000}
user = lambda text: [{"role": "user", "content": text}]  # noqa: E731
LOOK_UP = {"name": "look_up", "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
ANSWER = {"name": "Answer", "input_schema": Answer.model_json_schema()}


def streamed() -> str:
    with client.messages.stream(messages=user(SAY), **ask) as stream:
        return stream.get_final_text()


def tool() -> str:
    first = client.messages.create(messages=user(CALL), tools=[LOOK_UP], **ask)
    [call] = [block for block in first.content if block.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": f"FALCON-{call.input['n']}"}
    told = [
        *user(CALL),
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    return client.messages.create(messages=told, tools=[LOOK_UP], **ask).content[0].text


def forced_tool() -> str:
    choice = {"type": "tool", "name": "Answer"}
    found = client.messages.create(messages=user(forced("Answer")), tools=[ANSWER], tool_choice=choice, **ask)
    return values(Answer(**found.content[0].input))


def parsed() -> str:
    return values(client.messages.parse(messages=user(JSON), output_format=Answer, **ask).parsed_output)


check("text", lambda: client.messages.create(messages=user(SAY), **ask).content[0].text, "blue")
check("stream", streamed, "blue")
check("tool loop", tool, "FALCON-5", scripted=True)
check("forced tool", forced_tool, NINE)
check("structured output", parsed, NINE)
