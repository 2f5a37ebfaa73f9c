"""Prompts for the embedded model. Pure: the same numbers give the same text.

It counts, one character a token; it repeats strings of its prompt; it finds codes in long texts.
"""

from __future__ import annotations

import bisect
import random
import string
from collections.abc import Callable

from mlxtp.text.conversation import ChatMessage, Conversation
from mlxtp.text.tokenizer import Text

_NUMBERS = 60  #: The most it learned to count in one go: 171 tokens and more.
_LAST_START = 140
_SENTENCES = 400
_CODES = string.ascii_uppercase + string.digits


def ids(text: Text, message: str) -> tuple[int, ...]:
    """Return the prompt that a chat request with this one user message becomes."""
    return text.encoded(text.rendered(Conversation((ChatMessage("user", message),))), special=False)


def count(number: int) -> str:
    """A task whose answer has more than 150 tokens; different for each number up to 140."""
    start = 1 + number % _LAST_START
    return f"Count from {start} to {start + _NUMBERS - 1}."


def repeat(number: int, characters: int) -> str:
    """A task whose answer is a string of the prompt, random by its number."""
    draw = random.Random(number)
    return f"Repeat exactly: {''.join(draw.choices(_CODES, k=characters))}"


def haystack(number: int, fits: Callable[[str], bool]) -> tuple[str, str]:
    """Sentences that name codes, then a question for one; a second question for a second turn.

    The text is random by its number, and as long as `fits` allows.
    """
    draw = random.Random(number)
    names = ["".join(draw.choices(string.ascii_uppercase, k=6)) for _ in range(_SENTENCES)]
    sentences = [f"The code for {name} is {draw.randrange(1000, 10000)}. " for name in names]

    def text(count: int) -> str:
        return "".join(sentences[:count]) + question(names[0])

    count = bisect.bisect_left(range(_SENTENCES), True, key=lambda count: not fits(text(count))) - 1
    return text(count), question(names[count - 1])


def question(name: str) -> str:
    return f"What is the code for {name}?"
