"""The legal order of messages, as data: for each kind of link, (state, sender, message) -> next state.

A move that is not in the table is illegal. States that mean the same have the same name on every link:

    new -Hello-> greeted -Welcome-> open -Bootstrap-> linking -Done-> linked
    linked -Init-> forming -InitDone-> formed -SanityCheck-> proving -SanityDone-> proven
    proven -LoadShard-> loading -Loaded-> loaded
    new -JoinOffer-> offered -JoinRequest-> asked -JoinGrant or JoinRefusal-> closed

A state in -ing waits for the reply to one command. Both ends run this table, each at its own time, so a
message may arrive in a state that its sender had not yet heard of. Where that can happen the table holds
both orders, and both end in the same state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from .cluster_messages import BOTH_WAYS, AgentHello
from .join_messages import JoinGrant, JoinOffer, JoinRefusal, JoinRequest
from .messages import (
    Accepted,
    Ack,
    Bootstrap,
    Cancel,
    CollectivesTimed,
    Delta,
    Done,
    Error,
    Evict,
    Finished,
    Gathered,
    Generate,
    Hello,
    Init,
    InitDone,
    Loaded,
    LoadShard,
    Message,
    Ping,
    Pong,
    Prefilled,
    PromptBatch,
    PromptTokens,
    SanityCheck,
    SanityDone,
    ScoredDelta,
    SessionEnd,
    SessionStop,
    Shutdown,
    SideChannel,
    StepToken,
    TimeCollectives,
    Unload,
    Welcome,
)


class Side(Enum):
    """UPPER gives commands, LOWER says Hello and answers. Who joins is LOWER."""

    UPPER = "upper"
    LOWER = "lower"

    @property
    def peer(self) -> Side:
        """The side at the other end."""
        return Side.LOWER if self is Side.UPPER else Side.UPPER


class LinkKind(Enum):
    """Who is joined: (name of the kind, its upper side, its lower side)."""

    PIPE_LEADER = ("pipe to rank 0", "the agent", "rank 0")
    PIPE = ("pipe", "the agent", "the rank")
    DECODE = ("decode link", "rank 0", "the rank")
    CONTROL = ("control link", "the agent that was called", "the agent that called")
    REQUESTS = ("requests link", "the agent with clients", "the agent with rank 0")
    JOIN = ("join link", "the cluster", "the joiner")

    def __str__(self) -> str:
        return self.value[0]

    def who(self, side: Side) -> str:
        """What `side` of such a link is called."""
        return self.value[1] if side is Side.UPPER else self.value[2]


class State(Enum):
    """Where a link stands. A plain CLOSING owes the Done of Shutdown, CLOSING_AFTER_* another reply first."""

    NEW = "new"
    GREETED = "greeted"
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


TERMINAL = frozenset((State.CLOSED, State.FAILED))
"""Nothing is legal here."""

OPENING = frozenset((State.NEW, State.GREETED, State.OFFERED, State.ASKED))
"""Whoever sends here has proven nothing yet, and gets little room."""


class RequestFailed(Message):
    """How the table calls an Error with a uid: it ends one request, not the link. Never sent itself."""

    __slots__ = ()


Row = tuple[State, Side, type[Message], State]
Moves = dict[type[Message], State]
Table = dict[State, dict[Side, Moves]]

_UPPER, _LOWER = Side.UPPER, Side.LOWER

_GREETING: tuple[Row, ...] = (
    (State.NEW, _LOWER, Hello, State.GREETED),
    (State.GREETED, _UPPER, Error, State.CLOSED),  # refused
)

_PIPE_START: tuple[Row, ...] = (
    (State.GREETED, _UPPER, Welcome, State.OPEN),
    (State.OPEN, _UPPER, Bootstrap, State.LINKING),
    (State.LINKING, _LOWER, Done, State.LINKED),
)

_DECODE_START: tuple[Row, ...] = ((State.GREETED, _UPPER, Welcome, State.LINKED),)

_LIFE: tuple[Row, ...] = (
    (State.LINKED, _UPPER, Init, State.FORMING),
    (State.FORMING, _LOWER, InitDone, State.FORMED),
    (State.FORMED, _UPPER, SanityCheck, State.PROVING),
    (State.PROVING, _LOWER, SanityDone, State.PROVEN),
    (State.PROVEN, _UPPER, LoadShard, State.LOADING),
    (State.LOADING, _LOWER, Loaded, State.LOADED),
    (State.LOADING, _LOWER, Error, State.PROVEN),  # a load that failed leaves the group usable
    (State.LOADED, _UPPER, Unload, State.UNLOADING),
    (State.PROVEN, _UPPER, Unload, State.UNLOADING),  # where a load failed on some ranks, all let go
    (State.UNLOADING, _LOWER, Done, State.PROVEN),
    (State.LOADED, _UPPER, TimeCollectives, State.MEASURING),
    (State.MEASURING, _LOWER, CollectivesTimed, State.LOADED),
)

_ENDING: tuple[Row, ...] = (
    (State.CLOSING, _LOWER, Done, State.ENDED),
    (State.ENDED, _LOWER, SessionEnd, State.CLOSED),
)

_ENDING_BUSY: tuple[Row, ...] = (
    (State.CLOSING_AFTER_DONE, _LOWER, Done, State.CLOSING),
    (State.CLOSING_AFTER_INIT, _LOWER, InitDone, State.CLOSING),
    (State.CLOSING_AFTER_SANITY, _LOWER, SanityDone, State.CLOSING),
    (State.CLOSING_AFTER_LOAD, _LOWER, Loaded, State.CLOSING),
    (State.CLOSING_AFTER_LOAD, _LOWER, Error, State.CLOSING),
    (State.CLOSING_AFTER_TIMES, _LOWER, CollectivesTimed, State.CLOSING),
)

_SHUTDOWN_WHEN_IDLE = dict.fromkeys(
    (State.OPEN, State.LINKED, State.FORMED, State.PROVEN, State.LOADED), State.CLOSING
)
"""Where Shutdown leads when no reply is owed."""

_SHUTDOWN_WHEN_BUSY = {
    State.LINKING: State.CLOSING_AFTER_DONE,
    State.FORMING: State.CLOSING_AFTER_INIT,
    State.PROVING: State.CLOSING_AFTER_SANITY,
    State.LOADING: State.CLOSING_AFTER_LOAD,
    State.UNLOADING: State.CLOSING_AFTER_DONE,
    State.MEASURING: State.CLOSING_AFTER_TIMES,
}
"""Where it leads when one is: that reply may be on its way already, so it comes first, then Shutdown's."""

