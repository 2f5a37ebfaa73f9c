"""Open requests as the page shows them: how far each one is, without its text and its sender.

Senders are for those who may see the use of keys, and come by `senders` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..api.admin import Json
from ..api.request_metrics import UNWATCHED, CountedSequence
from ..gateway.deployments import ServedDeployments
from ..gateway.ready_groups import OpenRequest
from ..gateway.request import ClientRequest

MOST = 64  #: Requests that are shown.


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """One open request, of a client of this agent (`here`) or of another one. Counts are in tokens.

    `number` names it as long as it is open. `group` is the id of the group that has it, empty while none has.
    `phase` is "waiting" (in a queue), "restarting" (for a group), "reading" or "writing". Of its `prompt` so
    many are `read`; so many were `cached`, None while unknown, and of other agents' requests. `tokens` of
    its answer have come.
    """

    number: int
    model: str
    group: str
    phase: str
    prompt: int
    read: int
    cached: int | None
    tokens: int
    here: bool


def gather(deployments: ServedDeployments) -> tuple[RunningRequest, ...]:
    """Return the open requests, the oldest first, without those that the agent itself makes."""
    found = [
        _running(request, name)
        for name, each in deployments.by_name.items()
        for request in _of_clients(each.requests)
    ]
    return tuple(sorted(found, key=lambda each: each.number)[:MOST])


def senders(deployments: ServedDeployments) -> list[Json]:
    """Return the name of the key and the program of each open request of this agent's clients."""
    found: list[Json] = []
    for request in _of_clients(deployments.requests):
        watch = request.watch
        if isinstance(watch, CountedSequence) and watch.account is not None:
            found.append({"number": request.number, "key": watch.account.key, "app": watch.account.app})
    return found[:MOST]


def _of_clients(requests: Iterable[OpenRequest]) -> Iterator[OpenRequest]:
    for each in requests:
        if not isinstance(each, ClientRequest) or each.watch is not UNWATCHED:
            yield each


def _running(request: OpenRequest, name: str) -> RunningRequest:
    prompt, cached = len(request.generate.tokens) - request.generate.answered, None
    if isinstance(request, ClientRequest):
        progress, tokens = request.progress(), request.got
        phase, read = _PHASES.get(progress.state, "writing"), progress.processed
        if phase in ("reading", "writing"):
            cached = min(request.cached, prompt)
    else:
        tokens = request.generate.answered + request.record.progress
        phase = "writing" if request.record.progress else "reading" if request.uid else "waiting"
        read = max(prompt - request.left, 0)
    read = prompt if phase == "writing" else min(read, prompt)
    here = isinstance(request, ClientRequest)
    return RunningRequest(request.number, name, request.group, phase, prompt, read, cached, tokens, here)


_PHASES = {"queued": "waiting", "prefill": "reading", "restarting": "restarting"}
