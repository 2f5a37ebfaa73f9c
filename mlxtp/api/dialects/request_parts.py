"""Parts of requests that all dialects share: settings, message text, tools. Pure, but for log lines.

Clients resend their history at every turn and cannot change it. So history is never refused: every part
becomes text if possible, else a short note. A client's tools may be in namespaces, take plain text, or be
its provider's own. The model gets them as functions under unique names, without the provider's.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from ...errors import RequestError
from ...text.conversation import (
    AUTO,
    NONE,
    REQUIRED,
    Conversation,
    GenerationOptions,
    GenerationRequest,
    Prompt,
    Role,
    Tool,
)
from ...text.json_limits import MOST_CONTAINERS, integral
from ...text.tool_grammar import log_once
from ..answer_shapes import fields
from ..request_body import MOST_TOKENS as MOST_TOKENS
from ..request_body import BodySchema, Integer, in_range, none_of, not_supported, shown, wrong
from ..sampling import given_settings, with_settings

Json = dict[str, Any]

# --- settings ---------------------------------------------------------------------------------------------


_TOKEN_IDS = Field(json_schema_extra={"propertyNames": {"pattern": "^[0-9]{1,10}$"}})


@with_settings("openai")
class OpenAIBody(BodySchema):
    """Fields of all of OpenAI's bodies. `docs/api.md` marks additions to its API with an asterisk."""

    model: str | None = None
    stream: bool | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    seed: Integer | None = None
    logit_bias: Annotated[dict[str, Annotated[float, in_range(-100, 100)]] | None, _TOKEN_IDS] = None
    deadline_s: Annotated[float, in_range(0.001, 86_400)] | None = None
    user: Any = None

    def generation(
        self, prompt: Conversation | tuple[Prompt, ...], own: GenerationOptions, dialect: Any
    ) -> GenerationRequest:
        """Return the request with the options in these fields and the dialect's `own`."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        same = self.model_dump(include={"ignore_eos", "seed", "logit_bias", "deadline_s"}, exclude_none=True)
        options = replace(own, stop=stops, settings=given_settings(self, "openai"), **same)
        user = next((each for each in self.users if isinstance(each, str)), "")
        ask = GenerationRequest(self.model, prompt, options, bool(self.stream), user, dialect)
        return replace(ask, ignored=self.ignored)

    @property
    def users(self) -> tuple[Any, ...]:
        """Names of the user; the first that is text counts."""
        return (self.user,)


# --- messages ---------------------------------------------------------------------------------------------


ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool", "ipython": "tool", "observation": "tool",
}  # fmt: skip


# Schemas for /openapi.json of fields that are checked later: a role, a field that must stay empty, a content.
RoleName = Annotated[str, WithJsonSchema({"enum": [*ROLES]})]
_EMPTY: Json = {"enum": [None, False, 0, "", [], {}]}
Unused = Annotated[Any, WithJsonSchema(_EMPTY)]
NOT_USER: Json = {"enum": [role for role in ROLES if role != "user"]}


def content_rule(*more: str) -> tuple[Json, Json]:
    """Return the rule that a user sends texts, or blocks without words, `more` too; others send anything."""
    text: Json = {"type": "string"}
    texts = {"properties": {"text": text, "type": {"anyOf": [text, _EMPTY]}}, "required": ["text"]}
    wordless = fields({"type": {"enum": [*_UNSPOKEN, "tool_use", *more]}})
    parts = [text, {"type": "object", **texts}, fields({"type": text, "refusal": text}), wordless]
    content = {"anyOf": [text, {"type": "array", "items": {"anyOf": parts}}]}
    return {"role": {"const": "user"}, "content": content}, {"role": NOT_USER}


def role_of(name: str, where: str, *, last: bool) -> tuple[Role, str]:
    """Return the role, and a mark that names an unknown role in history, which becomes the user's.

    Raises RequestError for an unknown role in the last message, since the client can still change that.
    """
    if last and name not in ROLES:
        raise none_of(name, ROLES, where)
    return (ROLES[name], "") if name in ROLES else ("user", f"[{name}]")


def newest(roles: Sequence[str]) -> int:
    """Return the index of the last message if it is the user's own, else -1.

    After a tool's result it is the agent's: agents also use such messages to show what a tool returned.
    """
    *_, before, last = ("", "", *roles)
    return len(roles) - 1 if last == "user" and ROLES.get(before) != "tool" else -1


def check_parts(*contents: object) -> None:
    """Refuse messages of more than MOST_CONTAINERS parts in all. Raises RequestError before it reads one."""
    if (count := sum(map(_count, contents))) > MOST_CONTAINERS:
        raise RequestError(f"messages have {count} parts; at most {MOST_CONTAINERS}", param="messages")


def _count(content: object) -> int:
    """Count the parts in a content, and the parts in these unless it alone has too many."""
    parts = content if isinstance(content, list) else []
    whole = parts if len(parts) <= MOST_CONTAINERS else []
    return len(parts) + sum(_count(part.get("content")) for part in whole if isinstance(part, dict))


def content_text(content: object, where: str = "", *, strict: bool = False) -> str:
    """Return the text of a message or of a tool's result, in any dialect.

    `strict`: raise RequestError with the place of a part that is not text, instead of a note.
    """
    return lines(content_texts(content, where, strict=strict))


def content_texts(content: object, where: str = "", *, strict: bool = False) -> list[str]:
    """Return the text of each part of a content. `strict` as in `content_text`."""
    if isinstance(content, list) and (strict or are_parts(content)):
        return [part_text(part, f"{where}[{i}]", strict=strict) for i, part in enumerate(content)]
    return [part_text(content, where, strict=strict)]


def part_text(part: object, where: str = "", *, strict: bool = False) -> str:
    """Return the text of one part of a content. `strict` as in `content_text`."""
    if (text := _plain(part)) is not None:
        return text
    pieces = list(_pieces(part))
    why = next((why for _, why in pieces if why), "") if strict else ""
    if why == _ODD:
        raise wrong(where, 'text or parts such as {"type": "text", "text": "..."}', part)
    if why:
        kind = shown(part["type"]) if isinstance(part, dict) else "this"
        raise not_supported(f"{where}: a part of type {kind} is not supported: {why}", where)
    return lines(text for text, _ in pieces)


def words_of(item: Mapping[str, Any]) -> str:
    """Return the text in an item of an unknown kind; empty if it has none."""
    return lines(text for text, why in _pieces(item) if why != _NO_BLOCKS)


def lines(texts: Iterable[str]) -> str:
    return "\n".join(filter(None, texts))


def thought_text(*given: object) -> str:
    """Return the text of the first of these thoughts that has any."""
    return next(filter(None, map(_thought, given)), "")


def arguments_text(given: object) -> str:
    """Return a call's arguments as text. The model may have written no JSON, or no object."""
    text = given if isinstance(given, str) else "" if given is None else _json(given)
    return text if text.strip() else "{}"


