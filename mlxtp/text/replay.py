"""A model's own tokens of an answer, found again when a client sends its conversation back. Pure.

A template rewrites earlier answers, and the KV cache lacks that text. So `AnswerMemory` maps messages to the
tokens of prompt and answer. Its keys ignore what clients change: white space, ids, missing thoughts, the form
of arguments.
"""

from __future__ import annotations

import json
import secrets
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING

from ..errors import RequestError
from .chat_template import SHORT_IDS, match_results, template_options
from .conversation import Call, ChatMessage, Conversation, tool_json
from .json_limits import integral
from .transcript import Finish, WholeAnswer

if TYPE_CHECKING:
    from .tokenizer import Text

MOST_BYTES = 64 << 20  #: Memory for remembered tokens.
OVERHEAD_BYTES = 500  #: Memory of one answer besides tokens and thoughts.
_DIGEST_BYTES = 64  # memory of a digest in Python, including its place in a tuple
_LAST = 256  # tokens whose text is compared with the end of an answer
_SHOWN = 48  # characters of an answer's end to find in that text
_LONGEST_STOP = 64  # tokens of a stop string
_INTO = 8  # tokens before a border of tokens and text
_BRACKETS = "\"'}]) \n\t"  # signs that end arguments


# --- conversations, in a form that clients do not change ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class Beginning:
    """The messages before `stop`. The last ones, from `start` on, are one answer."""

    start: int
    stop: int
    key: bytes  #: of everything except thoughts
    thoughts: Sequence[bytes]  #: a digest per answer of the whole conversation; b"" without thoughts


def beginnings(base: bytes, messages: Sequence[ChatMessage]) -> Iterator[Beginning]:
    """Yield each beginning that ends with an answer, then the whole. All share one list of thoughts."""
    key, thoughts, at = base, list[bytes](), 0
    for role, group in groupby(match_results(messages, SHORT_IDS), key=lambda turn: turn.role):
        run = list(group)
        if role == "assistant":
            calls = [call for turn in run for call in turn.calls]
            key = _answer_key(key, _joined(turn.text for turn in run), calls)
            thoughts.append(_thought_digest("".join(turn.reasoning for turn in run)))
            yield Beginning(at, at + len(run), key, thoughts)
        else:
            for turn in run:
                key = _digest(key, role, turn.text, turn.call_id, turn.name)
        at += len(run)
    if messages and messages[-1].role != "assistant":
        yield Beginning(at, at, key, thoughts)


def base_key(conversation: Conversation, *about: str) -> bytes:
    """Return the key of a prompt's other parts. `about`: client, model and template."""
    tools = [tool_json(tool) for tool in conversation.tools]
    options = sorted(template_options(conversation).items())
    return _digest(b"", *about, json.dumps([tools, options], default=str))


def _digest(before: bytes, *parts: str) -> bytes:
    found = blake2b(before, digest_size=16)
    for part in parts:
        data = part.encode(errors="surrogatepass")
        found.update(len(data).to_bytes(8, "little") + data)
    return found.digest()


def _joined(texts: Iterable[str]) -> str:
    return "\n".join([stripped for text in texts if (stripped := text.strip())])


def _answer_key(before: bytes, text: str, calls: Sequence[Call]) -> bytes:
    pairs = [part for call in calls for part in (call.name, _arguments(call.arguments))]
    return _digest(before, "assistant", text, *pairs)


def _thought_digest(text: str) -> bytes:
    """Return a digest that ignores white space, which clients change; b"" without thoughts."""
    letters = "".join(text.split())
    return _digest(b"", letters) if letters else b""


def _arguments(text: str) -> str:
    """Return JSON in a normal form, where 40.0 is 40."""
    try:
        value = json.loads(text or "{}", parse_float=lambda number: integral(float(number)))
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return text.strip()


