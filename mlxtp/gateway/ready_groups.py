"""Ready groups of one deployment, and the gateway's choice among them for each request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Container, Mapping

from ..wire.messages import Prefilled
from .request import SUSPECT, ClientRequest, ForwardedRequest, RequestBackend
from .routing import GroupLoad, PrefillMeter, PrefixSummary, RouteOption, choose

OpenRequest = ClientRequest | ForwardedRequest

FIRST_S = 10.0  #: Seconds that a new group may wait for its first request without counting as idle.


class ReadyGroup:
    """A group that takes requests: its backend, and its work as far as this gateway knows it.

    `here`: the backend is rank 0, and takes forwarded requests, too; else it is the agent that has rank 0.
    `room`: tokens that its KV caches may hold, 0 without a bound.
    """

    def __init__(self, backend: RequestBackend, *, here: bool, room: int = 0) -> None:
        self.backend = backend
        self.here = here
        self.others = GroupLoad()  #: For a group elsewhere: its speed, and its work for other agents.
        self.prefill = PrefillMeter()
        self.prefixes = PrefixSummary(room)
        self.tokens = 0  #: Tokens it has sent.
        self.used_at = time.monotonic() + FIRST_S  #: Time of the last request, by a monotonic clock.

    def take(self, report: GroupLoad, own: GroupLoad) -> None:
        """Store the owner's report without the share of this gateway's `own` requests.

        Their present work is known here, while the report may be a heartbeat old.
        """
        queued, requests = max(report.queued - own.queued, 0), max(report.requests - own.requests, 0)
        self.others = GroupLoad(queued, requests, report.speed)
        self.prefixes.replace(report.prefixes)


class ReadyGroups(dict[str, ReadyGroup]):
    """Ready groups by id. `requests`: the requests that are open at groups, by uid."""

    def __init__(self, requests: Mapping[int, OpenRequest]) -> None:
        super().__init__()
        self._requests = requests

    def load_of(self, name: str) -> GroupLoad:
        """Return the work of a group: exact if it is here, else the most that is known."""
        group, own = self[name], self._own(name)
        queued, requests = group.others.queued + own.queued, group.others.requests + own.requests
        speed = group.others.speed or group.prefill.speed
        return GroupLoad(queued, requests, speed, group.prefixes.hashes)

    def take(self, name: str, report: GroupLoad) -> None:
        """Store the owner's report of a group elsewhere."""
        self[name].take(report, self._own(name))

    def _own(self, name: str) -> GroupLoad:
        """Return the work of a group for the requests of this gateway."""
        own = [request for request in self._requests.values() if request.group == name]
        return GroupLoad(sum(request.left for request in own), len(own))

    def unused_s(self, name: str) -> float:
        """Return the seconds since a group's last request; 0 while one is open."""
        if any(request.group == name for request in self._requests.values()):
            return 0.0
        return max(time.monotonic() - self[name].used_at, 0.0)

    def choose(self, request: OpenRequest, tried: Container[str]) -> str:
        """Return the id of the best group for a request, except `tried` ones; empty if there is none."""
        forwarded = isinstance(request, ForwardedRequest)
        own = request.generate.group if forwarded else ""
        names = [
            name
            for name, group in self.items()
            if name not in tried and own in ("", name) and (group.here or not forwarded)
        ]
        if len(names) <= 1:
            return names[0] if names else ""
        hashes = request.hashes()
        options = [
            RouteOption(name, self[name].here, self.load_of(name), self[name].prefixes.match(hashes))
            for name in names
        ]
        return choose(request.length, options, request.generate.max_tokens).group

    def sent(self, request: OpenRequest, name: str) -> None:
        """Note that a group gets a request."""
        group, hashes = self[name], request.hashes()
        if not self.load_of(name).queued:
            group.prefill.begin(time.monotonic())
        request.group, request.elsewhere = name, not group.here
        request.watch.moved(name)
        request.left = max(request.length - group.prefixes.match(hashes), 0)
        group.prefixes.note(hashes)
        self.used(request)

    def used(self, request: OpenRequest) -> None:
        """Note that a request begins or ends at its group."""
        if group := self.get(request.group):
            group.used_at = time.monotonic()

    def confirmed(self, request: OpenRequest, count: int) -> None:
        """Note `count` new tokens of a request."""
        self.advanced(request)
        if (group := self.get(request.group)) is not None:
            group.tokens += count

    def advanced(self, request: OpenRequest, event: Prefilled | None = None) -> None:
        """Note the progress of a request's prefill; without an event it is complete."""
        if not request.left or (group := self.get(request.group)) is None:
            return
        before, request.left = request.left, 0
        if event is not None:
            before = min(before, request.length - event.cached)
            request.left = max(request.length - event.computed, 0)
        group.prefill.computed(before - request.left, time.monotonic())

    def ended(self, request: OpenRequest) -> None:
        """Note that a group has completed a request and keeps the answer in its cache."""
        self.used(request)
        if group := self.get(request.group):
            group.prefixes.note(request.hashes())


class FallenGroups:
    """Groups that ended under requests and are not ready again. No request may take down the last group.

    A group is given up, and `given_up` called, after the time that requests wait for a group.
    """

    def __init__(self, given_up: Callable[[], None]) -> None:
        self._given_up = given_up
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def fell(self, name: str, wait_s: float) -> None:
        """Note that a group ended under requests."""
        self.rose(name)
        self._timers[name] = asyncio.get_running_loop().call_later(wait_s, self._over, name)

    def rose(self, name: str) -> None:
        """Note that a group is ready again, or no requests wait for it."""
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def clear(self) -> None:
        """Stop waiting for all groups."""
        for name in list(self._timers):
            self.rose(name)

    def least_strikes(self, ready: Collection[str]) -> int:
        """Return the strikes that make a request run alone, lest it take down group after group."""
        return 1 if len({*ready, *self._timers}) > 1 else SUSPECT

    def spare(self, ready: Collection[str]) -> bool:
        """Return True while at most one of several groups is left, so that suspects have to wait."""
        return bool(self._timers) and len(set(ready) - self._timers.keys()) <= 1

    def _over(self, name: str) -> None:
        del self._timers[name]
        self._given_up()
