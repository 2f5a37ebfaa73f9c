"""Dispatch of open requests to the groups of each deployment. Every request ends, if only with an error."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..api.backend import ModelInfo
from ..api.request_metrics import UNWATCHED, RequestMeter
from ..errors import Code, GroupError, MlxtpError, RequestError
from ..text.tokenizer import Text
from ..wire.messages import (
    BLOCK,
    Accepted,
    Cancel,
    Delta,
    Error,
    Finished,
    Prefilled,
    RequestEvent,
    ScoredDelta,
    Vectors,
)
from .ready_groups import FallenGroups, OpenRequest, ReadyGroup, ReadyGroups
from .request import (
    PROVEN_TOKENS,
    ClientRequest,
    ForwardedRequest,
    RequestBackend,
    ended,
    may_blame,
    strikes_after,
    struck,
)
from .routing import GroupLoad

log = logging.getLogger(__name__)

LOADS = 3  #: Loads that a request waits for: one may fail, and fewer Macs take longer.
NOT_READY = GroupError("no group is ready", Code.NOT_READY)
#: Phases of open requests: the present group has sent tokens; it has not yet (queue or prefill); no group has
#: the request; it waits behind a suspect.
PHASES = ("generating", "first_token", "group", "held_back")
ASK_AGAIN_S = 0.5  #: Seconds before retrying an agent whose rank 0 was not ready.


@dataclass(frozen=True, slots=True)
class OpenRequests:
    """Open requests of local clients for `model`. The agent's own requests do not count.

    running  requests with a first token
    waiting  requests that wait for one: in a queue, in prefill, or for another group
    held     tokens of prompts and answers of all requests at a local rank 0, other agents' included
    """

    model: str
    running: int
    waiting: int
    held: int


class RequestDispatcher:
    """Open requests of one deployment: at a group, paused until one is ready, or behind a suspect.

    recovery_s  seconds that a request waits for a group before it ends with an error, but at least
                `LOADS` times the model's last load
    meter       returns the meter of local clients' requests
    uids        gives numbers that no other request of this gateway has
    """

    def __init__(self, recovery_s: float, meter: Callable[[], RequestMeter], uids: Iterator[int]) -> None:
        self.recovery_s = recovery_s
        self.load_s = 0.0  #: Seconds that the served model took to load; 0 if unknown.
        self.served: ModelInfo | None = None  #: The model of the open requests.
        self.text: Text | None = None
        #: The reason for the gap between two groups while the second is on its way.
        self.handover: MlxtpError | None = None
        #: Tokens from ranks for requests of this gateway; on the Mac of rank 0, for all requests.
        self.confirmed_tokens = 0
        self._meter = meter
        self._uids = uids
        self._open: dict[int, OpenRequest] = {}  #: By uid: the requests at a backend.
        self.groups = ReadyGroups(self._open)
        self._paused: dict[ClientRequest, None] = {}  #: In order: the requests that wait for a group.
        #: The requests that wait until the suspect before them has proven harmless.
        self._suspects: deque[OpenRequest] = deque()
        self._suspect: OpenRequest | None = None
        self._fallen = FallenGroups(self._next_suspect)

    # --- one request ---------------------------------------------------------------------------------

    def admit(self, request: OpenRequest, error: MlxtpError = NOT_READY, without: Iterable[str] = ()) -> None:
        """Send a request to the best ready group, or queue it behind suspects.

        Without a ready group, a local client's request waits for one, and ends with `error` if it waits too
        long; another agent's raises RequestError. Groups in `without` do not count.
        """
        if isinstance(request, ClientRequest) and request.got >= request.generate.max_tokens:
            request.put(Finished(request.uid, "length", request.got, 0))  # only the end is missing
            return
        if self.served is not None and not _goes_on_with(self.served, request):
            request.put(_replaced(self.served))
            return
        alone = request.strikes >= self._fallen.least_strikes(self.groups)
        waits = self._fallen.spare(self.groups) or self._suspect not in (None, request)
        if self.groups and alone and waits:
            self._suspects.append(request)
            if isinstance(request, ClientRequest):
                request.wait_no_more()  # there is a group; it will run the request later
            return
        failed = error
        tried = set(without)
        while name := self.groups.choose(request, tried):
            group = self.groups[name]
            try:
                self.send(request, group.backend, "" if group.here else name)
            except MlxtpError as gone:  # the agent is about to notice that the group or its link ended
                failed = GroupError(f"rank 0 is gone: {gone.detail}", Code.NOT_READY)
                tried.add(name)
                continue
            self.groups.sent(request, name)
            if alone:
                self._suspect = request
            return
        if isinstance(request, ForwardedRequest):
            if failed is not error:  # its own gateway makes it wait, as after any end of a group
                raise GroupError(failed.detail, Code.LINK_LOST)
            raise RequestError(failed.detail, Code.NOT_READY, status=503)
        self.park(request, failed)

    def send(self, request: OpenRequest, backend: RequestBackend, group: str = "") -> None:
        """Send a request to a backend, for its group of that id. Raises MlxtpError if the backend is gone."""
        uid = next(self._uids)
        message = request.again(uid)
        backend.send(replace(message, group=group) if group else message)
        request.uid, request.backend = uid, backend
        request.begun_with = self.served
        self._open[uid] = request

    def abandon(self, request: OpenRequest) -> None:
        """Drop a request without a waiting client. Unless it is complete, every rank stops working on it."""
        if isinstance(request, ClientRequest):
            self._paused.pop(request, None)
            request.wait_no_more()
        if request in self._suspects:
            self._suspects.remove(request)
        if self._open.get(request.uid) is request:
            del self._open[request.uid]
            self.groups.used(request)
            assert request.backend is not None
            with contextlib.suppress(MlxtpError):  # rank 0 is gone, so nothing decodes it anymore
                request.backend.send(Cancel(request.uid))
        self._next_suspect()

    def on_event(self, event: RequestEvent) -> None:
        """Process an event of a group. Drop it if its request is unknown here."""
        match event:
            case Delta():
                now = self._meter().clock()
                for uid, index, token in zip(event.uids, event.indices, event.tokens, strict=True):
                    if request := self._open.get(uid):
                        self.confirmed_tokens += 1
                        self.groups.confirmed(request, 1)
                        request.put(Delta((uid,), (index,), (token,)))
                        request.watch.tokens(1, now)
            case ScoredDelta(prompt=False):
                if request := self._open.get(event.uid):
                    self.confirmed_tokens += len(event.tokens)
                    self.groups.confirmed(request, len(event.tokens))
                    request.put(event)
                    request.watch.tokens(len(event.tokens), self._meter().clock())
            case Accepted() | Prefilled() | ScoredDelta() | Vectors():
                if request := self._open.get(event.uid):
                    if isinstance(event, Prefilled):
                        self.groups.advanced(request, event)
                    request.advance(event)
            case Finished():
                if request := self._open.pop(event.uid, None):
                    self.groups.ended(request)
                    request.put(event)
            case Error():
                if request := self._open.pop(event.uid, None):
                    self.groups.used(request)
                    self._refused(request, _refusal(Code(event.code), event.detail))
        self._next_suspect()

    # --- from one group to another -------------------------------------------------------------------

    def attach(self, name: str, group: ReadyGroup, model: ModelInfo, text: Text, load_s: float) -> None:
        """Send requests to a group from now on, paused requests first.

        If it serves another model than the groups before it, these get no new requests. They complete their
        open requests; requests that wait for them end.
        """
        if self.served is not None and (self.served.id, self.served.path) != (model.id, model.path):
            self.groups.clear()
        self.served, self.text, self.handover, self.load_s = model, text, None, load_s
        self.groups[name] = group
        self._fallen.rose(name)
        self.resume()

    def detach(self, name: str, until: MlxtpError | None = None) -> None:
        """Send no new requests to a group; open ones stay with it.

        `until` is the reason for a gap before the next group: new requests wait if no other group is ready.
        """
        ready = self.groups.pop(name, None) is not None
        if until is None or self.groups:
            self.handover = None
        elif ready:  # a repeated call changes nothing
            self.handover = until

    def park_group(self, name: str, error: MlxtpError, *, spare: bool = False) -> None:
        """A group ended with `error`: move its open requests to another one, or make them wait.

        Requests of other agents go back there. A suspect request ends; `spare` prevents that.
        """
        ready = name in self.groups or self.handover is not None
        self.detach(name)
        if may_blame(error.code):
            self._fallen.fell(name, _wait_s(self))
        if error.code is Code.REPLANNED and ready and not self.groups:
            self.handover = error
        own = [request for request in self._open.values() if request.group == name]
        waiting = list(self._suspects)
        strikes = strikes_after([*own, *waiting], error.code, spare=spare)
        for request in own:
            del self._open[request.uid]
            request.uid, request.group = 0, ""
        if self._suspect in own:
            self._suspect = None
        self._suspects = deque(each for each in waiting if not _goes_back(each, name))
        # Requests without strikes continue first.
        for request, count in sorted(zip(own, strikes, strict=False), key=lambda each: each[1] or 0):
            if count is None:
                log.error("a request ends and is not sent to another group: %s", error.detail)
                request.put(ended(error.code, error.detail))
            elif isinstance(request, ForwardedRequest):
                request.give_back(error, struck=count != request.strikes)
            else:
                request.strikes = count
                self.admit(request, error)
        for request in waiting:
            if isinstance(request, ForwardedRequest) and request not in self._suspects:
                request.give_back(error, struck=False)
        self._next_suspect()

    def park(self, request: ClientRequest, error: MlxtpError) -> None:
        """Make a request wait for the next group. If none takes it in time, it ends with `error`."""
        request.uid, request.group = 0, ""
        self._paused[request] = None
        if request.pending is None:
            loop, wait_s = asyncio.get_running_loop(), _wait_s(self)
            request.pending = loop.call_later(wait_s, self._give_up, request, error, wait_s)

    def resume(self) -> None:
        """Send the paused requests to ready groups, which generate the rest of the answers."""
        if self.groups:
            paused, self._paused = self._paused, {}
            for request in paused:
                self.admit(request)
        self._next_suspect()

    def give_back(self, error: MlxtpError) -> None:
        """Return the requests of other agents, where they may continue."""
        for request in [*self._open.values(), *self._suspects]:
            if isinstance(request, ForwardedRequest):
                request.give_back(error, struck=False)
        for uid in [uid for uid, each in self._open.items() if isinstance(each, ForwardedRequest)]:
            del self._open[uid]
        self._suspects = deque(request for request in self._suspects if isinstance(request, ClientRequest))

    def withdraw(self, error: MlxtpError) -> None:
        """Refuse requests from now on, and end the open ones with `error`."""
        self.groups.clear()
        self.served = self.text = self.handover = None
        self.end_all(error)

    def end_all(self, error: MlxtpError) -> None:
        """End the open requests with `error`."""
        requests = self.requests
        self._open.clear()
        self._paused.clear()
        self._suspects.clear()
        self._suspect = None
        self._fallen.clear()
        for request in requests:
            request.put(error)

    def _give_up(self, request: ClientRequest, error: MlxtpError, waited_s: float) -> None:
        self.abandon(request)
        detail = f"no group resumed this request within {waited_s:.3g} s: {error.detail}"
        request.put(GroupError(detail, error.code))

    def _refused(self, request: OpenRequest, error: MlxtpError) -> None:
        """Handle an Error for a request. From rank 0 it is final; from another agent it may not be."""
        if isinstance(request, ForwardedRequest) or not request.elsewhere:
            request.put(error)
            return
        refused = isinstance(error, RequestError) or error.code is Code.SHUTTING_DOWN
        request.refusals += refused
        at_once = not refused or request.refusals < len(self.groups.keys() | {request.group})
        if not _another_group_may(request, error, refused=refused, others=at_once):
            request.put(error)
            return
        if error.code is Code.RANK_LOST:
            request.strikes = struck(request)
            self._fallen.fell(request.group, _wait_s(self))
        if at_once:
            self.admit(request, error, without=(request.group,))
        else:
            self.park(request, error)
        if request in self._paused:
            asyncio.get_running_loop().call_later(ASK_AGAIN_S, self.resume)

    def _next_suspect(self) -> None:
        """Send the next suspect once the one before it has ended or proven harmless."""
        suspect = self._suspect
        if suspect is not None:
            if self._open.get(suspect.uid) is suspect and suspect.came < PROVEN_TOKENS:
                return
            self._suspect = None
        while self._suspects and self._suspect is None and not self._fallen.spare(self.groups):
            waiting = self._suspects.popleft()
            try:
                self.admit(waiting)
            except MlxtpError as error:
                waiting.put(error)

    # --- counts --------------------------------------------------------------------------------------

    @property
    def model(self) -> ModelInfo | None:
        """The model for new requests; None while they are refused."""
        return self.served if self.groups or self.handover is not None else None

    @property
    def requests(self) -> list[OpenRequest]:
        """Requests that wait for more tokens, other agents' included."""
        return [*self._open.values(), *self._paused, *self._suspects]

    def count_open(self) -> OpenRequests:
        """Count the requests that are open now."""
        own = [
            request
            for request in self.requests
            if isinstance(request, ClientRequest) and request.watch is not UNWATCHED
        ]
        running = sum(request.uid != 0 and request.got > 0 for request in own)
        here = [request for request in self._open.values() if request.group and not request.elsewhere]
        held = sum(request.length for request in here if request.came)
        model = self.served.id if self.served is not None else ""
        return OpenRequests(model, running, len(own) - running, held)

    @property
    def queue(self) -> Mapping[str, int]:
        """Open requests, other agents' included, by their phase; see `PHASES`."""
        progress = [request.came for request in self._open.values()]
        generating = sum(count > 0 for count in progress)
        counts = (generating, len(progress) - generating, len(self._paused), len(self._suspects))
        return dict(zip(PHASES, counts, strict=True))