_DECODING: tuple[Row, ...] = tuple(
    (State.LOADED, side, message, State.LOADED)
    for side, message in (
        (_UPPER, PromptTokens),
        (_UPPER, PromptBatch),
        (_UPPER, StepToken),
        (_UPPER, SessionStop),
        (_UPPER, Evict),
        (_LOWER, Ack),
    )
)

_CANARY: tuple[Row, ...] = (
    (State.LOADED, _UPPER, SanityCheck, State.CHECKING),
    (State.CHECKING, _LOWER, SanityDone, State.LOADED),
)
"""Between forwards of an idle group, the proof by value may be asked for again."""

_REQUESTS: tuple[Row, ...] = ((State.LOADED, _UPPER, Generate, State.LOADED),)  # Cancel may come anywhere

_ROUNDS: tuple[Row, ...] = (
    (State.LINKED, _LOWER, SideChannel, State.LINKED),
    (State.LINKED, _UPPER, Gathered, State.LINKED),
    (State.CLOSING, _LOWER, SideChannel, State.CLOSING),  # it crossed Shutdown
)
"""A rank above 0 forms the group when rank 0 says so, of which its pipe knows nothing."""

_ROUNDS_OF_LEADER: tuple[Row, ...] = (
    (State.FORMING, _LOWER, SideChannel, State.FORMING),
    (State.FORMING, _UPPER, Gathered, State.FORMING),
    (State.FORMED, _UPPER, Gathered, State.FORMED),  # an error that crossed InitDone
    (State.CLOSING_AFTER_INIT, _LOWER, SideChannel, State.CLOSING_AFTER_INIT),
)

_VOICE: tuple[Row, ...] = tuple(
    (state, _LOWER, message, state)
    for state in (
        State.LOADED,
        State.UNLOADING,
        State.MEASURING,
        State.CLOSING,
        State.CLOSING_AFTER_DONE,
        State.CLOSING_AFTER_TIMES,
    )
    for message in (Accepted, Prefilled, Delta, ScoredDelta, Finished, RequestFailed)
)
"""Tokens leave rank 0 until the command that crossed them is answered. No other link has these moves."""


_JOINING: tuple[Row, ...] = (
    (State.NEW, _UPPER, JoinOffer, State.OFFERED),
    (State.OFFERED, _LOWER, JoinRequest, State.ASKED),
    (State.ASKED, _UPPER, JoinGrant, State.CLOSED),
    (State.ASKED, _UPPER, JoinRefusal, State.CLOSED),
    (State.ASKED, _UPPER, Error, State.CLOSED),
    (State.OFFERED, _UPPER, Error, State.FAILED),  # the offer stands no longer
)


