"""LangChain: an answer, the same as it comes, a tool, and JSON. `pip install langchain-openai`"""

import os

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
def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


def tools() -> None:
    """Ask, call what the model wants to have called, and tell it what came of that."""
    messages = [HumanMessage("What is twice 21?")]
    must_call = model.bind_tools([double], tool_choice="required")  # leave it away: up to the model
    message = must_call.invoke(messages, max_tokens=60)
    messages.append(message)
    for call in message.tool_calls:
        result = double.invoke(call)
        print(f"double({call['args']['number']}) = {result.content}")
        messages.append(result)
    print(model.bind_tools([double]).invoke(messages).content)


class Verdict(BaseModel):
    wet: bool


def structured() -> None:
    print(model.with_structured_output(Verdict, method="json_schema").invoke("Is water wet?"))


for example in (answer, stream, tools, structured):
    print(f"== {example.__name__}")
    example()
