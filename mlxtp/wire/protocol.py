"""Tables of the legal order of messages: for each kind of link, (state, sender, message) -> next state.

A move that is not in the table is illegal. States have the same names on every link:

    new -Hello-> greeted -Welcome-> open -Bootstrap-> linking -Done-> linked
    linked -Init-> forming -InitDone-> formed -SanityCheck-> proving -SanityDone-> proven
    proven -LoadShard-> loading -Loaded-> loaded -KvBudget-> resizing -Loaded-> loaded
    new -JoinOffer-> offered -JoinRequest-> asked -JoinGrant or JoinRefusal-> closed

A state in -ing waits for the reply to one command. Both ends run this table, each at its own time. If a
message may cross another, the table has both orders, which lead to the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache

from . import messages as msg


class Side(Enum):
    """The two sides of a link: UPPER sends commands, LOWER sends Hello and replies. A joiner is LOWER."""

    UPPER = "upper"
    LOWER = "lower"

    @property
    def peer(self) -> Side:
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
        return self.value[1] if side is Side.UPPER else self.value[2]


class LinkState(Enum):
    """State of a link. In CLOSING, Shutdown's Done is due; in CLOSING_AFTER_*, another reply is due first."""

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


TERMINAL = frozenset((LinkState.CLOSED, LinkState.FAILED))  #: no message is legal

#: The peer has proven nothing yet, so frames are limited to 4 KiB.
OPENING = frozenset((LinkState.NEW, LinkState.GREETED, LinkState.PARTING, LinkState.OFFERED, LinkState.ASKED))


class RequestFailed(msg.Message):
    """Name in the table for an Error with a uid, which ends one request, not the link. Never sent."""

    __slots__ = ()


Transition = tuple[LinkState, Side, type[msg.Message], LinkState]
Moves = dict[type[msg.Message], LinkState]
Table = dict[LinkState, dict[Side, Moves]]

_UPPER, _LOWER = Side.UPPER, Side.LOWER
_EVENTS = (msg.Accepted, msg.Prefilled, msg.Delta, msg.ScoredDelta, msg.Vectors, msg.Finished, RequestFailed)


def _in(states: Iterable[LinkState], side: Side, *messages: type[msg.Message]) -> tuple[Transition, ...]:
    """Return moves that make these messages of `side` legal in `states` and keep the state."""
    return tuple((state, side, message, state) for state in states for message in messages)


_GREETING: tuple[Transition, ...] = (
    (LinkState.NEW, _LOWER, msg.Hello, LinkState.GREETED),
    (LinkState.GREETED, _UPPER, msg.Error, LinkState.CLOSED),  # refused
)

_PIPE_START: tuple[Transition, ...] = (
    (LinkState.GREETED, _UPPER, msg.Welcome, LinkState.OPEN),
    (LinkState.OPEN, _UPPER, msg.Bootstrap, LinkState.LINKING),
    (LinkState.LINKING, _LOWER, msg.Done, LinkState.LINKED),
)

_LIFE: tuple[Transition, ...] = (
    (LinkState.LINKED, _UPPER, msg.Init, LinkState.FORMING),
    (LinkState.FORMING, _LOWER, msg.InitDone, LinkState.FORMED),
    (LinkState.FORMED, _UPPER, msg.SanityCheck, LinkState.PROVING),
    (LinkState.PROVING, _LOWER, msg.SanityDone, LinkState.PROVEN),
    (LinkState.PROVEN, _UPPER, msg.LoadShard, LinkState.LOADING),
    (LinkState.LOADING, _LOWER, msg.Loaded, LinkState.LOADED),
    (LinkState.LOADING, _LOWER, msg.Error, LinkState.PROVEN),  # a load that failed leaves the group usable
    (LinkState.LOADED, _UPPER, msg.Unload, LinkState.UNLOADING),
    (LinkState.PROVEN, _UPPER, msg.Unload, LinkState.UNLOADING),  # if some ranks fail to load, all unload
    (LinkState.UNLOADING, _LOWER, msg.Done, LinkState.PROVEN),
    (LinkState.LOADED, _UPPER, msg.TimeCollectives, LinkState.MEASURING),
    (LinkState.MEASURING, _LOWER, msg.CollectivesTimed, LinkState.LOADED),
)

_ENDING: tuple[Transition, ...] = (
    (LinkState.CLOSING, _LOWER, msg.Done, LinkState.ENDED),
    (LinkState.ENDED, _LOWER, msg.SessionEnd, LinkState.CLOSED),
)

