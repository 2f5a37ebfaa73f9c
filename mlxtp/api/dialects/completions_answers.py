"""Answers of `/v1/completions`, in OpenAI's older shape."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ...errors import MlxtpError
from ...text.transcript import AnswerEvent, ContentDelta, Finish, Scored, WholeAnswer
from ..adapter import About, Json
from ..backend import StreamEnd
from ..http_errors import error_body_of
from ..streaming import COMMENT
from .openai_answers import LEAST_LOGPROB, finishes, first_open, sse, usage


class Logprobs:
    """The scores of one answer in the older shape, piece by piece.

    `text_offset` is in characters of the answer's own text. `top_logprobs` has the chosen token, too.
    """

    def __init__(self, about: About) -> None:
        self._about = about
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, scores: Sequence[Scored]) -> Json:
        """Return the scores of the next tokens."""
        tokens, own, top, offsets = [], [], [], []
        names = self._about.names
        for token, score in scores:
            name, bytes_ = names(token)
            others = {names(other)[0]: _bounded(logprob) for other, logprob in reversed(score.top)}
            tokens.append(name)
            own.append(_bounded(score.logprob))
            top.append(others | {name: own[-1]})
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(bytes(bytes_ or ())))
        return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}


def _bounded(logprob: float) -> float:
    return min(max(logprob, LEAST_LOGPROB), 0.0)


def _head(about: About) -> Json:
    return {
        "id": f"cmpl-{about.id}",
        "object": "text_completion",
        "created": int(about.created),
        "model": about.model,
    }


def _choice(index: int, text: str, scores: Json | None, reason: str | None) -> Json:
    return {"index": index, "text": text, "logprobs": scores, "finish_reason": reason}


def _echo(about: About, choice: int) -> str:
    """Return the start of an answer: its prompt if the request has `echo`."""
    return about.prompts[choice // about.ask.options.n] if about.ask.dialect.echo else ""


def whole_body(about: About, wholes: Sequence[WholeAnswer]) -> Json:
    """Return the whole answer to a request that does not stream."""
    scored = about.ask.options.logprobs >= 0
    ends = finishes(wholes)
    choices = []
    for index, (whole, end) in enumerate(zip(wholes, ends, strict=True)):
        scores = Logprobs(about).of(whole.scores) if scored else None
        choices.append(_choice(index, _echo(about, index) + whole.text, scores, end.reason))
    return _head(about) | {"choices": choices, "usage": usage(about, [end.end for end in ends])}


class CompletionWriter:
    def __init__(self, about: About) -> None:
        self._about = about
        self._head = _head(about)
        self._include_usage = about.ask.dialect.include_usage
        self._logprobs = [Logprobs(about) for _ in range(about.choices)]
        self._ends: dict[int, StreamEnd] = {}

    def open(self) -> bytes:
        return COMMENT

    def begin(self) -> bytes:
        texts = [_echo(self._about, choice) for choice in range(self._about.choices)]
        return b"".join([self._chunk(choice, text) for choice, text in enumerate(texts) if text])

    def write(self, event: AnswerEvent) -> bytes:
        match event:
            case ContentDelta(choice, text, scores):
                known = self._logprobs[choice].of(scores) if scores else None
                return self._chunk(choice, text, known) if text or scores else b""
            case Finish(choice, reason, end):
                self._ends[choice] = end
                return self._chunk(choice, "", reason=reason)
            case _:  # a prompt that is continued has neither thoughts nor calls
                return b""

    def close(self) -> bytes:
        trailer = b""
        if self._include_usage:
            ends = [self._ends[choice] for choice in range(self._about.choices)]
            trailer = sse(self._head | {"choices": [], "usage": usage(self._about, ends)})
        return trailer + b"data: [DONE]\n\n"

    def fail(self, error: MlxtpError) -> bytes:
        return sse(error_body_of(error))

    def idle(self, more: Json) -> bytes:
        index = first_open(self._about, self._ends)
        return self._chunk(index, "", more=more)

    def _chunk(
        self,
        choice: int,
        text: str,
        scores: Json | None = None,
        reason: str | None = None,
        more: Json | None = None,
    ) -> bytes:
        chunk = self._head | {"choices": [_choice(choice, text, scores, reason)]} | (more or {})
        return sse(chunk | {"usage": None} if self._include_usage else chunk)
