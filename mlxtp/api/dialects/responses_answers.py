"""Answers of `/v1/responses`: the events of a stream, and the response around its items."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...errors import MlxtpError
from ...text.transcript import (
    AnswerEvent,
    CallArguments,
    CallBegan,
    ContentDelta,
    Finish,
    ReasoningDelta,
    Scored,
)
from ..adapter import About, Json
from ..http_errors import error_status
from .openai_answers import sse
from .responses_items import CALLS
from .responses_output import (
    ItemInProgress,
    MessageOutput,
    ReasoningOutput,
    ToolCallOutput,
    logprobs,
    place,
    scores_of_first,
    speaks,
    status_of,
    tool_call,
)
from .responses_request import ResponsesAnswerOptions


class ResponseWriter:
    """Writer of one answer as events. `keep` stores the whole response at the end."""

    def __init__(self, about: About, keep: Callable[[Json], None], clock: Callable[[], float]) -> None:
        self._about = about
        self._keep = keep
        self._clock = clock
        self._number = 0
        self._output: list[Json] = []
        self._item: ItemInProgress | None = None
        self._late: list[Scored] = []  # Scores of tokens that may still turn out not to belong to the text.
        self._finish: Finish | None = None

    def open(self) -> bytes:
        response = response_body(self._about, "in_progress", ())
        kinds = ("response.created", "response.in_progress")
        return b"".join([self._sent({"type": kind, "response": response}) for kind in kinds])

    def begin(self) -> bytes:
        return b""

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case ReasoningDelta(text=text):
                return self._think(text)
            case ContentDelta(text=text, scores=scores):
                return self._say(text, scores)
            case CallBegan(id=id_, name=name):
                return self._begin(tool_call(self._about, self._place(), id_, name))
            case CallArguments(text=text):
                assert isinstance(self._item, ToolCallOutput)
                return b"".join(map(self._sent, self._item.more(text)))
            case Finish():
                return self._finished(event)

    def close(self) -> bytes:
        assert self._finish is not None
        status = status_of(self._finish)
        response = response_body(
            self._about, status, self._output, finish=self._finish, completed_at=self._clock()
        )
        self._keep(response)
        return self._sent({"type": f"response.{status}", "response": response})

    def fail(self, error: MlxtpError) -> bytes:
        before = self._end("incomplete")
        response = response_body(self._about, "failed", self._output, error=error)
        return before + self._sent({"type": "response.failed", "response": response})

    def idle(self, more: Json) -> bytes:
        response = response_body(self._about, "in_progress", self._output)
        return self._numbered({"type": "response.in_progress", "response": response} | more)

    def _think(self, text: str) -> bytes:
        before = b""
        if not isinstance(self._item, ReasoningOutput):
            before = self._begin(ReasoningOutput(self._place()))
        assert isinstance(self._item, ReasoningOutput)
        return before + self._sent(self._item.more(text))

    def _say(self, text: str, scores: Sequence[Scored]) -> bytes:
        """Write text. Scores without a text are those of thoughts and calls, or of what ends the answer."""
        if not text:
            if isinstance(self._item, MessageOutput):
                self._late += scores
            return b""
        before = b""
        if not isinstance(self._item, MessageOutput):
            if self._item is not None:
                scores = scores_of_first(self._about, text, scores)
            before = self._begin(MessageOutput(self._place()))
        return before + self._more(text, scores)

    def _more(self, text: str, scores: Sequence[Scored]) -> bytes:
        assert isinstance(self._item, MessageOutput)
        scores = [*self._late, *scores]
        self._late = []
        return self._sent(self._item.more(text, logprobs(self._about, scores)))

    def _finished(self, finish: Finish) -> bytes:
        self._finish = finish
        kinds = {item["type"] for item in self._output} | ({self._item.kind} if self._item else set())
        before = b""
        if "message" not in kinds and speaks(finish, "reasoning" in kinds, not kinds.isdisjoint(CALLS)):
            before = self._begin(MessageOutput(self._place()))
        elif self._late:
            before = self._more("", ())
        return before + self._end(status_of(finish))

    def _place(self) -> str:
        return place(self._about, len(self._output) + (self._item is not None))

    def _begin(self, item: ItemInProgress) -> bytes:
        before = self._end("completed")
        self._item, self._late = item, []
        added = {"type": "response.output_item.added", "item": item.json("in_progress")}
        return before + b"".join([self._sent(event) for event in (added, *item.opened())])

    def _end(self, status: str) -> bytes:
        """Return the end of the open item, if there is one."""
        item = self._item
        if item is None:
            return b""
        whole = item.json(status)
        done = {"type": "response.output_item.done", "item": whole}
        sent = b"".join([self._sent(event) for event in (*item.closed(), done)])
        self._item = None
        self._output.append(whole)
        return sent

    def _sent(self, event: Json) -> bytes:
        """Encode an event with its number and, for an item's event, the item's place."""
        return self._numbered(event if self._item is None else event | {"output_index": len(self._output)})

    def _numbered(self, event: Json) -> bytes:
        numbered = event | {"sequence_number": self._number}
        self._number += 1
        return b"event: %b\n%b" % (event["type"].encode(), sse(numbered))


# --- the response -----------------------------------------------------------------------------------------


def response_body(
    about: About,
    status: str,
    output: Sequence[Json],
    *,
    finish: Finish | None = None,
    error: MlxtpError | None = None,
    completed_at: float | None = None,
) -> Json:
    """Return the response with this status: "in_progress", "completed", "incomplete" or "failed"."""
    wanted: ResponsesAnswerOptions = about.ask.dialect
    request = wanted.request
    reasoning = request.reasoning
    return {
        "id": f"resp_{about.id}",
        "object": "response",
        "created_at": int(about.created),
        "status": status,
        "background": False,
        "completed_at": int(completed_at) if completed_at is not None else None,
        "error": None if error is None else _error(error),
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "model": about.model,
        "output": list(output),
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": _text(request.prompt_cache_key),
        "reasoning": {
            "effort": reasoning.effort if reasoning is not None else None,
            "summary": reasoning.summary if reasoning is not None else None,
        },
        "safety_identifier": _text(request.safety_identifier),
        "service_tier": "default",
        "store": request.kept,
        "temperature": request.temperature,
        "text": {
            "format": wanted.format,
            "verbosity": (request.text and request.text.verbosity) or "medium",
        },
        "tool_choice": wanted.tool_choice,
        "tools": wanted.repeated_tools,
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": request.truncation or "disabled",
        "usage": None if finish is None else _usage(about, finish),
        "user": _text(request.user),
        "metadata": request.metadata or {},
    }


def _usage(about: About, finish: Finish) -> Json:
    """Return the counts of tokens. `cache_write_tokens` is 0, as writing to a cache costs nothing."""
    prompt, end = about.prompt_tokens[0], finish.end
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": end.cached, "cache_write_tokens": 0},
        "output_tokens": end.generated,
        "output_tokens_details": {"reasoning_tokens": finish.thought},
        "total_tokens": prompt + end.generated,
    }


def _error(error: MlxtpError) -> Json:
    """Return an error. `code` is one of the few that this dialect knows, `type` ours."""
    code = "rate_limit_exceeded" if error_status(error) == 429 else "server_error"
    return {"code": code, "message": error.detail, "type": error.code.value, "param": None}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