#: Next state after Shutdown when no reply is owed.
_SHUTDOWN_WHEN_IDLE = dict.fromkeys(
    (LinkState.OPEN, LinkState.LINKED, LinkState.FORMED, LinkState.PROVEN, LinkState.LOADED),
    LinkState.CLOSING,
)

#: Next state after Shutdown when a reply is owed and maybe on its way: it precedes the reply to Shutdown.
_SHUTDOWN_WHEN_BUSY = {
    LinkState.LINKING: LinkState.CLOSING_AFTER_DONE,
    LinkState.FORMING: LinkState.CLOSING_AFTER_INIT,
    LinkState.PROVING: LinkState.CLOSING_AFTER_SANITY,
    LinkState.LOADING: LinkState.CLOSING_AFTER_LOAD,
    LinkState.UNLOADING: LinkState.CLOSING_AFTER_DONE,
    LinkState.MEASURING: LinkState.CLOSING_AFTER_TIMES,
    LinkState.RESIZING: LinkState.CLOSING_AFTER_LOAD,
}

_STEPS = (msg.Forward, msg.ChosenTokens, msg.SessionStop, msg.Evict, msg.Arrange)
_BLOCKS = (msg.Spill, msg.FetchBlocks, msg.Restore)
_DECODING = _in([LinkState.LOADED], _UPPER, *_STEPS, *_BLOCKS) + _in([LinkState.LOADED], _LOWER, msg.Ack)

#: A rank has read from disk. This reply may cross any command.
_FETCHED = _in(
    (LinkState.LOADED, LinkState.CHECKING, LinkState.MEASURING, LinkState.UNLOADING, LinkState.CLOSING),
    _LOWER,
    msg.FetchedBlocks,
)

#: Rank 0 may request the proof by value again while the group is idle.
_CANARY: tuple[Transition, ...] = (
    (LinkState.LOADED, _UPPER, msg.SanityCheck, LinkState.CHECKING),
    (LinkState.CHECKING, _LOWER, msg.SanityDone, LinkState.LOADED),
)

#: Requests may arrive while the room for KV caches changes, too. Cancel may arrive in any state.
_REQUESTS: tuple[Transition, ...] = (
    (LinkState.LOADED, _UPPER, msg.Generate, LinkState.LOADED),
    (LinkState.LOADED, _UPPER, msg.KvBudget, LinkState.RESIZING),
    (LinkState.RESIZING, _UPPER, msg.Generate, LinkState.RESIZING),
    (LinkState.RESIZING, _LOWER, msg.Loaded, LinkState.LOADED),
)

#: A rank above 0 forms the group at rank 0's command, which its pipe does not carry.
_ROUNDS = (
    *_in((LinkState.LINKED, LinkState.CLOSING), _LOWER, msg.SideChannel),  # may cross Shutdown
    *_in([LinkState.LINKED], _UPPER, msg.Gathered),
)
_ROUNDS_OF_LEADER = (
    *_in((LinkState.FORMING, LinkState.CLOSING_AFTER_INIT), _LOWER, msg.SideChannel),
    *_in((LinkState.FORMING, LinkState.FORMED), _UPPER, msg.Gathered),  # an error may cross InitDone
)

#: Rank 0 sends tokens until it replies to the command that crossed them. Only its pipe has these messages.
_CROSSED = (LinkState.RESIZING, LinkState.UNLOADING, LinkState.MEASURING)
_CLOSING = (LinkState.CLOSING, *(_SHUTDOWN_WHEN_BUSY[state] for state in _CROSSED))
_VOICE = _in((LinkState.LOADED, *_CROSSED, *_CLOSING), _LOWER, *_EVENTS)


def _states(rows: Iterable[Transition]) -> frozenset[LinkState]:
    return frozenset(state for start, _, _, end in rows for state in (start, end)) - TERMINAL


def _anywhere(rows: Iterable[Transition], side: Side, *messages: type[msg.Message]) -> tuple[Transition, ...]:
    return _in(_states(rows) - OPENING, side, *messages)


def _failures(rows: tuple[Transition, ...], side: Side) -> Iterator[Transition]:
    """Yield moves for an unsolicited Error of `side`, except in states where an Error is a reply."""
    replies = {start for start, sender, message, _ in rows if sender is side and message is msg.Error}
    return ((state, side, msg.Error, LinkState.FAILED) for state in _states(rows) - replies - {LinkState.NEW})


def _shutdowns(rows: tuple[Transition, ...], targets: dict[LinkState, LinkState]) -> tuple[Transition, ...]:
    present = _states(rows)
    return tuple((state, _UPPER, msg.Shutdown, end) for state, end in targets.items() if state in present)


