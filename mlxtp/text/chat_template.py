"""Conversations, rewritten so that a model's chat template keeps all of them. Pure.

Templates refuse or drop messages that their authors did not expect. `traits_of` probes a template once,
`template_messages` adapts each conversation to it, and `left_out` checks the prompt.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby, product
from operator import itemgetter
from typing import Any

from ..errors import RequestError
from .conversation import Call, ChatMessage, Conversation, Tool, tool_json
from .json_limits import parsed
from .markups import JSON_CALLS, NO_MARKUP, Markup

Json = dict[str, Any]
#: Renders messages, with tools, and the beginning of an answer. Raises RequestError.
TemplateRender = Callable[[Sequence[Json], Sequence[Json]], str]
WriteCall = Callable[[str, Mapping[str, Any]], str]  #: takes a tool's name and the arguments


REFUSED = 400  #: status of a template's refusal
THOUGHT_PARTS = "parts"  #: Thoughts are parts of the content.
SHORT_IDS = "{number:09}"  #: The only ids that Mistral's templates accept.
NAMED_IDS = "functions.{name}:{index}"  #: Kimi's templates write ids instead of the tools' names.
IDS = ("", SHORT_IDS, NAMED_IDS)  #: "": the client's own ids


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    parts: bool = False  #: Content must be a list of parts.
    system: bool = True  #: a system message first
    systems: bool = True  #: several system messages first
    later_systems: bool = True  #: system messages further on
    neighbours: bool = True  #: two messages of one role in a row
    first_assistant: bool = True  #: The assistant begins.
    last_assistant: bool = True  #: The assistant ends.
    no_user: bool = True  #: no message by the user
    words_behind_results: bool = True  #: a user's message after a tool's result
    tools: bool = False  #: descriptions of tools
    tools_alone: bool = True  #: tools without a system message
    calls: bool = True  #: the assistant's calls
    arguments_as_text: bool = False  #: Arguments must be JSON text.
    ids: str = ""  #: form of ids, one of `IDS`
    several_calls: bool = True  #: in one message
    words_beside_calls: bool = True
    thoughts: str = "reasoning_content"  #: field for the thoughts of a message with calls; "": none
    thoughts_beside_words: bool = True  #: thoughts of a message that also has text
    cut_markers: tuple[str, ...] = ()  #: the model's markers that are missing from the assistant's text
    cuts_all: bool = False  #: All markers are missing from all text.


# --- messages for a template ------------------------------------------------------------------------------

#: Describes tools to a model whose template cannot, and requests calls in the format of Hermes and Qwen.
_TOOLS_IN_WORDS = """You can call functions to help with the user's request. These exist, one object a line:
<tools>
{tools}
</tools>

