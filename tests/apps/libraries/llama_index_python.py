"""LlamaIndex by OpenAILike: chat, stream, complete, tools, structured output."""

from checks import CALL, MODEL, NINE, SAY, URL, Answer, check, forced, look_up, values
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(model=MODEL, api_base=f"{URL}/v1", api_key="none", is_chat_model=True, max_retries=0,
                 is_function_calling_model=True, context_window=16_384)  # fmt: skip
message = lambda text: [ChatMessage(role="user", content=text)]  # noqa: E731


async def agent() -> str:
    return str(await FunctionAgent(tools=[look_up], llm=llm).run(CALL))


check("chat", lambda: llm.chat(message(SAY)).message.content, "blue")
check("stream", lambda: "".join(part.delta or "" for part in llm.stream_chat(message(SAY))), "blue")
check("complete", lambda: llm.complete(SAY).text, "blue")
check("tool loop", agent, "FALCON-5", scripted=True)
check("structured", lambda: values(llm.as_structured_llm(Answer).chat(message(forced("Answer"))).raw), NINE)
