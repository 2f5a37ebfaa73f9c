"""OpenAI's own library: chat, responses, streams, tools, structured output."""

import json

import openai
from checks import CALL, JSON, MODEL, NINE, SAY, URL, Answer, check, values

client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
LOOK_UP = {"name": "look_up", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}
user = lambda text: [{"role": "user", "content": text}]  # noqa: E731
chat = client.chat.completions


def streamed() -> str:
    with chat.stream(model=MODEL, messages=user(SAY)) as stream:
        return stream.get_final_completion().choices[0].message.content


def tool() -> str:
    asked = {"model": MODEL, "tools": [{"type": "function", "function": LOOK_UP}]}
    first = chat.create(messages=user(CALL), **asked).choices[0].message
    [call] = first.tool_calls
    result = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": f"FALCON-{json.loads(call.function.arguments)['n']}",
    }
    return chat.create(messages=[*user(CALL), first, result], **asked).choices[0].message.content


def responses() -> str:
    with client.responses.stream(model=MODEL, input=SAY) as stream:
        for _ in stream:
            pass
        return stream.get_final_response().output_text


def parsed() -> str:
    return values(
        chat.parse(model=MODEL, messages=user(JSON), response_format=Answer).choices[0].message.parsed
    )


def responses_parsed() -> str:
    return values(client.responses.parse(model=MODEL, input=JSON, text_format=Answer).output_parsed)


def beside_tools() -> str:
    tools = [openai.pydantic_function_tool(Answer, name="look_up")]
    asked = {"model": MODEL, "messages": user(JSON), "response_format": Answer}
    return values(chat.parse(tools=tools, **asked).choices[0].message.parsed)


check("text", lambda: chat.create(model=MODEL, messages=user(SAY)).choices[0].message.content, "blue")
check("stream", streamed, "blue")
check("tool loop", tool, "FALCON-5", scripted=True)
check("responses stream", responses, "blue")
check("parse", parsed, NINE)
check("responses parse", responses_parsed, NINE)
check("schema beside tools", beside_tools, NINE)
