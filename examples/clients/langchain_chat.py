"""LangChain: an answer, the same as it comes, a tool, and JSON. `pip install langchain-openai`"""

import os
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

model = ChatOpenAI(
    base_url=os.environ.get("MLXTP_URL", "http://127.0.0.1:52415") + "/v1",
    api_key=os.environ.get("MLXTP_KEY", "none"),
    model="default",  # whatever is loaded
    stream_usage=True,
)
REPEAT = "Repeat exactly: FALCON-MERCURY-7749"


def answer() -> None:
    print(model.invoke(REPEAT).content)


def stream() -> None:
    whole = None
    for chunk in model.stream(REPEAT):
        print(chunk.content, end="", flush=True)
        whole = chunk if whole is None else whole + chunk
    print(f"\n{whole.usage_metadata['output_tokens']} tokens")


@tool
def weather(city: Literal["Lisbon", "Oslo", "Rome"]) -> str:
    """The weather in a city."""
    return {"Lisbon": "24 degrees, sun", "Oslo": "7 degrees, rain", "Rome": "21 degrees, clouds"}[city]


def tools() -> None:
    """Ask, call what the model wants to have called, and tell it what came of that."""
    messages = [HumanMessage("How is the weather in Oslo?")]
    must_call = model.bind_tools([weather], tool_choice="required", strict=True)  # else: up to the model
    messages.append(must_call.invoke(messages))
    for call in messages[-1].tool_calls:
        result = weather.invoke(call)
        print(f"weather({call['args']['city']!r}) = {result.content!r}")
        messages.append(result)
    print(model.bind_tools([weather]).invoke(messages).content)


class Verdict(BaseModel):
    wet: bool


def structured() -> None:
    print(model.with_structured_output(Verdict, method="json_schema").invoke("Is water wet?"))


for example in (answer, stream, tools, structured):
    print(f"== {example.__name__}")
    example()
