"""pydantic-ai over OpenAI's chat and responses and over Anthropic, with both kinds of output."""

from checks import CALL, JSON, MODEL, NINE, PART, SAY, URL, Answer, check, forced, look_up, values
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


def agent(**options) -> Agent:
    if PART == "anthropic":
        model = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="none"))
    else:
        kind = OpenAIResponsesModel if PART == "responses" else OpenAIChatModel
        model = kind(MODEL, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key="none"))
    return Agent(model, **options)


async def streamed() -> str:
    async with agent().run_stream(SAY) as result:
        return "".join([part async for part in result.stream_text(delta=True)])


both = f"{CALL} {JSON}"
check("text", lambda: agent().run_sync(SAY).output, "blue")
check("stream", streamed, "blue")
check("tool loop", lambda: agent(tools=[look_up]).run_sync(CALL).output, "FALCON-5", scripted=True)
output = ToolOutput(Answer, name="Answer")
check("tool output", lambda: values(agent(output_type=output).run_sync(forced("Answer")).output), NINE)
if PART != "anthropic":  # the library refuses it
    native = NativeOutput(Answer)
    check("native output", lambda: values(agent(output_type=native).run_sync(forced("Answer")).output), NINE)
    check("native output beside tools",
          lambda: values(agent(output_type=native, tools=[look_up]).run_sync(both).output), NINE,
          scripted=True)  # fmt: skip
