"""Shapes of all answers, and rules of bodies, for `/openapi.json`. Pure. Tests compare them with real ones.

A shape is a type, a constant, `[items]`, a tuple of alternatives, or the fields of an object; `name?` may be
missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, WithJsonSchema

Json = dict[str, Any]
_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", dict: "object", None: "null"}


def schema(shape: Any) -> Json:
    """Return the JSON schema of a shape."""
    if isinstance(shape, dict):
        fields = {name.removesuffix("?"): schema(each) for name, each in shape.items()}
        required = [name for name in shape if not name.endswith("?")]
        return {"type": "object", "properties": fields, "required": required}
    if isinstance(shape, list):
        return {"type": "array", "items": schema(shape[0])}
    if isinstance(shape, tuple):
        constant = all(isinstance(each, str | None) for each in shape)
        return {"enum": list(shape)} if constant else {"anyOf": list(map(schema, shape))}
    return {"type": _TYPES[shape]} if shape in _TYPES else {} if shape is Any else {"const": shape}


def _of(kind: Any, names: str) -> Json:
    return dict.fromkeys(names.split(), kind)


def _answer(kind: str, part: Json, ends: tuple[str | None, ...], scores: Any, last: Json) -> Json:
    choice = {"index": int, **part, "logprobs": scores, "finish_reason": ends, **_ENDED}
    return _of(str, "id model") | {"object": kind, "created": int, "choices": [choice]} | last


# fmt: off
_TEXT, _NUMBER, _LOGPROB = (str, None), (int, None), (float, None)
_PROGRESS = {"prompt_progress?": _of(int, "total cache processed time_ms"), "state?": str}
_ENDED = {"stop_reason?": (str, int, None), "matched_stop?": (str, int, None), "token_ids?": [int]}
_SCORE = {"token": str, "logprob": float, "bytes": ([int], None)}
_SCORED = [_SCORE | {"top_logprobs": [_SCORE]}]

# OpenAI
_ERROR = {"error": _of(str, "message type code state?") | {"param": _TEXT}}
_RUNNING = _of(int, "prompt_tokens completion_tokens total_tokens")
_DRAFTED = "accepted_prediction_tokens rejected_prediction_tokens reasoning_tokens"
_USAGE = _RUNNING | {
    "prompt_tokens_details": {"cached_tokens": int}, "completion_tokens_details": _of(int, _DRAFTED),
}
_CALLED = {"type?": ("function", "custom"), "function?": _of(str, "name? arguments?"),
           "custom?": _of(str, "name? input?")}
_MESSAGE = {
    "role": "assistant", "content": _TEXT, "refusal": None,
    **_of(str, "reasoning? reasoning_content?"),
    "tool_calls?": [_CALLED | {"id": str}],
}
_DELTA = {
    **_of(str, "content? reasoning? reasoning_content?"), "role?": "assistant",
    "tool_calls?": [_CALLED | {"id?": str, "index": int}],
}
_SCORES = ({"content": _SCORED, "refusal": None}, None)
_OLD_SCORES = (
    {"tokens": [str], "text_offset": [int], "token_logprobs": [_LOGPROB], "top_logprobs": [(dict, None)]},
    None,
)
_ENDS = ("stop", "length", "tool_calls")
_IDS = {"prompt_token_ids?": [int]}
_PROMPT = {"prompt_logprobs?": [(dict, None)], **_IDS}
_WHOLE = {"usage": _USAGE}
_CHUNK = {"usage?": (_USAGE, _RUNNING, None), **_PROGRESS}
_CHAT = _answer("chat.completion", {"message": _MESSAGE}, _ENDS, _SCORES, _WHOLE | _PROMPT)
_CHAT_CHUNK = _answer("chat.completion.chunk", {"delta": _DELTA}, (*_ENDS, None), _SCORES, _CHUNK | _IDS)
_TEXTS = _answer("text_completion", {"text": str} | _PROMPT, _ENDS[:2], _OLD_SCORES, _WHOLE)
_TEXTS_CHUNK = _answer("text_completion", {"text": str} | _IDS, (*_ENDS[:2], None), _OLD_SCORES, _CHUNK)
_PART = _of(str, "type text") | {"annotations?": [dict], "logprobs?": _SCORED}
_ITEM = _of(str, "type id call_id? name? namespace? input? execution? encrypted_content?") | {
    "status?": ("in_progress", "completed", "incomplete"), "role?": ("assistant", "user"),
    "content?": [_PART], "summary?": [dict], "arguments?": (str, dict),
}
_COUNTS = _of(int, "input_tokens output_tokens total_tokens") | {
    "input_tokens_details": _of(int, "cached_tokens cache_write_tokens"),
    "output_tokens_details": {"reasoning_tokens": int},
}
_RESPONSE = {
    **_of(str, "id model service_tier truncation"), **_of(bool, "background parallel_tool_calls store"),
    **_of(_TEXT, "instructions previous_response_id prompt_cache_key safety_identifier user"),
    **_of(_NUMBER, "completed_at max_output_tokens max_tool_calls"), **_of(int, "created_at top_logprobs"),
    **_of(float, "temperature top_p presence_penalty frequency_penalty"), "object": "response",
    "status": ("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
    "output": [_ITEM],
    "error": (_of(str, "code message type") | {"param": None}, None),
    "incomplete_details": ({"reason": str}, None),
    "reasoning": _of(_TEXT, "effort summary"), "text": {"format": dict, "verbosity": str},
    "tool_choice": (str, dict), "tools": [dict], "usage": (_COUNTS, None), "metadata": dict,
}
_RESPONSE_EVENT = {
    **_of(str, "type item_id? delta? text? arguments? input? name?"), "response?": _RESPONSE, "item?": _ITEM,
    **_of(int, "sequence_number output_index? content_index?"), "part?": _PART, "logprobs?": _SCORED,
    **_PROGRESS,
}

# Anthropic
_REFUSED = {"type": "error", "error": _of(str, "type message"), "request_id": str}
_BLOCK = _of(str, "type text? thinking? signature? id? name?") | {"input?": dict}
_SPENT = _of(int, "input_tokens cache_creation_input_tokens cache_read_input_tokens output_tokens")
_REASONS = ("end_turn", "max_tokens", "tool_use", "stop_sequence", "model_context_window_exceeded", None)
_STOP = {"stop_reason": _REASONS, "stop_sequence": _TEXT}
_ANTHROPIC = {
    **_of(str, "id model"), "type": "message", "role": "assistant", "content": [_BLOCK], **_STOP,
    "usage": _SPENT,
}
_ANTHROPIC_EVENT = {
    "type": (
        "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
        "message_stop", "ping",
    ),
    "message?": _ANTHROPIC, "index?": int, "content_block?": _BLOCK, "usage?": _SPENT,
    "delta?": (_of(str, "type text? thinking? signature? partial_json?"), _STOP),
}

# Ollama
_FAILED = {"error": str}
_OLLAMA_SCORE = {"token": str, "logprob": float, "bytes?": [int]}
_LINE = {
    **_of(str, "model created_at"), "done": bool, "done_reason?": ("stop", "length", "load", "unload"),
    **_of(int, "total_duration? load_duration? prompt_eval_count? prompt_eval_duration?"),
    **_of(int, "eval_count? eval_duration?"),
    "logprobs?": [_OLLAMA_SCORE | {"top_logprobs": [_OLLAMA_SCORE]}], **_PROGRESS,
}
_OLLAMA_CALL = {"id": str, "function": {"index": int, "name": str, "arguments": dict}}
_CHATTED = _LINE | {
    "message": {"role": "assistant", "content": str, "thinking?": str, "tool_calls?": [_OLLAMA_CALL]},
}
_GENERATED = _LINE | _of(str, "response thinking?")
_DETAILS = _of(str, "parent_model format family parameter_size quantization_level") | {"families": [str]}
_LISTED = _of(str, "name model digest") | {"size": int, "details": _DETAILS}

# the rest
_MODEL = _of(str, "id owned_by root") | _of(int, "created context_length max_model_len") | {
    "object": "model", "supported_features?": [str],
}
_THEIRS = {
    "type": "model", **_of(str, "id display_name created_at lifecycle"),
    **_of(int, "max_input_tokens max_tokens"),
}
_DEPLOYED = {
    **_of(str, "name model state"), **_of(bool, "pinned ready"), **_of(int, "groups_ready groups_wanted"),
    "reason": _TEXT, "expires_s": (float, None),
}
_HEALTH = {
    **_of(str, "state backend"), **_of(_TEXT, "model reason"), **_of(int, "world_size open_requests"),
    "status": ("ok", "unavailable"), "ready": bool, "epoch": _NUMBER, "ranks": [dict],
    "deployments": [_DEPLOYED],
}
_TOKENS = {
    "tokens": [(int, {"id": int, "piece": (str, [int])})], **_of(int, "count? max_model_len?"),
    "token_strs?": ([str], None),
}
_VECTORS = {
    "object": "list", "model": str, "usage": _of(int, "prompt_tokens total_tokens"),
    "data": [{"object": "embedding", "index": int, "embedding": ([float], str)}],
}
_COUNTED = {"object": "response.input_tokens", "input_tokens": int}
_RANKED = {
    **_of(str, "id model"), "usage": _of(int, "prompt_tokens total_tokens"),
    "results": [{"index": int, "relevance_score": float, "document?": {"text": str}}],
    "meta": {"tokens": _of(int, "input_tokens output_tokens")},
}

#: Shapes of whole answers, by method and path.
ANSWERS: Mapping[str, Any] = {
    "GET /health": _HEALTH,
    "GET /v1/models": (
        {"object": "list", "data": [_MODEL]},
        {"data": [_THEIRS], "has_more": bool, **_of(_TEXT, "first_id last_id")},
    ),
    "GET /v1/models/{id}": (_MODEL, _THEIRS),
    "POST /v1/chat/completions": _CHAT,
    "POST /v1/completions": _TEXTS,
    "POST /v1/responses": _RESPONSE,
    "POST /v1/responses/compact": {
        "id": str, "object": "response.compaction", "created_at": int, "output": [_ITEM], "usage": _COUNTS,
    },
    **dict.fromkeys(("POST /v1/responses/input_tokens", "POST /v1/chat/completions/input_tokens"), _COUNTED),
    "GET /v1/responses/{response_id}": _RESPONSE,
    "DELETE /v1/responses/{response_id}": {"id": str, "object": "response", "deleted": bool},
    "POST /v1/responses/{response_id}/cancel": _RESPONSE,
    "GET /v1/responses/{response_id}/input_items": {
        "object": "list", "data": [dict], **_of(_TEXT, "first_id last_id"), "has_more": bool,
    },
    "POST /v1/embeddings": _VECTORS,
    **dict.fromkeys(("POST /v1/rerank", "POST /v2/rerank", "POST /rerank"), _RANKED),
    "POST /v1/messages": _ANTHROPIC,
    "POST /v1/messages/count_tokens": {"input_tokens": int},
    "POST /api/chat": _CHATTED,
    "POST /api/generate": _GENERATED,
    "POST /api/embed": {
        "model": str, **_of(int, "total_duration load_duration prompt_eval_count"), "embeddings": [[float]],
    },
    "POST /api/embeddings": {"embedding": [float]},
    "GET /api/tags": {"models": [_LISTED | {"modified_at": str}]},
    "GET /api/ps": {"models": [_LISTED | {"expires_at": str} | _of(int, "size_vram context_length")]},
    "POST /api/show": {
        **_of(str, "modelfile parameters template modified_at"), "details": _DETAILS, "model_info": dict,
        "capabilities": [("completion", "tools", "thinking")],
    },
    "GET /api/version": {"version": str},
    "POST /v1/tokenize": _TOKENS,
    "POST /v1/detokenize": _of(str, "prompt content"),
    "POST /apply-template": {"prompt": str},
    "GET /tokenizer_info": dict,
}
#: Shapes of the events or lines of streams.
EVENTS: Mapping[str, Any] = {
    "POST /v1/chat/completions": (_CHAT_CHUNK, _ERROR),
    "POST /v1/completions": (_TEXTS_CHUNK, _ERROR),
    **dict.fromkeys(("POST /v1/responses", "GET /v1/responses/{response_id}"), _RESPONSE_EVENT),
    "POST /v1/messages": (_ANTHROPIC_EVENT, _REFUSED),
    "POST /api/chat": (_CHATTED, _FAILED),
    "POST /api/generate": (_GENERATED, _FAILED),
}
# fmt: on


def refusal(path: str) -> Any:
    """Return the shape of a refusal at this path."""
    shapes = {"/v1/messages": _REFUSED, "/api/": _FAILED, "/v1/models": (_ERROR, _REFUSED)}
    return next((shape for start, shape in shapes.items() if path.startswith(start)), _ERROR)


# --- what later checks of bodies refuse, such as rules between fields -------------------------------------


NULL: Mapping[str, Any] = {"type": "null"}
TRUE, NOT_TRUE = {"const": True}, {"enum": [None, False]}
NO_ITEMS: Mapping[str, Any] = {"enum": [None, []]}
NO_SCORES = {"enum": [None, 0]}
TEXT: Mapping[str, Any] = {"type": "string", "minLength": 1}
FilledText = Annotated[str, WithJsonSchema({**TEXT})]


def rules(*each: tuple[Mapping[str, Any], ...]) -> ConfigDict:
    """Return the configuration of a schema with rules: of each, the fields of one branch at least are so."""
    return ConfigDict(json_schema_extra={"allOf": [{"anyOf": [*map(fields, rule)]} for rule in each]})


def fields(schemas: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these fields, all required but for nullable ones."""
    may = [name for name, of in schemas.items() if None in of.get("enum", ()) or "null" in of.get("type", "")]
    there = [name for name in schemas if name not in may]
    return {"type": "object", "properties": {**schemas}, "required": there}
