"""The dispatchers of a gateway, one for each deployment that was served here, and their sums."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..api.request_metrics import RequestMeter
from ..wire.messages import RequestEvent
from .dispatcher import PHASES, OpenRequests, RequestDispatcher
from .prefixes import BLOCK
from .ready_groups import OpenRequest
from .routing import GroupLoad

STEP_S = 10  #: Seconds of disuse are counted in such steps, so that reports seldom change.


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Work of one group. `running` of its open `requests` have a first token; `tokens` came from it in all.

    `cached`: prompt and answer tokens that it keeps for later prompts.
    """

    requests: int
    running: int
    tokens: int
    cached: int


class ServedDeployments:
    """Dispatchers by the names of their deployments. `recovery_s` is that of `RequestDispatcher`."""

    def __init__(self, recovery_s: float) -> None:
        self.by_name: dict[str, RequestDispatcher] = {}
        self.homes: dict[str, str] = {}  #: The deployment of each group, by their names.
        self.loads: dict[str, GroupLoad] = {}  #: The last report of each group elsewhere.
        self.meter = RequestMeter()  #: Counts the requests of local clients.
        self.order: Callable[[], Sequence[str]] = tuple  #: Returns the names, the default first.
        #: Returns whether a client here holds a lease of a deployment, even if its request is not yet open.
        self.leased: Callable[[str], bool] = lambda _name: False
        #: Returns the client of each request that waits for its model.
        self.waiting: Callable[[], Iterable[int]] = tuple
        #: Returns whether a group of a deployment is on its way to be ready.
        self.coming: Callable[[str], bool] = lambda _name: False
        self._recovery_s = recovery_s
        self._uids = itertools.count(1)

    def named(self, name: str) -> RequestDispatcher:
        """Return the dispatcher of a deployment."""
        if name not in self.by_name:
            self.by_name[name] = RequestDispatcher(self._recovery_s, lambda: self.meter, self._uids)
        return self.by_name[name]

    def ready(self) -> list[RequestDispatcher]:
        """Return the deployments that take requests, the default first."""
        place = {name: index for index, name in enumerate(self.order())}
        names = sorted(self.by_name, key=lambda name: place.get(name, len(place)))
        return [self.by_name[name] for name in names if self.by_name[name].model is not None]

    def serving(self, model: str) -> RequestDispatcher | None:
        """Return the deployment of the model with this id, or the default; None if it takes no requests."""
        for each in self.ready():
            if each.model is not None and model in ("", each.model.id):
                return each
        return None

    def owning(self, group: str) -> RequestDispatcher | None:
        """Return the deployment of a ready group of this agent, or of any such group for an empty id."""
        for each in self.ready():
            if any(ready.here and group in ("", name) for name, ready in each.groups.items()):
                return each
        return None

    def of_group(self, group: str) -> RequestDispatcher | None:
        """Return the deployment for which a group was served last."""
        return self.by_name.get(self.homes.get(group, ""))

    def on_event(self, event: RequestEvent) -> None:
        """Process an event of any group."""
        for each in self.by_name.values():
            each.on_event(event)

    # --- sums ----------------------------------------------------------------------------------------

    @property
    def requests(self) -> list[OpenRequest]:
        """Requests that wait for more tokens, other agents' included."""
        return [request for each in self.by_name.values() for request in each.requests]

    def open(self) -> Iterator[tuple[int, int]]:
        """Yield client and tokens of each open request, and of those that wait for their model."""
        for request in self.requests:
            yield request.generate.client, request.length
        for client in self.waiting():
            yield client, 0

    def open_at(self, group: str) -> int:
        """Return the number of open requests that a group works on, other agents' included."""
        return sum(each.group == group for each in self.requests)

    def work_of(self, group: str) -> GroupWork:
        """Return the work of a group as this gateway knows it: all of it where its rank 0 is."""
        own = [each.record.progress > 0 for each in self.requests if each.group == group]
        ready = named.groups.get(group) if (named := self.of_group(group)) is not None else None
        tokens, blocks = (ready.tokens, len(ready.prefixes.hashes)) if ready is not None else (0, 0)
        return GroupWork(len(own), sum(own), tokens, blocks * BLOCK)

    def forget_prefixes(self, group: str) -> None:
        """Note that a group has no cached beginnings left."""
        if (named := self.of_group(group)) is not None and group in named.groups:
            named.groups[group].prefixes.replace(())

    def unused_s(self, group: str) -> int:
        """Return the seconds of a ready group's disuse; from 10 s on in steps of 10 s. 0 while it is used."""
        home = self.of_group(group)
        if home is None or group not in home.groups or self.leased(self.homes[group]):
            return 0
        seconds = int(home.groups.unused_s(group))
        return seconds if seconds < STEP_S else seconds // STEP_S * STEP_S

    @property
    def confirmed_tokens(self) -> int:
        """Tokens from ranks for requests of this gateway; on the Macs of ranks 0, for all requests."""
        return sum(each.confirmed_tokens for each in self.by_name.values())

    @property
    def phases(self) -> dict[str, int]:
        """Open requests, other agents' included, by their phase; see `RequestDispatcher.queue`."""
        phases = dict.fromkeys(PHASES, 0)
        for each in self.by_name.values():
            for phase, count in each.queue.items():
                phases[phase] += count
        return phases

    def count_open(self) -> tuple[OpenRequests, ...]:
        """Count the requests that are open now, for each deployment; the one served first comes first."""
        return tuple(each.count_open() for each in self.by_name.values())