_Piece = tuple[str, str]  # text, and why it is not the client's own: it is a note, or odd
_ODD = "odd"
_NO_BLOCKS = "this server reads no such blocks"
_MEDIA = {  # words in the names of types
    "image": "image", "screenshot": "image", "audio": "audio", "video": "video", "resource_link": "",
    "document": "document", "file": "document", "resource": "document",
}  # fmt: skip
_READS_NO = {"image": "images", "audio": "audio", "video": "videos", "document": "documents but text"}
_TEXT_TYPE = re.compile("text/|json|xml|yaml|javascript|octet-stream")
THOUGHTS = ("thinking", "reasoning")
_UNSPOKEN = (  # parts without words; thoughts are read elsewhere, the others by their provider alone
    *THOUGHTS, "redacted_thinking", "fallback", "tool_addition", "tool_removal", "mcp_tool_listing",
    "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "tool_search_call",
)  # fmt: skip
_SPOKEN = (  # fields of other parts, in order of precedence
    "text", "data", "value", "title", "name", "tool_name", "url", "uri", "source", "refusal", "content",
    "input", "message", "output", "outputs", "results", "logs", "tool_references", "stdout", "stderr",
    "error_code",
)  # fmt: skip
_GIVEN = ("input", "arguments", "action", "queries", "code")  # to a tool
_THOUGHT_FIELDS = (*THOUGHTS, "reasoning_content", "text", "content", "summary")
SUMMARY = "[Summary of the conversation so far]"


def _plain(value: object) -> str | None:
    """Return a string, or a text part's string; None for anything else."""
    if isinstance(value, dict) and str(value.get("type") or "text").endswith("text"):
        value = value.get("text")
    return value if isinstance(value, str) else None