def _goes_on_with(model: ModelInfo, request: OpenRequest) -> bool:
    """Return True if a model can continue a request; one of the same id and vocabulary can start it over."""
    before = request.begun_with
    if before is None or before.path == model.path:
        return True
    return not request.got and (before.id, before.vocabulary) == (model.id, model.vocabulary)


def _replaced(model: ModelInfo) -> GroupError:
    """Return the error for a request that another model began."""
    return GroupError(f"the cluster now serves {model.id}; send the request again", Code.SHUTTING_DOWN)


def _wait_s(of: RequestDispatcher) -> float:
    """Return the seconds that a request waits for a group."""
    return max(of.recovery_s, LOADS * of.load_s)


def _goes_back(request: OpenRequest, group: str) -> bool:
    """Return True if a waiting suspect is another agent's, for a group that has ended."""
    return isinstance(request, ForwardedRequest) and request.generate.group in ("", group)


def _another_group_may(asked: ClientRequest, error: MlxtpError, *, refused: bool, others: bool) -> bool:
    """Return True if a request that another agent returned can continue at another or the next group.

    `others`: some ready groups have not refused it.
    """
    if refused:
        come_back = (Code.NOT_READY, Code.OVERLOADED, Code.SHUTTING_DOWN)
        return (others or asked.times > asked.refusals) and error.code in come_back
    return error.code not in (Code.OUT_OF_MEMORY, Code.REQUEST_FATAL)


