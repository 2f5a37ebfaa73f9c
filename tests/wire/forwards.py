"""Forwards that read prompts, by the fields of one prompt or of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from mlxtp.wire.messages import Forward, PromptPart, Sampling

_OF_FORWARD = ("gathered", "agreement", "drafts")


def of_prompt(uid: int, offset: int, total: int, tokens: tuple[int, ...], **fields: Any) -> Forward:
    """The next tokens of one prompt."""
    own = {name: fields.pop(name) for name in _OF_FORWARD if name in fields}
    return Forward((uid,), (offset,), (len(tokens),), tokens, **own, prompts=(PromptPart(total, **fields),))


def of_prompts(
    uids: tuple[int, ...],
    totals: Sequence[int],
    offsets: tuple[int, ...],
    tokens: tuple[int, ...],
    sources: Sequence[int] = (),
    takes: Sequence[bool] = (),
    samplings: Sequence[Sampling] = (),
    **fields: Any,
) -> Forward:
    """The rest of several prompts."""
    widths = tuple(total - offset for total, offset in zip(totals, offsets, strict=True))
    none = (0,) * len(uids)
    columns = zip(totals, sources or none, takes or none, samplings or (Sampling(),) * len(uids), strict=True)
    parts = tuple(PromptPart(total, source, bool(take), how) for total, source, take, how in columns)
    return Forward(uids, offsets, widths, tokens, **fields, prompts=parts)


def kind_of(message: object) -> str:
    """The name of a message's kind; of a forward that reads prompts "Forward of prompts"."""
    return f"{type(message).__name__}{' of prompts' if reads_prompts(message) else ''}"


def is_step(message: object) -> TypeGuard[Forward]:
    return isinstance(message, Forward) and not message.prompts


def reads_prompts(message: object) -> TypeGuard[Forward]:
    return isinstance(message, Forward) and bool(message.prompts)