def _pieces(value: object) -> Iterator[_Piece]:
    if (text := _plain(value)) is not None:
        yield text, ""
        return
    match value:
        case [*parts] if are_parts(parts):
            for each in parts:
                yield from _pieces(each)
        case {"type": str(kind), **part}:
            yield from _of_kind(kind, part)
        case None:
            yield "", _ODD
        case _:
            yield _json(value), _ODD


def are_parts(values: Sequence[object]) -> bool:
    """Return True for a list of texts and objects, which are read one by one."""
    return all(isinstance(each, str | dict | None) for each in values)


def _of_kind(kind: str, part: Mapping[Any, Any]) -> Iterator[_Piece]:
    media = next((name for word, name in _MEDIA.items() if word in kind), "")
    if "compaction" in kind:
        summary = content_text(part.get("content"))
        yield f"{SUMMARY}\n{summary}" if summary else "", ""
        if part.get("encrypted_content"):
            yield "[summary of the conversation left out: only its maker can read it]", ""
    elif kind.endswith(("tool_use", "_call")) and kind not in _UNSPOKEN:  # of a tool that its provider ran
        given = next((part[name] for name in _GIVEN if part.get(name)), None)
        yield f"[{part.get('name') or kind.removesuffix('_call')} {arguments_text(given)}]", ""
        for name in ("output", "outputs", "results"):
            if part.get(name):
                yield from _pieces(part[name])
    elif media == "document":
        yield from _document(part)
    elif media:
        text = part.get("transcript")
        yield (text, "") if isinstance(text, str) else _note(media, _READS_NO[media])
    elif kind not in _UNSPOKEN:
        values = [part[name] for name in _SPOKEN if part.get(name) is not None]
        for value in values:
            yield from _pieces(value)
        if not values and kind.endswith("text"):
            yield "", _ODD
        elif not values:
            yield f"[block of type {shown(kind)} left out: {_NO_BLOCKS}]", _NO_BLOCKS


def _note(what: str, kinds: str) -> _Piece:
    why = f"this model reads no {kinds}"
    return f"[{what} left out: {why}]", why


def _document(part: Mapping[Any, Any]) -> Iterator[_Piece]:
    """Yield title and text of a document or file, or a note if it is not text."""
    for name in ("title", "context"):
        if isinstance(part.get(name), str):
            yield part[name], ""
    match part.get("source") or part.get("file") or part.get("resource") or part:
        case {"content": content}:
            yield from _pieces(content)
        case {"type": "text", "data": str(text)} | {"text": str(text)}:
            yield text, ""
        case {"data": str(data), **more} | {"file_data": str(data), **more} if text := _decoded(data, more):
            yield text, ""
        case _:
            yield _note("document", _READS_NO["document"])


def _decoded(data: str, about: Mapping[Any, Any]) -> str:
    """Return the text of a file: plain, in base64, or in a data URL; empty for any other file."""
    kind = str(about.get("media_type") or about.get("mime_type") or "")
    if data.startswith("data:"):
        kind, _, data = data.partition(",")
    if kind and not _TEXT_TYPE.search(kind):
        return ""
    try:
        text = b64decode(re.sub("[\r\n]", "", data), validate=True).decode()
    except UnicodeDecodeError:
        return ""
    except ValueError:
        return data
    return "" if text.startswith("%PDF") or "\0" in text else text


def _thought(given: object) -> str:
    match given:
        case str(text):
            return text
        case [*parts]:
            return lines(map(_thought, parts))
        case {**fields}:
            return thought_text(*[fields.get(name) for name in _THOUGHT_FIELDS])
    return ""


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


FLAGS = ("continue_final_message", "add_generation_prompt")


def begins_answer(flags: Sequence[object], conversation: Conversation) -> bool:
    """Return True if the last message is the beginning of the answer. Raises RequestError.

    `flags`: the values of `FLAGS`. Without any, a message of the assistant is.
    """
    for name, flag in zip(FLAGS, flags, strict=True):
        if not isinstance(flag, bool | None):
            raise wrong(name, "true or false", flag)
    continues, prompts = flags
    if continues is not None and continues == prompts:
        words = f"{FLAGS[0]} and {FLAGS[1]} are both {str(continues).lower()}"
        raise RequestError(f"{words}: send one of them, or opposite ones", param=FLAGS[0])
    if conversation.messages[-1].role == "assistant":
        return bool(not prompts if continues is None else continues)
    if continues or prompts is False:
        field = FLAGS[not continues]
        words = f"{field}: the last message is not the assistant's, so there is no answer to continue"
        raise RequestError(f"{words}; leave the field out", param=field)
    return False