def _states(rows: Iterable[Row]) -> frozenset[State]:
    return frozenset(state for start, _, _, end in rows for state in (start, end)) - TERMINAL


def _shutdowns(rows: Iterable[Row], targets: dict[State, State]) -> Iterator[Row]:
    present = _states(rows)
    return ((state, _UPPER, Shutdown, end) for state, end in targets.items() if state in present)


def _anywhere(rows: Iterable[Row], side: Side, *messages: type[Message]) -> Iterator[Row]:
    """These messages of `side` are legal in every state from open on, and change none."""
    return (
        (state, side, message, state)
        for state in _states(rows) - {State.NEW, State.GREETED}
        for message in messages
    )


def _failures(rows: tuple[Row, ...], side: Side) -> Iterator[Row]:
    """An Error nobody asked for, wherever it is not already a reply: `side` is ending."""
    replies = {start for start, sender, message, _ in rows if sender is side and message is Error}
    return ((state, side, Error, State.FAILED) for state in _states(rows) - replies - {State.NEW})


def _pipe(rows: tuple[Row, ...], *upper_anywhere: type[Message]) -> Table:
    rows += tuple(_shutdowns(rows, _SHUTDOWN_WHEN_IDLE))
    rows += tuple(_shutdowns(rows, _SHUTDOWN_WHEN_BUSY))
    reached = _states(rows)
    rows += _ENDING + tuple(row for row in _ENDING_BUSY if row[0] in reached)
    anywhere = (*_anywhere(rows, _UPPER, Ping, *upper_anywhere), *_anywhere(rows, _LOWER, Pong))
    return _table((*rows, *anywhere, *_failures(rows, _LOWER)))


def _decode(rows: tuple[Row, ...]) -> Table:
    rows += tuple(_shutdowns(rows, _SHUTDOWN_WHEN_IDLE))
    rows += _ENDING
    return _table((*rows, *_failures(rows, _LOWER), *_failures(rows, _UPPER)))


def _table(rows: tuple[Row, ...]) -> Table:
    table: Table = {state: {_UPPER: {}, _LOWER: {}} for state in (*_states(rows), *TERMINAL)}
    for start, side, message, end in rows:
        assert message not in table[start][side], (start, side, message)
        table[start][side][message] = end
    return table


_CONTROL: tuple[Row, ...] = (
    (State.NEW, _LOWER, AgentHello, State.GREETED),
    (State.GREETED, _UPPER, AgentHello, State.OPEN),
    (State.GREETED, _UPPER, Error, State.CLOSED),  # refused
)
"""Once open, both ends may say the same."""

_CONTROL_END: tuple[Row, ...] = tuple(
    (State.OPEN, side, message, end)
    for side in Side
    for message, end in ((SessionEnd, State.CLOSED), (Error, State.FAILED))
)

_REQUESTS_LINK: tuple[Row, ...] = (
    (State.NEW, _LOWER, Hello, State.GREETED),
    (State.GREETED, _UPPER, Welcome, State.OPEN),
    *((State.OPEN, _UPPER, message, State.OPEN) for message in (Generate, Cancel)),
    *(
        (State.OPEN, _LOWER, message, State.OPEN)
        for message in (Accepted, Prefilled, Delta, ScoredDelta, Finished, RequestFailed)
    ),
    *((State.OPEN, side, Error, State.FAILED) for side in Side),
    *((State.OPEN, side, SessionEnd, State.CLOSED) for side in Side),
)


def _control(rows: tuple[Row, ...]) -> Table:
    both = tuple(row for side in Side for row in _anywhere(rows, side, *BOTH_WAYS))
    return _table((*rows, *both, *_CONTROL_END))


TABLES: dict[LinkKind, Table] = {
    LinkKind.PIPE: _pipe(_GREETING + _PIPE_START + _ROUNDS),
    LinkKind.PIPE_LEADER: _pipe(
        _GREETING + _PIPE_START + _LIFE + _ROUNDS_OF_LEADER + _REQUESTS + _VOICE, Cancel
    ),
    LinkKind.DECODE: _decode(_GREETING + _DECODE_START + _LIFE + _DECODING + _CANARY),
    LinkKind.CONTROL: _control(_CONTROL),
    LinkKind.REQUESTS: _table(_REQUESTS_LINK),
    LinkKind.JOIN: _table(_JOINING),
}