# --- answers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RememberedAnswer:
    """Tokens of a prompt and its answer, without the end token."""

    tokens: array[int]
    text: str  #: shown after the tokens
    thoughts: tuple[bytes, ...]  #: as in `Beginning`
    ids: tuple[str, ...]  #: of its calls
    behind: str | None = None  #: text after the arguments, if a call ended the answer instead of the model

    @property
    def size(self) -> int:
        return 4 * len(self.tokens) + _DIGEST_BYTES * len(self.thoughts) + OVERHEAD_BYTES

    def continued(self, text: Text, turns: Sequence[ChatMessage]) -> Replay | None:
        """Return the prompt that is this answer. The client may have added white space, not taken any."""
        given, written = turns[-1].text, text.decoded(self.tokens[-_LAST:]) + self.text
        same = given.rstrip()
        shown, space = same[-_SHOWN:], given[len(same) :]
        more = "" if written.endswith(shown + space) else space
        if len(turns) > 1 or not same or not written.endswith(shown + space.removesuffix(more)):
            return None
        return Replay(tuple(self.tokens), self.text + more, True, self.thoughts)


class AnswerMemory:
    """Remembered answers within `most_bytes`, for any thread. It drops the least recently used."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: dict[bytes, RememberedAnswer] = {}
        self._size = 0

    def put(self, keys: set[bytes], answer: RememberedAnswer) -> None:
        with self._lock:
            for key in keys:
                self._drop(key)
                self._kept[key] = answer
                self._size += answer.size
            while self._size > self._most_bytes:
                self._drop(next(iter(self._kept)))

    def find(self, places: Sequence[Beginning]) -> tuple[Beginning, RememberedAnswer] | None:
        with self._lock:
            for place in reversed(places):
                answer = self._kept.get(place.key)
                pairs = zip(place.thoughts, answer.thoughts if answer else (), strict=False)
                if answer is not None and all(not sent or sent == known for sent, known in pairs):
                    self._kept[place.key] = self._kept.pop(place.key)
                    return place, answer
        return None

    def _drop(self, key: bytes) -> None:
        if (answer := self._kept.pop(key, None)) is not None:
            self._size -= answer.size


@dataclass(frozen=True, slots=True)
class CompleteAnswer:
    prompt: Sequence[int]
    tokens: Sequence[int]
    record: WholeAnswer
    finish: Finish


def to_remember(
    text: Text, eos: Sequence[int], place: Beginning, whole: CompleteAnswer
) -> tuple[set[bytes], RememberedAnswer] | None:
    """Return the keys of an answer to the messages up to `place`, and the answer without one of `eos`.

    None if its tokens are not the answer that the client sees, as after a cut in a call.
    """
    record, finish, answer = whole.record, whole.finish, whole.tokens
    calls = record.calls
    # Clients join its pieces with or without a line break.
    texts = {_joined(record.texts), record.text.strip()}
    if not (calls or any(texts)) or (finish.reason == "length" and not record.ends_in_text):
        return None
    shown, behind = "", None
    if answer and answer[-1] in eos:
        answer = answer[:-1]
    elif finish.stopped_by is not None:
        if (cut := _before_stop(text, answer, finish.stopped_by)) is None or not record.ends_in_text:
            return None
        answer, shown = cut
    elif finish.reason == "tool_calls":
        written, end = text.decoded(answer[-_LAST:]), calls[-1].arguments[-_SHOWN:]
        at = written.rfind(end)
        behind = written[at + len(end) :] if at >= 0 else None
    if not answer or not set(eos).isdisjoint(answer):
        return None
    thoughts = (*place.thoughts, _thought_digest(record.reasoning))
    ids = tuple([call.id for call in calls])
    kept = RememberedAnswer(array("i", (*whole.prompt, *answer)), shown, thoughts, ids, behind)
    return {_answer_key(place.key, form, calls) for form in texts}, kept


def _before_stop(text: Text, answer: Sequence[int], stop: str) -> tuple[Sequence[int], str] | None:
    """Return the tokens before a stop string, and the text between both; None if unclear."""
    behind, count, last = 0, 0, ""  # characters from the stop string on, their tokens, the tokens' text
    for more in range(1, min(len(answer), _LONGEST_STOP) + 1):
        at = (longer := text.decoded(answer[-more:])).find(stop)
        if at >= 0 and behind == len(longer) - at:
            break  # an earlier stop string would overlap it
        if at >= 0:
            behind, count, last = len(longer) - at, more, longer
    rest = answer[: len(answer) - count]
    return (rest, last[:-behind]) if count and _joins(text, rest, answer[-count:], last) else None


def _joins(text: Text, before: Sequence[int], after: Sequence[int], written: str) -> bool:
    before = before[-_INTO:]
    return text.decoded((*before, *after)) == text.decoded(before) + written


# --- prompts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replay:
    """A prompt that begins with known tokens. `rest` is the text after them."""

    tokens: tuple[int, ...]
    rest: str
    border: bool  #: False if the rest begins with a special token, or with text of its own.
    thoughts: tuple[bytes, ...]

    def encoded(self, text: Text) -> tuple[int, ...] | None:
        """Return the whole prompt's tokens; None if no tokens spell this text. Raises RequestError."""
        rest = text.encoded(self.rest, special=False)
        if self.border and not _joins(text, self.tokens, rest, self.rest):
            return None
        return (*self.tokens, *rest)