To call one, write its name and its arguments as a JSON object between these tags, and nothing else:
<tool_call>
{{"name": <name>, "arguments": <object>}}
</tool_call>"""
_SYSTEM_MARK = "[System message]\n"
_NO_WORDS = ""  # text of a missing first user message
_GO_ON = "Continue."  # text of a missing last user message
_BRIDGE = "OK."  # text of a missing assistant message between a tool's result and the user


def template_messages(
    conversation: Conversation,
    traits: TemplateTraits,
    write_call: WriteCall,
    *,
    prompting: bool = True,
    markup: Markup = NO_MARKUP,
) -> list[Json]:
    """Return messages for a template with these traits. `write_call` helps a template that omits calls."""
    turns = [_thoughts_apart(turn, markup.think) for turn in conversation.messages]
    turns = match_results(turns, traits.ids or SHORT_IDS * (not traits.several_calls), lost=_result_in_words)
    if not traits.tools:
        turns = [_result_in_words(turn) if turn.role == "tool" else turn for turn in turns]
        turns = _with_tools([_calls_in_words(turn, JSON_CALLS.written) for turn in turns], conversation.tools)
    elif not traits.calls:
        turns = [_calls_in_words(turn, write_call) for turn in turns]
    elif not traits.several_calls:
        turns = _one_at_a_time(turns)
    if not traits.words_beside_calls:
        turns = [part for turn in turns for part in _words_apart(turn, traits.neighbours)]
    turns = _with_systems(turns, traits, bool(conversation.tools) and not traits.tools_alone)
    first = traits.first_assistant and not conversation.tools  # Llama 3 lists tools in the first message
    if not traits.neighbours:
        turns = joined([turn for turn in turns if turn.text or turn.calls or turn.role != "assistant"])
    turns = _with_missing(turns, replace(traits, first_assistant=first), prompting)
    return [_message(_without_markers(turn, traits, markup.marks), traits) for turn in turns]


_WITH_MORE = (
    "system", "systems", "later_systems", "neighbours", "first_assistant", "last_assistant", "no_user",
    "words_behind_results", "several_calls",
)  # fmt: skip
_ONLY_TURNS: Json = dict.fromkeys(_WITH_MORE, False) | {"thoughts": "", "cuts_all": True}


def plainer(traits: TemplateTraits) -> list[TemplateTraits]:
    """Return the traits, then fewer: at last only user and assistant by turns, and all else in words."""
    turns = replace(traits, **_ONLY_TURNS)
    return list(dict.fromkeys((traits, replace(traits, thoughts=""), turns, replace(turns, tools=False))))


def template_options(conversation: Conversation) -> Json:
    options = dict(conversation.template_options)
    if conversation.thinking is not None:
        options |= {"enable_thinking": conversation.thinking, "thinking": conversation.thinking}
    return options


def _message(turn: ChatMessage, traits: TemplateTraits) -> Json:
    words = [{"type": "text", "text": turn.text}]
    message: Json = {"role": turn.role, "content": words if traits.parts else turn.text}
    field = "" if turn.text and turn.calls and not traits.thoughts_beside_words else traits.thoughts
    if turn.reasoning and field == THOUGHT_PARTS:
        thought = {"type": "thinking", "thinking": turn.reasoning}
        message["content"] = [thought, *(words if turn.text else [])]
    elif turn.reasoning and field:
        message[field] = turn.reasoning
    for call in turn.calls:
        given: object = _object(call.arguments)
        given = json.dumps(given, ensure_ascii=False) if traits.arguments_as_text else given
        function = {"name": call.name, "arguments": given}
        called = {"id": call.id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(called)
    if turn.role == "tool":
        message |= {"tool_call_id": turn.call_id, "name": turn.name}
    return message


def _object(arguments: str) -> Mapping[str, Any]:
    """Return arguments as an object for templates. Text that is not an object stays visible in one."""
    value = parsed(arguments or "{}")
    return value if isinstance(value, dict) else {"arguments": arguments}


def _thoughts_apart(turn: ChatMessage, think: tuple[str, str] | None) -> ChatMessage:
    """Split thoughts off the assistant's text: clients that do not know the markers leave them there."""
    if turn.role != "assistant" or think is None or not turn.text.lstrip().startswith(think[0]):
        return turn
    thought, closes, text = turn.text.lstrip().removeprefix(think[0]).partition(think[1])
    return replace(turn, text=text.lstrip(), reasoning=turn.reasoning or thought.strip()) if closes else turn


def _without_markers(turn: ChatMessage, traits: TemplateTraits, marks: Sequence[str]) -> ChatMessage:
    """Put a blank into markers that would make the template cut or refuse the text."""
    marks = marks if traits.cuts_all else traits.cut_markers if turn.role == "assistant" else ()
    text = turn.text
    for mark in marks:
        text = text.replace(mark, f"{mark[0]} {mark[1:]}")
    return replace(turn, text=text)


# --- tools and calls ----------------------------------------------------------------------------------------


def match_results(
    turns: Sequence[ChatMessage],
    ids: str = "",
    lost: Callable[[ChatMessage], ChatMessage] = lambda turn: turn,
) -> list[ChatMessage]:
    """Match each result to the first open call with its id, else without an id, and give it the call's name.

    A model may repeat an id. With `ids`, calls get new ids of that form. Consecutive results get the order of
    their calls; `lost` rewrites a result without a call.
    """
    matched: list[tuple[str, float, ChatMessage]] = []  # role, number of the answered call, message
    indices, open_ = count(), dict[str, deque[tuple[int, Call]]]()
    for turn in turns:
        calls: list[Call] = []
        latest: dict[str, deque[tuple[int, Call]]] = {}
        for call in turn.calls:
            index = next(indices)
            new = ids.format(number=index + 1, name=call.name, index=index) if ids else call.id
            calls.append(replace(call, id=new))
            latest.setdefault(call.id, deque()).append((index, calls[-1]))
        open_ |= latest
        place, found = math.inf, replace(turn, calls=tuple(calls))
        if turn.role == "tool" and (calls_of := open_.get(turn.call_id) or open_.get("")):
            place, answered = calls_of.popleft()
            found = replace(turn, call_id=answered.id, name=answered.name)
        elif turn.role == "tool":
            found = lost(turn)
        matched.append((turn.role, place, found))
    runs = [sorted(run, key=itemgetter(1)) for _, run in groupby(matched, key=itemgetter(0))]
    return [turn for run in runs for _, _, turn in run]