def _pipe(rows: tuple[Transition, ...], *upper_anywhere: type[msg.Message]) -> Table:
    owed = {
        (_SHUTDOWN_WHEN_BUSY[start], side, reply, LinkState.CLOSING): None
        for start, side, reply, end in rows
        if start in _SHUTDOWN_WHEN_BUSY and side is _LOWER and end is not start
    }
    rows += (*_shutdowns(rows, _SHUTDOWN_WHEN_IDLE | _SHUTDOWN_WHEN_BUSY), *_ENDING, *owed)
    anywhere = (*_anywhere(rows, _UPPER, msg.Ping, *upper_anywhere), *_anywhere(rows, _LOWER, msg.Pong))
    return _table((*rows, *anywhere, *_failures(rows, _LOWER)))


def _decode(rows: tuple[Transition, ...]) -> Table:
    rows += _shutdowns(rows, _SHUTDOWN_WHEN_IDLE) + _ENDING
    return _table((*rows, *_failures(rows, _LOWER), *_failures(rows, _UPPER)))


def _table(rows: tuple[Transition, ...]) -> Table:
    table: Table = {state: {_UPPER: {}, _LOWER: {}} for state in (*_states(rows), *TERMINAL)}
    for start, side, message, end in rows:
        assert message not in table[start][side], (start, side, message)
        table[start][side][message] = end
    return table


_OPEN_ENDS = tuple(
    (LinkState.OPEN, side, message, state)
    for side in Side
    for message, state in ((msg.SessionEnd, LinkState.CLOSED), (msg.Error, LinkState.FAILED))
)


def _requests() -> Table:
    rows: tuple[Transition, ...] = (
        (LinkState.NEW, _LOWER, msg.Hello, LinkState.GREETED),
        (LinkState.GREETED, _UPPER, msg.Welcome, LinkState.OPEN),
        *_in([LinkState.OPEN], _UPPER, msg.Generate, msg.Cancel),
        *_in([LinkState.OPEN], _LOWER, *_EVENTS),
    )
    return _table(rows + _OPEN_ENDS)


def _control() -> Table:
    from .cluster_messages import BOTH_WAYS, AgentHello, RosterParting

    rows: tuple[Transition, ...] = (
        (LinkState.NEW, _LOWER, AgentHello, LinkState.GREETED),
        (LinkState.GREETED, _UPPER, AgentHello, LinkState.OPEN),
        (LinkState.GREETED, _UPPER, msg.Error, LinkState.CLOSED),  # refused
        (LinkState.GREETED, _UPPER, RosterParting, LinkState.PARTING),  # about to be refused
        (LinkState.PARTING, _UPPER, msg.Error, LinkState.CLOSED),
    )
    for side in Side:
        rows += _in([LinkState.PARTING], side, RosterParting) + _in([LinkState.OPEN], side, *BOTH_WAYS)
    return _table(rows + _OPEN_ENDS)


def _join() -> Table:
    from .peer_messages import JoinGrant, JoinOffer, JoinRefusal, JoinRequest

    rows: tuple[Transition, ...] = (
        (LinkState.NEW, _UPPER, JoinOffer, LinkState.OFFERED),
        (LinkState.OFFERED, _LOWER, JoinRequest, LinkState.ASKED),
        *((LinkState.ASKED, _UPPER, end, LinkState.CLOSED) for end in (JoinGrant, JoinRefusal, msg.Error)),
        (LinkState.OFFERED, _UPPER, msg.Error, LinkState.FAILED),  # the offer is no longer valid
    )
    return _table(rows)


@cache
def table(kind: LinkKind) -> Table:
    """Return the legal moves on links of a kind. Only links between agents import the agents' messages."""
    match kind:
        case LinkKind.PIPE:
            return _pipe(_GREETING + _PIPE_START + _ROUNDS)
        case LinkKind.PIPE_LEADER:
            return _pipe(_GREETING + _PIPE_START + _LIFE + _ROUNDS_OF_LEADER + _REQUESTS + _VOICE, msg.Cancel)
        case LinkKind.DECODE:
            start: Transition = (LinkState.GREETED, _UPPER, msg.Welcome, LinkState.LINKED)
            return _decode((*_GREETING, start, *_LIFE, *_DECODING, *_FETCHED, *_CANARY))
        case LinkKind.CONTROL:
            return _control()
        case LinkKind.REQUESTS:
            return _requests()
        case LinkKind.JOIN:
            return _join()
