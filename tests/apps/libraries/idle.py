"""The longest silence that each official library's parser sees during a long prefill."""

import time

import anthropic
import ollama
import openai
from checks import MODEL, SAY, URL, check

LONGEST_S = 4.5
user = [{"role": "user", "content": SAY}]
by_openai = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
by_anthropic = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)


def silence(start) -> str:
    """Read a stream to its end. Raises AssertionError for a silence past the limit."""
    at, longest = time.monotonic(), 0.0
    for _ in start():
        longest, at = max(longest, time.monotonic() - at), time.monotonic()
    assert longest < LONGEST_S, f"nothing was parsed for {longest:.1f} s"
    return "quiet enough"


chat, completions, messages = by_openai.chat.completions, by_openai.completions, by_anthropic.messages
check("chat", lambda: silence(lambda: chat.create(model=MODEL, messages=user, stream=True)))
check("completions", lambda: silence(lambda: completions.create(model=MODEL, prompt=SAY, stream=True)))
check("responses", lambda: silence(lambda: by_openai.responses.create(model=MODEL, input=SAY, stream=True)))
check("ollama", lambda: silence(lambda: ollama.Client(URL).chat(MODEL, user, stream=True)))


def pings() -> str:
    """The library swallows pings: only a limit on reading shows that bytes came."""
    quick = by_anthropic.with_options(timeout=LONGEST_S)
    with quick.messages.stream(model=MODEL, messages=user, max_tokens=100) as stream:
        return stream.get_final_text()


check("messages", pings)
