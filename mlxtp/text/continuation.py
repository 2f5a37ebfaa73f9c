"""Prompts that end inside an answer: the client gave its beginning, and the model continues it. Pure.

The template writes a mark where the beginning belongs, and the prompt is cut there. So the prompt ends
exactly with the client's text, even if the template changes texts, and without the end of the message.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from dataclasses import replace

from ..errors import RequestError
from .chat_template import REFUSED
from .conversation import ChatMessage, Conversation
from .markups import USUAL_THINK, Markup

#: Renders a conversation; with True also the beginning of the answer. Raises RequestError.
Render = Callable[[Conversation, bool], str]
_OPENING = 200  # most characters that a template writes around a thought before an answer


def continued_prompt(conversation: Conversation, markup: Markup, render: Render) -> str:
    """Return the prompt that ends with the last message, the assistant's. Raises RequestError."""
    *before, last = conversation.messages
    opens, closes = markup.think or USUAL_THINK
    asked = replace(conversation, messages=tuple(before), continues=False)
    raw = markup.think is not None and last.text.lstrip().startswith(opens)
    thinks = closes not in last.text if raw else not last.text
    if thinks and (markup.think is None or conversation.thinking is False):
        why = "does not think" if markup.think is None else "is not to think here"
        raise _refused(f"begins with thoughts, but the model {why}; leave the thoughts out, or turn them on")
    if raw:
        return _at_thought(render(asked, True), opens, closes)[0] + last.text
    if thinks:
        prompt = render(asked, True)
        if prompt.rstrip().endswith(opens):
            return prompt + last.reasoning
        written = _up_to_mark(asked, render, thought=True)
        return (written or "".join(_at_thought(prompt, opens, closes))) + last.reasoning
    head = _up_to_mark(asked, render, last.reasoning)
    if head is None:
        raise _refused("cannot be continued: the model's chat template writes it in another form")
    thought = last.reasoning.strip()
    if thought and thought not in head:  # the template drops thoughts
        prompt = render(asked, True)
        if prompt.rstrip().endswith(opens):
            head = f"{prompt}{thought}\n{closes}\n\n"
    if head.rstrip().endswith(opens):  # the template begins a thought even before text
        head = _at_thought(head, opens, closes)[0]
    return head + last.text


def _refused(why: str) -> RequestError:
    remedy = "end with a message of the user"
    return RequestError(f"the last message, the assistant's, {why}; or {remedy}", param="messages")


def _at_thought(prompt: str, opens: str, closes: str) -> tuple[str, str]:
    """Return the prompt without a thought that the template begins, or skips, and the start of a thought."""
    start, end = re.escape(opens), re.escape(closes)
    pattern = re.compile(rf"(?:({start}\s?)\s*(?:{end})?|{end})\s*\Z")
    found = pattern.search(prompt, max(0, len(prompt) - _OPENING))  # else quadratic
    usual = opens + "\n" * (opens == USUAL_THINK[0])
    return prompt[: found.start() if found else None], (found and found[1]) or usual


def _up_to_mark(
    asked: Conversation, render: Render, reasoning: str = "", *, thought: bool = False
) -> str | None:
    """Return what the template writes before the text, or `thought`, of a last message; None if unclear.

    A template that refuses such a message at the end may take it before another one.
    """
    mark, other = (f"mlxtp{secrets.token_hex(8)}" for _ in range(2))
    marked = ChatMessage("assistant", other, mark) if thought else ChatMessage("assistant", mark, reasoning)
    asked = replace(asked, messages=(*asked.messages, marked))
    for prompting in (False, True):
        try:
            before, found, after = render(asked, prompting).partition(mark)
        except RequestError as error:
            if error.status != REFUSED or (prompting and not thought and mark not in error.detail):
                raise
            continue
        if found and mark not in after:
            return before
    return None