#: Variables that mlxtp sets in a template; clients may set the others.
_OWN_VARIABLES = ("messages", "tools", "tokenize", "chat_template", "return_dict", *FLAGS)


def template_options(options: Json, effort: str | None) -> Json:
    """Return the variables of a template, by `chat_template_kwargs` and an effort. Raises RequestError."""
    for name in options:
        if name in _OWN_VARIABLES or not name.isidentifier():
            where = f"chat_template_kwargs.{name}"
            raise RequestError(f"{where} cannot be set", param=where)
    return options if effort is None else {"reasoning_effort": effort} | options


def continued(conversation: Conversation) -> Conversation:
    """Return the conversation whose answer continues the last message, the assistant's. Raises RequestError.

    An empty message begins nothing: the answer takes its place.
    """
    *before, last = conversation.messages
    if last.calls:
        words = "the last message, the assistant's, calls tools, and a call cannot be continued"
        raise RequestError(f"{words}; send the calls' results after it", param="messages")
    if last.text or last.reasoning:
        return replace(conversation, continues=True)
    return replace(conversation, messages=tuple(before)) if before else conversation


# --- tools ------------------------------------------------------------------------------------------------


def _parameters(given: object) -> object:
    """Return {}, which permits any arguments, for its other spellings: PHP writes it as a list."""
    return {} if given == [] or given is True else given


Parameters = Annotated[dict[str, Any] | None, BeforeValidator(_parameters)]
ToolKind = Literal["function", "custom", "tool_search"]


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool under its client's name. `where` is its place in the request."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    kind: ToolKind = "function"
    namespace: str | None = None
    where: str = ""

    def function(self, name: str) -> Tool:
        """Return this tool as a function under the model's `name`; models also write `namespace__name`."""
        whole = joined(self.namespace, self.name)
        return Tool(name, self.description, self.parameters, () if whole == name else (whole,))


Tools = Mapping[str, ClientTool]  #: by the model's names
BY_NAME = '{"type": "function", "name": "..."}'


def unfold(tools: Sequence[ClientTool]) -> dict[str, ClientTool]:
    """Map the model's names to tools: a tool's own name if it is unique, else `namespace__name`.

    Raises RequestError where two tools would have the same name.
    """
    count = Counter(tool.name for tool in tools)
    found: dict[str, ClientTool] = {}
    for tool in tools:
        unique = tool.namespace is None or count[tool.name] == 1
        name = tool.name if unique else joined(tool.namespace, tool.name)
        if name in found:
            where = f"{tool.where}.name"
            raise RequestError(f"{where}: there are two tools named {shown(name)}", param=where)
        found[name] = tool
    return found


def called(name: str, tools: Mapping[str, ClientTool]) -> ClientTool:
    """Return the tool that a model calls by `name`, its own or an alias."""
    whole = (tool for known, tool in tools.items() if name in tool.function(known).aliases)
    return tools.get(name) or next(whole, ClientTool(name))


def joined(namespace: str | None, name: str) -> str:
    return f"{namespace}__{name}" if namespace else name


def plain_choice(given: object) -> Any:
    """Return any dialect's choice among tools as a word or as `{"type", "name"}`."""
    match given:
        case "any" | {"type": "any" | "required"}:
            return REQUIRED
        case {"type": "auto" | "none" as word}:
            return word
        case {"type": "tool" | "function" | "custom" as kind, **rest}:
            named = rest.get(kind, rest)
            return {**(named if isinstance(named, dict) else rest), "type": kind.replace("tool", "function")}
        case {"type": "allowed_tools", "allowed_tools": {**rest}}:
            return {**rest, "type": "allowed_tools"}
    return given


def tool_choice(given: object, tools: Tools) -> tuple[Tools, str]:
    """Return the offered tools, and the choice among them as in `Conversation`."""
    match plain_choice(given):
        case None | "auto":
            return tools, AUTO
        case "none":
            return tools, NONE
        case "required":
            return _some(tools, "tool_choice"), REQUIRED
        case {"type": "function" | "custom" as kind, "name": str(name)} if name not in (AUTO, NONE, REQUIRED):
            return tools, _named(kind, name, tools, "tool_choice.name")
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(allowed)}:
            names = {_allowed(tool, tools, i) for i, tool in enumerate(allowed)}
            offered = {name: tool for name, tool in tools.items() if name in names}
            if mode == "auto":
                return offered, AUTO
            return _some(offered, "tool_choice.tools"), REQUIRED
        case {"type": str(kind)} if kind not in ("function", "custom", "allowed_tools"):
            raise _not_run(kind, "tool_choice")
        case _:
            raise wrong("tool_choice", f'"auto", "none", "required" or {BY_NAME}', given)