def _refusal(code: Code, detail: str) -> MlxtpError:
    if code in (Code.BAD_REQUEST, Code.CONTEXT_OVERFLOW, Code.NOT_SUPPORTED, Code.GRAMMAR_STUCK):
        return RequestError(detail, code)
    if code is Code.OVERLOADED:
        return RequestError(detail, code, status=429)
    if code is Code.NOT_READY:
        return RequestError(detail, code, status=503)
    return GroupError(detail, code)


# --- all deployments ------------------------------------------------------------------------------------

STEP_S = 10  #: Granularity of idle time in seconds, so that reports seldom change.


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Work of one group: open `requests`, `running` ones with a first token, and all `tokens` it has sent.

    `cached`: prompt and answer tokens that it keeps for later prompts.
    """

    requests: int
    running: int
    tokens: int
    cached: int


class ServedDeployments:
    """Dispatchers by the names of their deployments. `recovery_s`: see `RequestDispatcher`."""

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
        #: Returns whether a deployment has a group that is starting.
        self.coming: Callable[[str], bool] = lambda _name: False
        self._recovery_s = recovery_s
        self._uids = itertools.count(1)
        self._past_tokens = 0  #: Tokens of former deployments.

    def keep(self, groups: Container[str], deployments: Container[str]) -> None:
        """Forget all other groups, and all other deployments without open requests."""
        for known in (self.homes, self.loads):
            for name in [each for each in known if each not in groups]:
                del known[name]
        for name, each in list(self.by_name.items()):
            if name not in deployments and not each.requests and not each.groups:
                self._past_tokens += self.by_name.pop(name).confirmed_tokens

    def named(self, name: str) -> RequestDispatcher:
        if name not in self.by_name:
            self.by_name[name] = RequestDispatcher(self._recovery_s, lambda: self.meter, self._uids)
        return self.by_name[name]

    def ready(self) -> list[RequestDispatcher]:
        """Return the deployments that take requests, the default first."""
        place = {name: index for index, name in enumerate(self.order())}
        names = sorted(self.by_name, key=lambda name: place.get(name, len(place)))
        return [self.by_name[name] for name in names if self.by_name[name].model is not None]

    def serving(self, model: str) -> RequestDispatcher | None:
        """Return the deployment of the model with this id, or the default; None if it takes no requests.

        With an id, also one whose group has just ended: the caller wrote its prompt for it, and waits.
        """
        for each in self.ready():
            if each.model is not None and model in ("", each.model.id):
                return each
        all_ = self.by_name.values()
        return next((each for each in all_ if each.served is not None and each.served.id == model), None)

    def owning(self, group: str) -> RequestDispatcher | None:
        """Return the deployment of a ready group of this agent, or of any such group for an empty id."""
        for each in self.ready():
            if any(ready.here and group in ("", name) for name, ready in each.groups.items()):
                return each
        return None

    def of_group(self, group: str) -> RequestDispatcher | None:
        """Return the deployment that a group last served."""
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
        """Yield client and tokens of each request that is open or waits for its model."""
        for request in self.requests:
            yield request.generate.client, request.cost
        for client in self.waiting():
            yield client, 0

    def open_at(self, group: str) -> int:
        """Return the number of a group's open requests, other agents' included."""
        return sum(each.group == group for each in self.requests)

    def blamed(self, group: str, code: Code) -> int:
        """Return the failures in a row of the request that a group's failure ends; 0 if it ends none."""
        own = [each for each in self.requests if each.group == group]
        after = zip(own, strikes_after(own, code), strict=True)
        return max((each.strikes + 1 for each, count in after if count is None), default=0)

    def work_of(self, group: str) -> GroupWork:
        """Return the work of a group as far as this gateway knows it; all of it on rank 0's Mac."""
        own = [each.came > 0 for each in self.requests if each.group == group]
        ready = named.groups.get(group) if (named := self.of_group(group)) is not None else None
        tokens, blocks = (ready.tokens, len(ready.prefixes.hashes)) if ready is not None else (0, 0)
        return GroupWork(len(own), sum(own), tokens, blocks * BLOCK)

    def forget_prefixes(self, group: str) -> None:
        """Note that a group has no cached prefixes left."""
        if (named := self.of_group(group)) is not None and group in named.groups:
            named.groups[group].prefixes.replace(())

    def unused_s(self, group: str) -> int:
        """Return a ready group's idle time in seconds, from 10 s on in steps of 10 s; 0 while in use."""
        home = self.of_group(group)
        if home is None or group not in home.groups or self.leased(self.homes[group]):
            return 0
        seconds = int(home.groups.unused_s(group))
        return seconds if seconds < STEP_S else seconds // STEP_S * STEP_S

    @property
    def confirmed_tokens(self) -> int:
        """Tokens from ranks for requests of this gateway; on a Mac with a rank 0, for all requests."""
        return self._past_tokens + sum(each.confirmed_tokens for each in self.by_name.values())

    @property
    def phases(self) -> dict[str, int]:
        """Open requests, other agents' included, by their phase; see `RequestDispatcher.queue`."""
        phases = dict.fromkeys(PHASES, 0)
        for each in self.by_name.values():
            for phase, count in each.queue.items():
                phases[phase] += count
        return phases

    def count_open(self) -> tuple[OpenRequests, ...]:
        """Count the open requests of each deployment, the one served first at the start."""
        return tuple(each.count_open() for each in self.by_name.values())
