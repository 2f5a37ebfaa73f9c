"""Retries of requests after a group has failed under them. Pure.

Most groups fail for reasons of their own, and then every request continues in the next one. A request may
also be the reason: it fills the memory, or makes a kernel crash. This policy finds it without ending others.
A request is a suspect after two failures in a row without progress in between. A single suspect is ended.
Several are sent again one at a time, and the one under which the group fails once more is ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import Code, GroupError

#: A request that got so many tokens from a group is not why that group failed, or not for certain.
PROVEN_TOKENS = 16
SUSPECT = 2  #: Failures in a row that make a suspect.

#: Codes of epochs that ended, or became unreachable, through no request's fault.
_NOBODYS = frozenset((Code.REPLANNED, Code.SHUTTING_DOWN, Code.LINK_LOST, Code.NOT_READY))


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """State of one open request when its group failed.

    strikes   failures before this one
    progress  tokens that this group gave it
    length    tokens of its prompt and answer
    running   whether the ranks had it
    """

    strikes: int
    progress: int
    length: int
    running: bool = True


def strikes_after(requests: Sequence[RequestRecord], code: Code) -> list[int | None]:
    """Return the strikes of each request once its group has ended with `code`; None for one that is ended."""
    if code in _NOBODYS:
        return [each.strikes for each in requests]
    if code is Code.OUT_OF_MEMORY:
        return _without_the_largest(requests)
    strikes: list[int | None] = [struck(each) for each in requests]
    suspects = [i for i, count in enumerate(strikes) if count is not None and count >= SUSPECT]
    for i in suspects:
        was_alone = len(suspects) == 1 or requests[i].strikes >= SUSPECT
        if was_alone and requests[i].running:
            strikes[i] = None
    return strikes


def struck(request: RequestRecord) -> int:
    """Return the strikes of a request after a failure that it may have caused."""
    if not request.running:
        return request.strikes
    return 0 if request.progress >= PROVEN_TOKENS else request.strikes + 1


def _without_the_largest(requests: Sequence[RequestRecord]) -> list[int | None]:
    """End the request that filled the memory: the longest of those that just began, else of all."""
    strikes: list[int | None] = [each.strikes for each in requests]
    running = [i for i, each in enumerate(requests) if each.running]
    begun = [i for i in running if not requests[i].progress]
    if running:
        strikes[max(begun or running, key=lambda i: requests[i].length)] = None
    return strikes


def ended(code: Code, detail: str) -> GroupError:
    """Return the error for a request that is not sent again after a group ended with `code`."""
    if code is Code.OUT_OF_MEMORY:
        return GroupError(f"memory ran out under this request: {detail}", Code.OUT_OF_MEMORY)
    return GroupError(f"the ranks failed twice under this request: {detail}", Code.REQUEST_FATAL)
