"""Tables of the legal order of messages: for each kind of link, (state, sender, message) -> next state.

A move that is not in the table is illegal. States that mean the same have the same name on every link:

    new -Hello-> greeted -Welcome-> open -Bootstrap-> linking -Done-> linked
    linked -Init-> forming -InitDone-> formed -SanityCheck-> proving -SanityDone-> proven
    proven -LoadShard-> loading -Loaded-> loaded -KvBudget-> resizing -Loaded-> loaded
    new -JoinOffer-> offered -JoinRequest-> asked -JoinGrant or JoinRefusal-> closed

A state in -ing waits for the reply to one command. Both ends run this table, each at its own time. A message
may therefore arrive in a state that its sender did not know of yet. Where that can happen, the table holds
both orders, and both end in the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache

from .messages import (
    Accepted,
    Ack,
    Arrange,
    Bootstrap,
    Cancel,
    ChosenTokens,
    CollectivesTimed,
    Delta,
    Done,
    Error,
    Evict,
    FetchBlocks,
    FetchedBlocks,
    Finished,
    Forward,
    Gathered,
    Generate,
    Hello,
    Init,
    InitDone,
    KvBudget,
    Loaded,
    LoadShard,
    Message,
    Ping,
    Pong,
    Prefilled,
    Restore,
    SanityCheck,
    SanityDone,
    ScoredDelta,
    SessionEnd,
    SessionStop,
    Shutdown,
    SideChannel,
    Spill,
    TimeCollectives,
    Unload,
    Welcome,
)


class Side(Enum):
    """The two sides of a link: UPPER sends commands, LOWER sends Hello and replies. A joiner is LOWER."""

    UPPER = "upper"
    LOWER = "lower"

    @property
    def peer(self) -> Side:
        """Return the side at the other end."""
        return Side.LOWER if self is Side.UPPER else Side.UPPER


class LinkKind(Enum):
    """Kinds of links: (name of the kind, its upper side, its lower side)."""

    PIPE_LEADER = ("pipe to rank 0", "the agent", "rank 0")
    PIPE = ("pipe", "the agent", "the rank")
    DECODE = ("decode link", "rank 0", "the rank")
    CONTROL = ("control link", "the agent that was called", "the agent that called")
    REQUESTS = ("requests link", "the agent with clients", "the agent with rank 0")
    JOIN = ("join link", "the cluster", "the joiner")

    def __str__(self) -> str:
        return self.value[0]

    def who(self, side: Side) -> str:
        """Return the name of `side` of such a link."""
        return self.value[1] if side is Side.UPPER else self.value[2]


class LinkState(Enum):
    """State of a link. A plain CLOSING owes the Done of Shutdown, CLOSING_AFTER_* another reply first."""

    NEW = "new"
    GREETED = "greeted"
    PARTING = "parting"
    OFFERED = "offered"
    ASKED = "asked"
    OPEN = "open"
    LINKING = "linking"
    LINKED = "linked"
    FORMING = "forming"
    FORMED = "formed"
    PROVING = "proving"
    PROVEN = "proven"
    LOADING = "loading"
    LOADED = "loaded"
    CHECKING = "checking"
    MEASURING = "measuring"
    RESIZING = "resizing"
    UNLOADING = "unloading"
    CLOSING = "closing"
    CLOSING_AFTER_DONE = "closing after Done"
    CLOSING_AFTER_INIT = "closing after InitDone"
    CLOSING_AFTER_SANITY = "closing after SanityDone"
    CLOSING_AFTER_LOAD = "closing after Loaded"
    CLOSING_AFTER_TIMES = "closing after CollectivesTimed"
    ENDED = "ended"
    CLOSED = "closed"
    FAILED = "failed"

    def __str__(self) -> str:
        return self.value


TERMINAL = frozenset((LinkState.CLOSED, LinkState.FAILED))  #: states in which nothing is legal

#: States in which the peer has proven nothing yet. Frames are limited to 4 KiB.
OPENING = frozenset((LinkState.NEW, LinkState.GREETED, LinkState.PARTING, LinkState.OFFERED, LinkState.ASKED))


class RequestFailed(Message):
    """An Error with a uid, as the table names it: it ends one request, not the link. Never sent itself."""

    __slots__ = ()


Transition = tuple[LinkState, Side, type[Message], LinkState]
Moves = dict[type[Message], LinkState]
Table = dict[LinkState, dict[Side, Moves]]

_UPPER, _LOWER = Side.UPPER, Side.LOWER

_GREETING: tuple[Transition, ...] = (
    (LinkState.NEW, _LOWER, Hello, LinkState.GREETED),
    (LinkState.GREETED, _UPPER, Error, LinkState.CLOSED),  # refused
)

_PIPE_START: tuple[Transition, ...] = (
    (LinkState.GREETED, _UPPER, Welcome, LinkState.OPEN),
    (LinkState.OPEN, _UPPER, Bootstrap, LinkState.LINKING),
    (LinkState.LINKING, _LOWER, Done, LinkState.LINKED),
)

_DECODE_START: tuple[Transition, ...] = ((LinkState.GREETED, _UPPER, Welcome, LinkState.LINKED),)

_LIFE: tuple[Transition, ...] = (
    (LinkState.LINKED, _UPPER, Init, LinkState.FORMING),
    (LinkState.FORMING, _LOWER, InitDone, LinkState.FORMED),
    (LinkState.FORMED, _UPPER, SanityCheck, LinkState.PROVING),
    (LinkState.PROVING, _LOWER, SanityDone, LinkState.PROVEN),
    (LinkState.PROVEN, _UPPER, LoadShard, LinkState.LOADING),
    (LinkState.LOADING, _LOWER, Loaded, LinkState.LOADED),
    (LinkState.LOADING, _LOWER, Error, LinkState.PROVEN),  # a load that failed leaves the group usable
    (LinkState.LOADED, _UPPER, Unload, LinkState.UNLOADING),
    (LinkState.PROVEN, _UPPER, Unload, LinkState.UNLOADING),  # if some ranks fail to load, all unload
    (LinkState.UNLOADING, _LOWER, Done, LinkState.PROVEN),
    (LinkState.LOADED, _UPPER, TimeCollectives, LinkState.MEASURING),
    (LinkState.MEASURING, _LOWER, CollectivesTimed, LinkState.LOADED),
)

_ENDING: tuple[Transition, ...] = (
    (LinkState.CLOSING, _LOWER, Done, LinkState.ENDED),
    (LinkState.ENDED, _LOWER, SessionEnd, LinkState.CLOSED),
)

_ENDING_BUSY: tuple[Transition, ...] = (
    (LinkState.CLOSING_AFTER_DONE, _LOWER, Done, LinkState.CLOSING),
    (LinkState.CLOSING_AFTER_INIT, _LOWER, InitDone, LinkState.CLOSING),
    (LinkState.CLOSING_AFTER_SANITY, _LOWER, SanityDone, LinkState.CLOSING),
    (LinkState.CLOSING_AFTER_LOAD, _LOWER, Loaded, LinkState.CLOSING),
    (LinkState.CLOSING_AFTER_LOAD, _LOWER, Error, LinkState.CLOSING),
    (LinkState.CLOSING_AFTER_TIMES, _LOWER, CollectivesTimed, LinkState.CLOSING),
)

#: Next state after Shutdown when no reply is owed.
_SHUTDOWN_WHEN_IDLE = dict.fromkeys(
    (LinkState.OPEN, LinkState.LINKED, LinkState.FORMED, LinkState.PROVEN, LinkState.LOADED),
    LinkState.CLOSING,
)

#: Next state after Shutdown when a reply is owed. That reply may already be on its way, so it comes before
#: Shutdown's.
_SHUTDOWN_WHEN_BUSY = {
    LinkState.LINKING: LinkState.CLOSING_AFTER_DONE,
    LinkState.FORMING: LinkState.CLOSING_AFTER_INIT,
    LinkState.PROVING: LinkState.CLOSING_AFTER_SANITY,
    LinkState.LOADING: LinkState.CLOSING_AFTER_LOAD,
    LinkState.UNLOADING: LinkState.CLOSING_AFTER_DONE,
    LinkState.MEASURING: LinkState.CLOSING_AFTER_TIMES,
    LinkState.RESIZING: LinkState.CLOSING_AFTER_LOAD,
}

_DECODING: tuple[Transition, ...] = tuple(
    (LinkState.LOADED, side, message, LinkState.LOADED)
    for side, message in (
        (_UPPER, Forward),
        (_UPPER, ChosenTokens),
        (_UPPER, SessionStop),
        (_UPPER, Evict),
        (_UPPER, Arrange),
        (_UPPER, Spill),
        (_UPPER, FetchBlocks),
        (_UPPER, Restore),
        (_LOWER, Ack),
    )
)

#: A rank has read from disk. That may cross any command.
_FETCHED: tuple[Transition, ...] = tuple(
    (state, _LOWER, FetchedBlocks, state)
    for state in (
        LinkState.LOADED,
        LinkState.CHECKING,
        LinkState.MEASURING,
        LinkState.UNLOADING,
        LinkState.CLOSING,
    )
)

#: Rank 0 may request the proof by value again between forwards of an idle group.
_CANARY: tuple[Transition, ...] = (
    (LinkState.LOADED, _UPPER, SanityCheck, LinkState.CHECKING),
    (LinkState.CHECKING, _LOWER, SanityDone, LinkState.LOADED),
)

#: Requests come while the room for KV caches changes, too. Cancel may come anywhere.
_REQUESTS: tuple[Transition, ...] = (
    (LinkState.LOADED, _UPPER, Generate, LinkState.LOADED),
    (LinkState.LOADED, _UPPER, KvBudget, LinkState.RESIZING),
    (LinkState.RESIZING, _UPPER, Generate, LinkState.RESIZING),
    (LinkState.RESIZING, _LOWER, Loaded, LinkState.LOADED),
)

#: A rank above 0 forms the group at rank 0's command. Its pipe does not carry that command.
_ROUNDS: tuple[Transition, ...] = (
    (LinkState.LINKED, _LOWER, SideChannel, LinkState.LINKED),
    (LinkState.LINKED, _UPPER, Gathered, LinkState.LINKED),
    (LinkState.CLOSING, _LOWER, SideChannel, LinkState.CLOSING),  # it crossed Shutdown
)

_ROUNDS_OF_LEADER: tuple[Transition, ...] = (
    (LinkState.FORMING, _LOWER, SideChannel, LinkState.FORMING),
    (LinkState.FORMING, _UPPER, Gathered, LinkState.FORMING),
    (LinkState.FORMED, _UPPER, Gathered, LinkState.FORMED),  # an error that crossed InitDone
    (LinkState.CLOSING_AFTER_INIT, _LOWER, SideChannel, LinkState.CLOSING_AFTER_INIT),
)

#: Rank 0 sends tokens until it replies to the command that crossed them. No other link has these moves.
_VOICE: tuple[Transition, ...] = tuple(
    (state, _LOWER, message, state)
    for state in (
        LinkState.LOADED,
        LinkState.RESIZING,
        LinkState.UNLOADING,
        LinkState.MEASURING,
        LinkState.CLOSING,
        LinkState.CLOSING_AFTER_DONE,
        LinkState.CLOSING_AFTER_LOAD,
        LinkState.CLOSING_AFTER_TIMES,
    )
    for message in (Accepted, Prefilled, Delta, ScoredDelta, Finished, RequestFailed)
)


def _states(rows: Iterable[Transition]) -> frozenset[LinkState]:
    return frozenset(state for start, _, _, end in rows for state in (start, end)) - TERMINAL


def _shutdowns(rows: Iterable[Transition], targets: dict[LinkState, LinkState]) -> Iterator[Transition]:
    present = _states(rows)
    return ((state, _UPPER, Shutdown, end) for state, end in targets.items() if state in present)


def _anywhere(rows: Iterable[Transition], side: Side, *messages: type[Message]) -> Iterator[Transition]:
    """Yield moves that make these messages of `side` legal in every state from open on, and change none."""
    return (
        (state, side, message, state)
        for state in _states(rows) - {LinkState.NEW, LinkState.GREETED, LinkState.PARTING}
        for message in messages
    )


def _failures(rows: tuple[Transition, ...], side: Side) -> Iterator[Transition]:
    """Yield the moves of an unsolicited Error of `side`, which is ending.

    States where Error is a reply are left out.
    """
    replies = {start for start, sender, message, _ in rows if sender is side and message is Error}
    return ((state, side, Error, LinkState.FAILED) for state in _states(rows) - replies - {LinkState.NEW})


def _pipe(rows: tuple[Transition, ...], *upper_anywhere: type[Message]) -> Table:
    rows += tuple(_shutdowns(rows, _SHUTDOWN_WHEN_IDLE))
    rows += tuple(_shutdowns(rows, _SHUTDOWN_WHEN_BUSY))
    reached = _states(rows)
    rows += _ENDING + tuple(row for row in _ENDING_BUSY if row[0] in reached)
    anywhere = (*_anywhere(rows, _UPPER, Ping, *upper_anywhere), *_anywhere(rows, _LOWER, Pong))
    return _table((*rows, *anywhere, *_failures(rows, _LOWER)))


def _decode(rows: tuple[Transition, ...]) -> Table:
    rows += tuple(_shutdowns(rows, _SHUTDOWN_WHEN_IDLE))
    rows += _ENDING
    return _table((*rows, *_failures(rows, _LOWER), *_failures(rows, _UPPER)))


def _table(rows: tuple[Transition, ...]) -> Table:
    table: Table = {state: {_UPPER: {}, _LOWER: {}} for state in (*_states(rows), *TERMINAL)}
    for start, side, message, end in rows:
        assert message not in table[start][side], (start, side, message)
        table[start][side][message] = end
    return table


_REQUESTS_LINK: tuple[Transition, ...] = (
    (LinkState.NEW, _LOWER, Hello, LinkState.GREETED),
    (LinkState.GREETED, _UPPER, Welcome, LinkState.OPEN),
    *((LinkState.OPEN, _UPPER, message, LinkState.OPEN) for message in (Generate, Cancel)),
    *(
        (LinkState.OPEN, _LOWER, message, LinkState.OPEN)
        for message in (Accepted, Prefilled, Delta, ScoredDelta, Finished, RequestFailed)
    ),
    *((LinkState.OPEN, side, Error, LinkState.FAILED) for side in Side),
    *((LinkState.OPEN, side, SessionEnd, LinkState.CLOSED) for side in Side),
)


def _control() -> Table:
    """Return the moves on links between agents, both ends of which may send the same once they are open."""
    from .cluster_messages import BOTH_WAYS, AgentHello, RosterParting

    rows: tuple[Transition, ...] = (
        (LinkState.NEW, _LOWER, AgentHello, LinkState.GREETED),
        (LinkState.GREETED, _UPPER, AgentHello, LinkState.OPEN),
        (LinkState.GREETED, _UPPER, Error, LinkState.CLOSED),  # refused
        (LinkState.GREETED, _UPPER, RosterParting, LinkState.PARTING),  # about to be refused
        *((LinkState.PARTING, side, RosterParting, LinkState.PARTING) for side in Side),
        (LinkState.PARTING, _UPPER, Error, LinkState.CLOSED),
    )
    ends = ((SessionEnd, LinkState.CLOSED), (Error, LinkState.FAILED))
    end = tuple((LinkState.OPEN, side, message, state) for side in Side for message, state in ends)
    both = tuple(row for side in Side for row in _anywhere(rows, side, *BOTH_WAYS))
    return _table((*rows, *both, *end))


def _join() -> Table:
    from .peer_messages import JoinGrant, JoinOffer, JoinRefusal, JoinRequest

    rows: tuple[Transition, ...] = (
        (LinkState.NEW, _UPPER, JoinOffer, LinkState.OFFERED),
        (LinkState.OFFERED, _LOWER, JoinRequest, LinkState.ASKED),
        (LinkState.ASKED, _UPPER, JoinGrant, LinkState.CLOSED),
        (LinkState.ASKED, _UPPER, JoinRefusal, LinkState.CLOSED),
        (LinkState.ASKED, _UPPER, Error, LinkState.CLOSED),
        (LinkState.OFFERED, _UPPER, Error, LinkState.FAILED),  # the offer is no longer valid
    )
    return _table(rows)


@cache
def table(kind: LinkKind) -> Table:
    """Return the legal moves on links of a kind. Only links between agents import the messages of agents."""
    match kind:
        case LinkKind.PIPE:
            return _pipe(_GREETING + _PIPE_START + _ROUNDS)
        case LinkKind.PIPE_LEADER:
            leads = _LIFE + _ROUNDS_OF_LEADER + _REQUESTS + _VOICE
            return _pipe(_GREETING + _PIPE_START + leads, Cancel)
        case LinkKind.DECODE:
            return _decode(_GREETING + _DECODE_START + _LIFE + _DECODING + _FETCHED + _CANARY)
        case LinkKind.CONTROL:
            return _control()
        case LinkKind.REQUESTS:
            return _table(_REQUESTS_LINK)
        case LinkKind.JOIN:
            return _join()
