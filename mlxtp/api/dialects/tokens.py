"""Tokens of a text and text of tokens, in vLLM's and llama.cpp's shapes: `/tokenize`, `/detokenize`,
`/apply-template`, `/tokenizer_info`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from pydantic import ConfigDict, Field, WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from ...errors import RequestError
from ...model_files import tokenizer_settings
from ...text.conversation import GenerationRequest
from ...text.tokenizer import Text
from ..adapter import Json, Operation, compact
from ..catalog import TooLong
from ..generation import AnyModel, Generation, Handler
from ..prompts import WrittenPrompts, written
from ..request_body import MOST_MESSAGES, Integer, Schema, checked, in_range, not_supported, parsed, wrong
from .openai import ChatRequest, MessageInput, OfferedTool, parse_chat
from .request_parts import MOST_TOKENS

_Messages = Annotated[list[MessageInput], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
_THERE: Json = {"not": {"type": "null"}}
_GIVEN = ("prompt", "messages", "content")


class _ChatBody(Schema):
    """Fields of a chat that its template reads; others count as in `/v1/chat/completions`."""

    model: str | None = None
    tools: list[OfferedTool] | None = None
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None


class TemplateRequest(_ChatBody):
    """The body of `POST /apply-template`."""

    messages: _Messages


class TokenizeRequest(_ChatBody):
    """The body of `POST /tokenize`: vLLM's with `prompt` or `messages`, llama.cpp's with `content`."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": [name], "properties": {name: _THERE}} for name in _GIVEN]}
    )

    prompt: str | None = None
    messages: _Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    parse_special: Annotated[bool | None, WithJsonSchema({"enum": [None, True]})] = None
    with_pieces: bool | None = None


class DetokenizeRequest(Schema):
    """The body of `POST /detokenize`."""

    tokens: Annotated[list[Annotated[Integer, in_range(0, MOST_TOKENS)]], Field(fail_fast=True)]
    model: str | None = None


class InfoQuery(Schema):
    """The query of `GET /tokenizer_info`."""

    model: str | None = None


def parse_tokenize(body: bytes) -> GenerationRequest:
    """Return the request whose prompt becomes tokens. Raises RequestError."""
    asked = parsed(TokenizeRequest, body)
    given = [name for name in _GIVEN if getattr(asked, name) is not None]
    if len(given) != 1:
        words = f"send one of prompt, messages and content; there are {' and '.join(given) or 'none'}"
        raise RequestError(words, param="prompt")
    if asked.parse_special is False:
        why = "special tokens in a text are always read as such"
        raise not_supported(f"parse_special false is not supported: {why}", "parse_special")
    if asked.messages is not None:
        return _chat(body, asked, asked.messages)
    return GenerationRequest(asked.model, (asked.prompt or asked.content or "",), dialect=asked)


def parse_template(body: bytes) -> GenerationRequest:
    asked = parsed(TemplateRequest, body)
    return _chat(body, asked, asked.messages)


def _chat(body: bytes, asked: Any, messages: Sequence[MessageInput]) -> GenerationRequest:
    """Read a chat. It may also end without the beginning of an answer."""
    own = asked.model_fields_set - ChatRequest.model_fields.keys()
    if asked.add_generation_prompt is False and messages[-1].role != "assistant":
        own |= {"add_generation_prompt"}
    if own:
        given = json.loads(body)
        body = compact({name: given[name] for name in given if name not in own})
    return replace(parse_chat(body), dialect=asked)


def parse_detokenize(body: bytes) -> GenerationRequest:
    asked = parsed(DetokenizeRequest, body)
    return GenerationRequest(asked.model, (tuple(asked.tokens),), dialect=asked)


def _body(asked: Any, text: Text, model: AnyModel, found: WrittenPrompts) -> Json:
    """Return an answer in the shape of the server whose field the client sent; else in both."""
    [tokens] = found.tokens
    if isinstance(asked, TemplateRequest):
        return {"prompt": found.texts[0]}
    if len(tokens) > model.context:
        raise TooLong(len(tokens), model.context)
    if isinstance(asked, DetokenizeRequest):
        for i, each in enumerate(tokens):
            if text.name(each) == (f"<{each}>", None):  # as it names what is none
                raise wrong(f"tokens[{i}]", "a token id of this model's tokenizer", each)
        return dict.fromkeys(("prompt", "content"), text.decoded(tokens))
    if asked.content is not None:
        return {"tokens": [_piece(text, each) for each in tokens] if asked.with_pieces else tokens}
    names = [text.name(each)[0] for each in tokens] if asked.return_token_strs else None
    return {"count": len(tokens), "max_model_len": model.context, "tokens": tokens, "token_strs": names}


def _piece(text: Text, token: int) -> Json:
    """Return a token with its text, or with its bytes if they are half a character."""
    name, bytes_ = text.name(token)
    return {"id": token, "piece": list(bytes_) if bytes_ and "\ufffd" in name else name}


def _written(ask: GenerationRequest, text: Text, model: AnyModel, guided: bool) -> WrittenPrompts:
    """Write the prompt as the template does; no tokens of earlier answers are in it."""
    asked = ask.dialect
    if isinstance(asked, DetokenizeRequest):
        return WrittenPrompts((tuple(asked.tokens),))
    begins = asked.add_generation_prompt is not False or getattr(ask.prompt, "continues", False)
    found = written(ask, text, model, guided=guided, prompting=begins)
    if isinstance(asked, TemplateRequest):
        return found
    special = asked.add_special_tokens if asked.content is None else bool(asked.add_special)
    return replace(found, special=special)


async def _answer(
    parse: Callable[[bytes], GenerationRequest], generation: Generation, request: Request
) -> Response:
    ask, text, model, found = await generation.prompted(request, parse, _written)
    body = await asyncio.to_thread(lambda: compact(_body(ask.dialect, text, model, found)))
    return Response(body, media_type="application/json")


async def _info(generation: Generation, request: Request) -> Response:
    model = await generation.catalog.find(checked(InfoQuery, dict(request.query_params), "").model)
    body = await asyncio.to_thread(lambda: compact(settings(model)))
    return Response(body, media_type="application/json")


def settings(model: AnyModel) -> Json:
    """Return tokenizer_config.json with the chat template, each special token as its text. Blocks."""
    found: Json = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.context}
    with suppress(OSError, ValueError):
        found |= tokenizer_settings(model.path)
    for name, value in found.items():
        if isinstance(value, dict) and isinstance(value.get("content"), str):
            found[name] = value["content"]
    return found


ENDPOINTS: Mapping[Operation, Handler] = {
    Operation("GET", "/tokenizer_info", "Settings of a tokenizer", query=InfoQuery): _info,
    **{
        Operation("POST", path, summary, body): partial(_answer, parse)
        for path, summary, body, parse in (
            ("/v1/tokenize", "The tokens of a text or of a chat", TokenizeRequest, parse_tokenize),
            ("/v1/detokenize", "The text of tokens", DetokenizeRequest, parse_detokenize),
            ("/apply-template", "A chat as its template writes it", TemplateRequest, parse_template),
        )
    },
}