def _allowed(given: object, tools: Tools, index: int) -> str:
    where = f"tool_choice.tools[{index}]"
    match plain_choice(given):
        case {"type": "function" | "custom" as kind, "name": str(name)}:
            return _named(kind, name, tools, f"{where}.name")
        case {"type": str(kind)} if kind not in ("function", "custom"):
            raise _not_run(kind, where)
        case _:
            raise wrong(where, BY_NAME, given)


def _not_run(kind: str, where: str) -> RequestError:
    return not_supported(
        f"{where}: tools of type {shown(kind)} are not supported, because this server runs no tools; "
        "name a function or a custom tool",
        where,
    )


def _named(kind: str, name: str, tools: Tools, where: str) -> str:
    """Return the model's name for the tool with this name, the client's or the model's."""
    for known in (name, *tools):  # the model's own name counts first
        if known in tools and tools[known].kind == kind and name in (known, tools[known].name):
            return known
    raise RequestError(f"{where}: there is no tool named {shown(name)}", param=where)


def _some(tools: Tools, where: str) -> Tools:
    if not tools:
        raise RequestError(f"{where}: a call is required, but there are no tools to call", param=where)
    return tools


# --- tools that take plain text ---------------------------------------------------------------------------


def text_parameters(format_: object) -> Mapping[str, Any]:
    """Return the schema of one string, `input`. It describes a grammar in `format_` to the model."""
    about = "The whole input, as plain text."
    match format_:
        case {"syntax": str(syntax), "definition": str(definition)} | {
            "grammar": {"syntax": str(syntax), "definition": str(definition)}
        }:
            about += f" It follows this {syntax} grammar:\n{definition}"
    return {
        "type": "object",
        "properties": {"input": {"type": "string", "description": about}},
        "required": ["input"],
        "additionalProperties": False,
    }


def text_arguments(text: str) -> str:
    """Return the arguments of a call with this text, as JSON."""
    return json.dumps({"input": text}, ensure_ascii=False)


def text_of(arguments: str) -> str:
    """Return the text in such arguments, as far as it has arrived."""
    return TextReader().push(arguments)


_LONGEST_HEAD = 1000  # characters before the text
_HEAD = re.compile(r'\s*\{\s*"(?:[^"\\]|\\.)*"\s*:\s*"')
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"  # the first half of a character
#: The part of a JSON string that can be read without what follows it.
_WRITTEN = re.compile(
    rf'(?:[^"\\]+|\\["\\/bfnrt]|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}|{_HIGH}(?:\\u[0-9a-fA-F]{{4}}|(?=[^\\]|\\[^u])))*'
)


class TextReader:
    """Reader of a call's text: the first string in its arguments."""

    def __init__(self) -> None:
        self._began = False
        self._rest = ""  # arrived, and not read yet

    def push(self, arguments: str) -> str:
        if self._rest.startswith('"') or (not self._began and len(self._rest) > _LONGEST_HEAD):
            return ""
        self._rest += arguments
        if not self._began:
            head = _HEAD.match(self._rest)
            if head is None:
                return ""
            self._began, self._rest = True, self._rest[head.end() :]
        written = _WRITTEN.match(self._rest)
        assert written is not None  # it may be empty
        self._rest = self._rest[written.end() :]
        text: str = json.loads(f'"{written[0]}"', strict=False)
        return text.encode(errors="replace").decode()  # a model may write half a character


# --- what is left out -------------------------------------------------------------------------------------


def log_left_out(what: str, kind: str) -> None:
    """Log once that tools or items of this kind are ignored."""
    log_once(f"leaving out {what} of type {shown(kind)}: only their provider supports them")


# --- prompts as tokens ------------------------------------------------------------------------------------


def prompt_of(given: object, where: str) -> Prompt:
    match given:
        case str(text):
            return text
        case [_, *_]:
            return token_ids(given, where)
        case _:
            raise wrong(where, "a string or token ids", given)


def token_ids(given: Sequence[object], where: str) -> tuple[int, ...]:
    tokens = []
    for i, token in enumerate(map(integral, given)):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MOST_TOKENS:
            raise wrong(f"{where}[{i}]", "a token id", token)
        tokens.append(token)
    return tuple(tokens)