def _one_at_a_time(turns: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Give each call and its result a turn of their own, as Llama 3 requires. All ids differ."""
    answers = {turn.call_id: turn for turn in turns if turn.role == "tool"}
    apart: list[ChatMessage] = []
    for turn in turns:
        if turn.role == "tool":
            apart += [turn] if answers.pop(turn.call_id, None) is not None else []
        elif not turn.calls:
            apart.append(turn)
        for i, call in enumerate(turn.calls):
            apart.append(replace(ChatMessage("assistant", "") if i else turn, calls=(call,)))
            if (answer := answers.pop(call.id, None)) is not None:
                apart.append(answer)
    return apart


def _words_apart(turn: ChatMessage, neighbours: bool) -> list[ChatMessage]:
    """Move the text of a message with calls to its own message. Without `neighbours` the user intervenes."""
    if not turn.calls or not turn.text:
        return [turn]
    between = [] if neighbours else [ChatMessage("user", _GO_ON)]
    return [ChatMessage("assistant", turn.text), *between, replace(turn, text="")]


def _result_in_words(turn: ChatMessage) -> ChatMessage:
    return ChatMessage("user", f"<tool_response>\n{turn.text}\n</tool_response>")


def _calls_in_words(turn: ChatMessage, write_call: WriteCall) -> ChatMessage:
    calls = [write_call(call.name, _object(call.arguments)) for call in turn.calls]
    return replace(turn, text="\n".join([*filter(None, [turn.text]), *calls]), calls=())


def _with_tools(turns: Sequence[ChatMessage], tools: Sequence[Tool]) -> list[ChatMessage]:
    """Join consecutive results in one message by the user, and list the tools in the system message."""
    joined: list[ChatMessage] = []
    for results, group in groupby(
        turns, key=lambda turn: turn.role == "user" and turn.text.startswith("<tool_response>")
    ):
        run = list(group)
        joined += [ChatMessage("user", "\n".join([turn.text for turn in run]))] if results else run
    if not tools:
        return joined
    listed = "\n".join(json.dumps(tool_json(tool), ensure_ascii=False) for tool in tools)
    told = _TOOLS_IN_WORDS.format(tools=listed)
    if joined and joined[0].role == "system":
        return [ChatMessage("system", f"{joined[0].text}\n\n{told}"), *joined[1:]]
    return [ChatMessage("system", told), *joined]


# --- roles --------------------------------------------------------------------------------------------------


def _with_systems(turns: Sequence[ChatMessage], traits: TemplateTraits, needed: bool) -> list[ChatMessage]:
    """Merge leading system messages. Later ones, or all if the template takes none, become the user's."""
    start = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    first, later = list(turns[:start]), list(turns[start:])
    if not traits.systems:
        first = joined(first)
    if needed and not first and traits.system:
        first = [ChatMessage("system", "")]
    if not traits.system:
        first = [replace(turn, role="user") for turn in first]
    if not traits.later_systems:
        later = [
            ChatMessage("user", f"{_SYSTEM_MARK}{turn.text}") if turn.role == "system" else turn
            for turn in later
        ]
    return [*first, *later]


def joined(turns: Sequence[ChatMessage], border: str = "\n\n") -> list[ChatMessage]:
    """Join consecutive messages of one role, except tools' results, with a `border` between texts."""
    found: list[ChatMessage] = []
    for role, group in groupby(turns, key=lambda turn: turn.role):
        run = list(group)
        if role == "tool" or len(run) == 1:
            found += run
        else:
            text = border.join([turn.text for turn in run if turn.text])
            thoughts = "\n".join([turn.reasoning for turn in run if turn.reasoning])
            calls = tuple([call for turn in run for call in turn.calls])
            found.append(ChatMessage(role, text, thoughts, calls))
    return found


def _with_missing(turns: Sequence[ChatMessage], traits: TemplateTraits, prompting: bool) -> list[ChatMessage]:
    made: list[ChatMessage] = []
    for before, turn in zip([None, *turns], turns, strict=False):
        begins = before is None or before.role == "system"
        if turn.role == "assistant" and begins and not traits.first_assistant:
            made.append(ChatMessage("user", _NO_WORDS))
        called = before is not None and (before.role == "tool" or bool(before.calls))
        if turn.role == "user" and called and not traits.words_behind_results:
            made.append(ChatMessage("assistant", _BRIDGE))
        made.append(turn)
    if not traits.no_user and not any(turn.role == "user" for turn in made):
        made.append(ChatMessage("user", _NO_WORDS))
    if prompting and made and made[-1].role == "assistant" and not traits.last_assistant:
        made.append(ChatMessage("user", _GO_ON))
    return made


# --- abilities of a template --------------------------------------------------------------------------------

_PROBE_TOOL = Tool(
    "zq_tool",
    "zqdescription",
    {"type": "object", "properties": {"zq_key": {"type": "string"}}, "required": ["zq_key"]},
)
_OBJECTS = "'zq_key': '", "'type': '", '"thinking": "'  # of a template that wrote an object instead of a text
_THOUGHT_FIELDS = ("reasoning_content", "thinking", "reasoning", THOUGHT_PARTS)
_SYSTEM, _SYSTEM_2 = ChatMessage("system", "zqsystema"), ChatMessage("system", "zqsystemb")
_USER, _USER_2 = ChatMessage("user", "zqusera"), ChatMessage("user", "zquserb")
_SAID, _SAID_2 = ChatMessage("assistant", "zqsaida"), ChatMessage("assistant", "zqsaidb")
_CALL = Call("zq1", "zq_tool", '{"zq_key": "zqvaluea"}')
_CALL_2 = Call("zq2", "zq_tool", '{"zq_key": "zqvalueb"}')
_CALLED = ChatMessage("assistant", "", calls=(_CALL,))
_RESULT = ChatMessage("tool", "zqresulta", call_id=_CALL.id, name="zq_tool")
_RESULT_2 = ChatMessage("tool", "zqresultb", call_id=_CALL_2.id, name="zq_tool")


class _TemplateProbe:
    """Conversations of unique words, rendered with the traits known so far."""

    def __init__(self, render: TemplateRender) -> None:
        self._render = render
        self.traits = TemplateTraits()

    def learn(self, **traits: Any) -> None:
        self.traits = replace(self.traits, **traits)

    def prompt(self, *turns: ChatMessage, tools: bool = False) -> str:
        messages = [_message(turn, self.traits) for turn in match_results(turns, self.traits.ids)]
        try:
            return self._render(messages, [tool_json(_PROBE_TOOL)] if tools else [])
        except RequestError as error:
            if error.status != REFUSED:
                raise
            return ""

    def shows(self, *turns: ChatMessage, words: Sequence[str] = (), tools: bool = False) -> bool:
        """Return True if the prompt has the words, by default the turns' texts, in order."""
        prompt, at = self.prompt(*turns, tools=tools), 0
        ends = [at := prompt.find(word, at) for word in words or [turn.text for turn in turns if turn.text]]
        return min(ends) >= 0 and not any(written in prompt for written in _OBJECTS)

    def _contains(self, *turns: ChatMessage, words: Sequence[str], tools: bool = True) -> bool:
        prompt = self.prompt(*turns, tools=tools)
        return all(word in prompt for word in words)

    def _answers(self, *turns: ChatMessage) -> bool:
        end, other = (self.prompt(*turns, *more).rpartition(turns[-1].text)[2] for more in ((), (_USER_2,)))
        return self.shows(*turns) and not other.startswith(end)

    def messages(self) -> None:
        if not self.shows(_USER):
            self.learn(parts=True)
            self.learn(parts=self.shows(_USER))
        system = self._contains(_SYSTEM, _USER, words=(_SYSTEM.text, _USER.text), tools=False)
        self.learn(
            system=system,
            systems=system and self.shows(_SYSTEM, _SYSTEM_2, _USER),
            later_systems=system and self.shows(_SYSTEM, _USER, _SAID, _SYSTEM_2, _USER_2),
            neighbours=self.shows(_USER, _USER_2) and self.shows(_USER, _SAID, _SAID_2, _USER_2),
            first_assistant=self.shows(_SAID, _USER),
            last_assistant=self._answers(_USER, _SAID),
            no_user=system and self._answers(_SYSTEM),
        )

    def tools(self) -> None:
        words = ("zq_tool", "zqdescription", "zq_key", _USER.text)
        alone = self._contains(_USER, words=words)
        with_system = self._contains(_SYSTEM, _USER, words=(*words, _SYSTEM.text)) or not self.traits.system
        self.learn(tools=with_system and (alone or self.traits.system), tools_alone=alone)

    def calls(self) -> None:
        for ids, as_text in product(IDS, (False, True)):
            self.learn(arguments_as_text=as_text, ids=ids)
            words = (_USER.text, "zq_tool", "zqvaluea", _RESULT.text)
            if self.shows(_USER, _CALLED, _RESULT, words=words, tools=True):
                break
        else:
            self.learn(calls=False, arguments_as_text=False, ids="")
            self.learn(tools=self.shows(_USER, _SAID, _RESULT, tools=True))
            return
        both, beside = replace(_CALLED, calls=(_CALL, _CALL_2)), replace(_CALLED, text=_SAID.text)
        values = ("zqvaluea", "zqvalueb", _RESULT.text, _RESULT_2.text)
        self.learn(
            several_calls=self._contains(_USER, both, _RESULT, _RESULT_2, words=values),
            words_beside_calls=all(
                self._contains(_USER, beside, _RESULT, *later, words=(_SAID.text, "zqvaluea"))
                for later in ((), (_SAID_2, _USER_2))
            ),
            words_behind_results=self.shows(_USER, _CALLED, _RESULT, _USER_2, tools=True),
        )
        thinks = replace(_CALLED, reasoning="zqthought")
        for name in _THOUGHT_FIELDS:
            self.learn(thoughts=name)
            if self.shows(_USER, thinks, _RESULT, words=("zqthought", "zqvaluea"), tools=True):
                both = replace(thinks, text=_SAID.text)
                words = (_SAID.text, "zqvaluea", "zqthought", _RESULT.text)
                self.learn(thoughts_beside_words=self._contains(_USER, both, _RESULT, words=words))
                return
        self.learn(thoughts="")


def traits_of(render: TemplateRender, markup: Markup = NO_MARKUP) -> TemplateTraits:
    """Probe a template with up to thirty short conversations. Raises RequestError, but for no refusal."""
    probe = _TemplateProbe(render)
    probe.messages()
    probe.tools()
    if probe.traits.tools:
        probe.calls()
    said = {mark: ChatMessage("assistant", f"zqleft {mark} zqright") for mark in markup.marks}
    cut = tuple([mark for mark, turn in said.items() if not probe.shows(_USER, turn, _USER_2)])
    pair = ChatMessage("assistant", f"zqleft {' zqthought '.join(said)} zqright")
    probe.learn(cut_markers=cut or (() if probe.shows(_USER, pair, _USER_2) else markup.marks))
    return probe.traits


# --- the check ----------------------------------------------------------------------------------------------


def left_out(prompt: str, messages: Sequence[Json], tools: Sequence[Json]) -> str:
    """Describe the first part of messages and tools that the prompt lacks; "" if it has all, in order.

    System messages may be anywhere, and a message's parts and its calls' results in any order. White space
    around a text, and words that switch thoughts on or off, do not count. A template may write a text as a
    JSON string. The search ends after MOST_SEARCHED characters, and the rest counts as found.
    """
    search = _PromptSearch(prompt)
    start = behind = 0
    for message in messages:
        anywhere = message["role"] == "system"
        start = start if message["role"] == "tool" else behind
        places = [0 if anywhere else start]
        for what, text in _contents(message):
            places.append(search.end_of(text.strip(), places[0]))
            if places[-1] < 0:
                return f"{what} that begins with {text.strip()[:60]!r}"
        behind = behind if anywhere else max(behind, *places)
    at = 0
    for tool in tools:
        name = tool["function"]["name"]
        if (at := search.end_of(name, at)) < 0:
            return f"the tool {name!r}"
    return ""


#: Letters of a value, not after an escape: they are the same in every notation.
_ARGUMENT = re.compile(r"""(?<!\\)\b[A-Za-z][A-Za-z0-9]{5,}\b(?!["']\s*:)""")
MOST_SEARCHED = 1 << 27  #: characters; takes a fraction of a second
_LONG = 2000  # characters of arguments, per word that is searched for
#: Words that switch thoughts on and off, and markers of thoughts. Templates remove them from text.
_CONTROLS = re.compile(r"</?think>|/no_think|/think")
_WHOSE = {
    "system": "the system message", "user": "the user's message", "assistant": "the assistant's message",
    "tool": "the result of a tool",
}  # fmt: skip


def _contents(message: Json) -> Iterator[tuple[str, str]]:
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    yield from ((_WHOSE[message["role"]], text) for text in texts)
    for call in message.get("tool_calls", ()):
        yield "the call", call["function"]["name"]
        if words := _ARGUMENT.findall(str(call["function"]["arguments"])[:_LONG]):
            yield "the call's argument", max(words, key=len)


class _PromptSearch:
    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self._left = MOST_SEARCHED

    def end_of(self, text: str, at: int) -> int:
        for written in _forms(text):
            if self._left <= 0:
                return at
            place = self._prompt.find(written, at)
            self._left -= (len(self._prompt) if place < 0 else place) - at
            if place >= 0:
                return place + len(written)
        parts = [part.strip() for part in _CONTROLS.split(text)]
        if len(parts) < 2:
            return -1
        for part in filter(None, parts):
            if (at := self.end_of(part, at)) < 0:
                return -1
        return at


def _forms(text: str) -> Iterator[str]:
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")  # as Jinja does
