"""LangChain over OpenAI's chat and responses, Anthropic and Ollama, with every structured method."""

from checks import CALL, JSON, MODEL, NINE, PART, SAY, URL, Answer, check, forced, look_up, values
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_core.tools import tool


def model():
    if PART == "anthropic":
        from langchain_anthropic import ChatAnthropic

        return ChatAnthropic(model=MODEL, base_url=URL, api_key="none", max_tokens=1000, max_retries=0)
    if PART == "ollama":
        from langchain_ollama import ChatOllama

        return ChatOllama(model=MODEL, base_url=URL)
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0,
                      use_responses_api=PART == "responses")  # fmt: skip


METHODS = {"anthropic": ["function_calling", "json_schema"]}  # it has no other
last = lambda found: str(found["messages"][-1].text)  # noqa: E731
asked = lambda text: {"messages": [("user", text)]}  # noqa: E731
beside = lambda: create_agent(model(), [tool(look_up)], response_format=ProviderStrategy(Answer))  # noqa: E731

check("invoke", lambda: model().invoke(SAY).text, "blue")
check("stream", lambda: "".join(part.text for part in model().stream(SAY)), "blue")
check(
    "tool loop",
    lambda: last(create_agent(model(), [tool(look_up)]).invoke(asked(CALL))),
    "FALCON-5",
    scripted=True,
)
for method in METHODS.get(PART, ["function_calling", "json_schema", "json_mode"]):
    structured = lambda: model().with_structured_output(Answer, method=method)  # noqa: B023, E731
    check(method, lambda: values(structured().invoke(forced("Answer"))), NINE, scripted=method == "json_mode")  # noqa: B023
if PART in ("openai", "responses"):
    check("agent with tools and a schema",
          lambda: values(beside().invoke(asked(f"{CALL} {JSON}"))
                         ["structured_response"]), NINE, scripted=True)  # fmt: skip
