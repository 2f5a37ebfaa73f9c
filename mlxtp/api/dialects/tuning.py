"""Sampling and length settings that all of OpenAI's dialects share under the same names. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ...text.conversation import GenerationOptions
from ..request_body import Schema, in_range

MOST_TOKENS = 2**31 - 1


class Tuning(Schema):
    """The settings. Those with an asterisk in `docs/api.md` are not in OpenAI's own API."""

    min_tokens: Annotated[int, in_range(0, MOST_TOKENS)] | None = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float, in_range(0, 2)] | None = None
    top_p: Annotated[float, in_range(0, 1)] | None = None
    top_k: Annotated[int, in_range(-1, MOST_TOKENS)] | None = None
    min_p: Annotated[float, in_range(0, 1)] | None = None
    xtc_probability: Annotated[float, in_range(0, 1)] | None = None
    xtc_threshold: Annotated[float, in_range(0, 0.5)] | None = None
    seed: int | None = None
    presence_penalty: Annotated[float, in_range(-2, 2)] | None = None
    frequency_penalty: Annotated[float, in_range(-2, 2)] | None = None
    repetition_penalty: Annotated[float, in_range(0.01, 100)] | None = None
    logit_bias: dict[str, Annotated[float, in_range(-100, 100)]] | None = None
    deadline_s: Annotated[float, in_range(0.001, 86_400)] | None = None

    def options(
        self, *, n: int = 1, max_tokens: int | None, logprobs: int, format_: Mapping[str, Any] | None
    ) -> GenerationOptions:
        """Return the options. The arguments are those that each dialect names in its own way."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return GenerationOptions(
            n=n,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens or 0,
            stop=stops,
            ignore_eos=bool(self.ignore_eos),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            xtc_probability=self.xtc_probability,
            xtc_threshold=self.xtc_threshold,
            seed=self.seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            format=format_,
            logprobs=logprobs,
            deadline_s=self.deadline_s or 0.0,
        )