def replayed(
    text: Text, conversation: Conversation, place: Beginning, answer: RememberedAnswer, eos: Sequence[int]
) -> Replay | None:
    """Return the prompt that begins with the tokens of an answer; None if the template prevents it.

    The messages before the answer, except thoughts, must look the same before any other message.
    """
    if conversation.continues and place.stop == len(conversation.messages):
        return answer.continued(text, conversation.messages[place.start : place.stop])
    mark = f"mlxtp{secrets.token_hex(8)}"
    if (messages := _marked(conversation.messages, place, answer.ids, mark)) is None:
        return None
    before = messages[: place.start]
    try:
        whole = text.rendered(replace(conversation, messages=messages), exact=True)
        first = text.rendered(replace(conversation, messages=before), prompting=False, exact=True)
    except RequestError:
        return None
    at = whole.rfind(mark)
    if at < 0 or not whole.startswith(first):
        return None
    written = text.decoded(answer.tokens[-_LAST:]) + answer.text
    behind = whole[at + len(mark) :]
    turns = conversation.messages[place.start : place.stop]
    if answer.ids:
        ends = [end for token in {*eos, *text.eos} if (end := text.decoded((token,)))]
        rest = _behind_calls(behind, written, text.tool_calls.ends, ends, answer.behind)
    else:
        rest = _behind_text(behind, written, turns[-1].text)
    if not rest:
        return None
    border = bool(answer.text) or not rest.startswith(tuple(text.specials.values()))
    return Replay(tuple(answer.tokens), answer.text + rest, border, answer.thoughts)


def _marked(
    messages: Sequence[ChatMessage], place: Beginning, ids: Sequence[str], mark: str
) -> tuple[ChatMessage, ...] | None:
    """Return the messages with `mark` as the answer's text or arguments, old ids, and no earlier thoughts."""
    called = [call for turn in messages[place.start : place.stop] for call in turn.calls]
    changed = dict(zip([call.id for call in called], ids, strict=True))
    if len(changed) < len(ids):  # an id repeats
        return None
    arguments = json.dumps({mark: mark})
    calls = tuple([Call(changed[call.id], call.name, arguments) for call in called])
    before = [replace(turn, reasoning="") for turn in messages[: place.start]]
    rest = messages[place.stop :]
    after = [replace(turn, call_id=changed.get(turn.call_id, turn.call_id)) for turn in rest]
    return (*before, ChatMessage("assistant", "" if calls else mark, calls=calls), *after)


def _behind_text(behind: str, written: str, shown: str) -> str | None:
    """Return the template's text after an answer, without markup that the model wrote itself."""
    end = shown.strip()[-_SHOWN:]
    at = written.rfind(end)
    if at < 0:
        return None
    markup = written[at + len(end) :].strip()
    return behind.removeprefix(markup) if behind.startswith(markup) else None


def _behind_calls(
    behind: str, written: str, marks: Sequence[str], ends: Sequence[str], cut: str | None
) -> str | None:
    """Return the template's text after calls that `marks` end; `ends` end the answer. `cut`: its `behind`."""
    written = written.rstrip()
    if cut is not None and not written.endswith(tuple(marks)):
        after = behind.removeprefix('"}')
        return after.removeprefix(cut) if after != behind and after.startswith(cut) else None
    stop = min([at for end in ends if (at := behind.find(end)) >= 0], default=-1)
    closing = behind[:stop].rstrip()
    if stop < 0:
        return None
    marks = [mark for mark in marks if mark not in ends]
    if mark := next(filter(closing.endswith, marks), ""):
        complete = closing.count(mark) == 1 and written.endswith(tuple(marks))
    else:
        complete = not closing.strip(_BRACKETS)
    return behind[stop:] if complete else None
