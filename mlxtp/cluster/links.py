"""Control links to other agents, opened by either end, and the table of all nodes' reports."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from typing import Protocol as Interface

from ..background import Background, RepeatFilter, failure_of
from ..errors import Code, LinkError, MlxtpError, ProtocolError
from ..wire.certificates import NodeIdentity
from ..wire.cluster_messages import MAX_MEMBERS, MAX_PARTING, AgentHello, Report, ReportsSent, RosterParting
from ..wire.codecs import Message, NodeRow
from ..wire.messages import Error, SessionEnd
from ..wire.protocol import TERMINAL
from ..wire.session import LinkKind, Session, Side
from ..wire.streams import StreamLink
from .cluster_state import MAX_TEXT, READS

log = logging.getLogger(__name__)

GREETING_S = 3.0  #: Seconds for the other end to send its AgentHello.
SAID_S = 60.0  #: Seconds until the same refusal of the same caller is logged again.
MAX_UNSENT_BYTES = 16 * 1024 * 1024  #: Unread bytes after which an agent's link is cut.
SHARE = 0.1  #: CPU seconds of this agent per second for one member's messages, on average.
FREE_S = 1.0  #: CPU seconds beyond the share, as for whole tables, until this agent reads slower.
MOST_S = 2.0  #: CPU seconds beyond the share until this agent closes the member's links.
SLOWER, LONGEST_PAUSE_S = 4.0, 0.5  #: Seconds of pause for each CPU second then; the most for a message.
CALL_S = 0.005  #: Estimated CPU seconds of a handshake: it ends before the caller is known.

#: Returns the error to refuse a peer with this identity and hello, or None.
Judge = Callable[[NodeIdentity, AgentHello], MlxtpError | None]


class Rejected(ProtocolError):
    """The other end's refusal of this node, with its reason."""


class ControlLink:
    """This end of a control link, over TLS. `local` and `remote` are its ends' addresses ("ip"). `hello` is
    set when the peer's hello arrives; `number`, `identity` and key `fingerprint` once it is accepted.
    """

    hello: AgentHello
    number: int
    identity: NodeIdentity
    fingerprint: str

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, dialled: bool) -> None:
        self.dialled = dialled
        self.connection = StreamLink(
            reader, writer, Session(LinkKind.CONTROL, Side.LOWER if dialled else Side.UPPER, 0)
        )
        self.rest: list[Message] = []  #: Messages that arrived with the hello.
        self.local = _ip(writer.get_extra_info("sockname"))
        self.remote = _ip(writer.get_extra_info("peername"))
        self._writer = writer

    @property
    def node_id(self) -> str:
        return self.hello.node_id

    def send(self, message: Message) -> None:
        """Send a message. Raises LinkError if the link is gone."""
        if self.connection.unsent_bytes > MAX_UNSENT_BYTES:
            self._writer.transport.abort()
            raise LinkError(
                f"the other agent does not read: {MAX_UNSENT_BYTES >> 20} MiB wait", Code.LINK_TIMEOUT
            )
        self.connection.send(message)

    async def receive_hello(self) -> AgentHello:
        """Return the other end's hello, and keep messages after it in `rest`."""
        await self.peek()
        received = self.rest.pop(0)
        if isinstance(received, Error):
            raise Rejected(received.detail, Code(received.code))
        if not isinstance(received, AgentHello):
            raise ProtocolError(f"{type(received).__name__} where a hello was expected", Code.OUT_OF_ORDER)
        self.hello = received
        return received

    async def peek(self) -> Message:
        """Wait for a message, and return the first of `rest`. Raises IndexError at the end of the link."""
        if not self.rest:
            async with asyncio.timeout(GREETING_S):
                self.rest = [each.message for each in await self.connection.receive()]
        return self.rest[0]

    def send_roster(self, text: str) -> None:
        for end in range(MAX_PARTING, len(text) + MAX_PARTING, MAX_PARTING):
            self.send(RosterParting(text[end - MAX_PARTING : end], end < len(text)))

    async def receive_roster(self) -> str:
        """Return the text of the other end's `send_roster`; empty if it is too long."""
        parts, more = [""], True
        while more:
            await self.peek()
            received = self.rest.pop(0)
            if not isinstance(received, RosterParting) or len(parts) * MAX_PARTING > MAX_TEXT:
                return ""
            parts.append(received.part)
            more = received.more
        return "".join(parts)

    def refuse(self, error: MlxtpError) -> None:
        with contextlib.suppress(MlxtpError):
            self.send(Error(error.code, error.detail, 0))
        self.connection.close()

    def close(self, goodbye: bool = False) -> None:
        """End the link. `goodbye`: report an orderly end first. May be called again."""
        if goodbye:
            with contextlib.suppress(MlxtpError):
                self.send(SessionEnd())
        self.connection.close()


A = TypeVar("A", bound=Message)
F = TypeVar("F", bound=Callable[..., object])


class Handlers(list[F]):
    """Functions to call at an event, in the order of registration. A call registers functions."""

    def __call__(self, *handlers: F) -> None:
        self += handlers


class LinkGate(Interface):
    """Owner of the decision which links count. Its methods must not raise. `opened` returns False to reject
    an accepted peer after all; otherwise `closed` is called exactly once.
    """

    def opened(self, link: ControlLink) -> bool: ...

    def counts(self, number: int) -> bool: ...

    def closed(self, link: ControlLink, why: str, goodbye: bool) -> None: ...


class Refusals(dict[str, str]):
    """Reasons of the last refusals between this node and others, by node id, until a link is up."""

    def note(self, identity: NodeIdentity, refusal: MlxtpError) -> None:
        self.pop(identity.node_id, None)
        while len(self) >= MAX_MEMBERS:
            del self[next(iter(self))]
        self[identity.node_id] = refusal.detail


class CpuShares:
    """CPU time of members' messages over all their links, ended links included, by node id."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: dict[str, tuple[float, float]] = {}  #: Seconds beyond the share, and when.

    def over_s(self, node_id: str) -> float:
        over_s, at = self._accounts.get(node_id, (0.0, 0.0))
        return max(over_s - SHARE * (self._clock() - at), 0.0)

    def spend(self, node_id: str, cpu_s: float) -> float:
        """Count CPU seconds. Return the seconds to pause. Raises ProtocolError to end the member's links."""
        over_s = min(self.over_s(node_id) + cpu_s, 2 * MOST_S)
        self._accounts[node_id] = over_s, self._clock()
        if over_s > MOST_S:
            words = f"its messages took {over_s:.1f} s of CPU time beyond a member's share of {SHARE:.0%}"
            raise ProtocolError(f"{words}; it may be faulty: restart or remove it", Code.OVERLOADED)
        return min(SLOWER * cpu_s, LONGEST_PAUSE_S) if over_s > FREE_S else 0.0

    def refusal(self, node_id: str) -> MlxtpError | None:
        """Return the error that denies a member beyond its share a new link, or None."""
        words = f"its messages took more than {SHARE:.0%} of this Mac's CPU time; in seconds it may come back"
        return ProtocolError(words, Code.OVERLOADED) if self.over_s(node_id) > FREE_S else None


_NUMBERS = itertools.count(1)  # of links


class PeerLinks:
    """All control links of this agent.

    Handlers run in the order of registration, but handlers of new links in reverse: the node's beat ends the
    greeting. A handler that raises ends the link of its message: a member's messages may cost its link, never
    the agent. `CpuShares` limits their number.
    """

    def __init__(self, node_id: str, hello: Callable[[], AgentHello], judge: Judge, gate: LinkGate) -> None:
        self._node_id = node_id
        self._hello = hello
        self._judge = judge
        self._gate = gate
        self._links: dict[int, ControlLink] = {}
        self._readers = Background()
        self._logged = RepeatFilter(SAID_S)  # a refused peer keeps calling
        self._handlers: defaultdict[type[Message], list[Callable[[ControlLink, Any], None]]] = defaultdict(
            list
        )
        #: Called with each new link, such as to send this node's state over it.
        self.on_up = Handlers[Callable[[ControlLink], None]]()
        #: Called when a node's last link ends, with its id and the reason.
        self.on_lost = Handlers[Callable[[str, str], object]]()
        #: Reply type and future of each open request, by node and nonce.
        self._open: dict[tuple[str, bytes], tuple[type[Message], asyncio.Future[Any]]] = {}
        self.reports = ReportTable(node_id, self)
        self.refused = Refusals()
        self.shares = CpuShares()
        #: For members of other versions: returns this roster as text, and takes theirs, without raising.
        self.parting: tuple[Callable[[NodeIdentity], str], Callable[[str], object]] = (lambda _: "", str)

    def on(self, handler: Callable[[ControlLink, Any], None], *kinds: type[Message]) -> None:
        for kind in kinds:
            self._handlers[kind].append(handler)

    async def ask(self, node_id: str, request: Any, reply: type[A], within_s: float) -> A:
        """Return a node's reply to a request; both carry the same `nonce`. Raises LinkError without a link,
        if it ends meanwhile, or after `within_s` seconds.
        """
        key, answer = (node_id, request.nonce), asyncio.get_running_loop().create_future()
        self._open[key] = (reply, answer)
        try:
            self.send(node_id, request)
            async with asyncio.timeout(within_s):
                found: A = await answer
        except TimeoutError:
            raise LinkError("it did not reply", Code.LINK_TIMEOUT) from None
        finally:
            del self._open[key]
        return found

    def up(self, link: ControlLink) -> bool:
        self._links[link.number] = link
        self.refused.pop(link.node_id, None)
        if not self._gate.opened(link):
            self._links.pop(link.number, None)
            return False
        self._greet(link)
        return True

    def _greet(self, link: ControlLink) -> None:
        for handler in reversed(self.on_up):
            error = failure_of(handler, link)
            if error is not None and not isinstance(error, MlxtpError):  # else the link just ended
                self._misapplied(link, "hello", error)
                link.close()

    def received(self, link: ControlLink, message: Message) -> None:
        if not self._gate.counts(link.number):
            return
        asked = self._open.get((link.node_id, getattr(message, "nonce", b"")))
        if asked is not None and isinstance(message, asked[0]) and not asked[1].done():
            asked[1].set_result(message)
        for handler in self._handlers.get(type(message), ()):
            if (error := failure_of(handler, link, message)) is not None:
                raise self._misapplied(link, type(message).__name__, error)

    def down(self, link: ControlLink, why: str, goodbye: bool) -> None:
        self._links.pop(link.number, None)
        self._gate.closed(link, why, goodbye)
        if (other := self.to(link.node_id)) is not None:
            self._greet(other)  # the ended link may have lost messages
        else:
            for (node_id, _), (_, answer) in self._open.items():
                if node_id == link.node_id and not answer.done():
                    answer.set_exception(LinkError("its link ended", Code.LINK_LOST))
            for handler in self.on_lost:
                if (error := failure_of(handler, link.node_id, why)) is not None:
                    self._misapplied(link, "end", error)  # then call the other handlers

    def _misapplied(self, link: ControlLink, what: str, error: Exception) -> MlxtpError:
        """Log an error in applying a member's message. Return the error that ends its link."""
        known = error if isinstance(error, MlxtpError) else None
        found = known or ProtocolError(f"its {what} cannot be applied: {error!r:.300}", Code.FIELD_INVALID)
        if not isinstance(error, LinkError):
            who = f"a message ({what}) of {link.hello.name or '?'} ({link.node_id[:8]})"
            if self._logged.passes(line := f"{who} is refused: {found.detail}"):
                log.warning("%s", line, exc_info=None if known else error)
        return found

    def to(self, node_id: str) -> ControlLink | None:
        """Return the link to a node. If there are two, both ends choose the smaller id's call."""
        mine = self._node_id
        links = [link for link in self._links.values() if link.node_id == node_id]
        return min(links, key=lambda link: (link.dialled != (mine < node_id), link.number), default=None)

    def links(self) -> tuple[ControlLink, ...]:
        return tuple(self._links.values())

    def nodes(self) -> frozenset[str]:
        return frozenset(link.node_id for link in self._links.values())

    def linked(self, identity: NodeIdentity) -> bool:
        """Return True if a node has a link with this very key: its other connections need one."""
        mine = (identity.node_id, identity.fingerprint)
        return any((link.node_id, link.fingerprint) == mine for link in self.links())

    def send(self, node_id: str, message: Message) -> None:
        """Send a message to a node. Raises LinkError without a link."""
        link = self.to(node_id)
        if link is None:
            raise LinkError(f"there is no link to node {node_id}")
        link.send(message)

    def broadcast(self, *messages: Message) -> None:
        for node_id in self.nodes():
            with contextlib.suppress(MlxtpError):
                for message in messages:
                    self.send(node_id, message)

    async def called(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: NodeIdentity
    ) -> None:
        """Serve a link that a peer with a certificate of the cluster dialed, until it ends."""
        link = ControlLink(reader, writer, dialled=False)
        with contextlib.suppress(ProtocolError):  # it is refused below
            self.shares.spend(identity.node_id, CALL_S)
        try:
            hello = await link.receive_hello()
            if refusal := self._judge(identity, hello) or self.shares.refusal(identity.node_id):
                line = f"{hello.name or hello.node_id} at {link.remote} is refused: {refusal.detail}"
                if self._logged.passes(line):
                    log.warning("%s", line)
                self.refused.note(identity, refusal)
                if refusal.code is Code.MISMATCH and READS in hello.versions:
                    with contextlib.suppress(MlxtpError, TimeoutError, IndexError):
                        link.send_roster(self.parting[0](identity))
                        self.parting[1](await link.receive_roster())
                link.refuse(refusal)
                return
            link.send(self._hello())
        except (MlxtpError, TimeoutError, IndexError) as error:
            log.debug("a connection from %s ended before its hello: %s", link.remote, error)
            link.close()
            return
        await self._live(link, identity)

    async def dialled(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: NodeIdentity
    ) -> str:
        """Greet a dialed peer. Return its id; the link stays open. Raises MlxtpError if refused."""
        link = ControlLink(reader, writer, dialled=True)
        try:
            link.send(self._hello())
            if isinstance(await link.peek(), RosterParting):
                text = self.parting[0](identity)
                self.parting[1](await link.receive_roster())
                link.send_roster(text)
            hello = await link.receive_hello()
            if refusal := self._judge(identity, hello) or self.shares.refusal(identity.node_id):
                link.refuse(refusal)
                self.refused.note(identity, refusal)
                raise refusal
        except (TimeoutError, IndexError):
            link.close()
            raise LinkError(
                f"{link.remote} sent no hello within {GREETING_S:g} s", Code.LINK_TIMEOUT
            ) from None
        except MlxtpError as error:
            if isinstance(error, Rejected):
                self.refused.note(identity, error)
            link.close()
            raise
        self._readers.start(self._live(link, identity), f"the link to {hello.name}")
        return hello.node_id

    async def _live(self, link: ControlLink, identity: NodeIdentity) -> None:
        link.number, link.identity, link.fingerprint = next(_NUMBERS), identity, identity.fingerprint
        began, spend = time.thread_time(), partial(self.shares.spend, link.node_id)
        link.connection.pace = spend
        if not self.up(link):
            link.close()  # no goodbye: it would mean that this agent stops
            return
        why, goodbye = "closed", False
        try:
            messages = link.rest
            spend(time.thread_time() - began)
            while True:
                for message in messages:
                    began = time.thread_time()
                    if isinstance(message, SessionEnd):
                        why, goodbye = "its agent stopped", True
                    else:
                        why = message.detail if isinstance(message, Error) else why
                        self.received(link, message)
                    await asyncio.sleep(spend(time.thread_time() - began))  # let other links have their turn
                    if link.connection.closed:
                        break
                if link.connection.protocol.state in TERMINAL:
                    break  # ignore a connection that stays open after the last message
                if not (batch := await link.connection.receive()):
                    break
                messages = [each.message for each in batch]
        except MlxtpError as error:
            why = error.detail
            if error.code is Code.OVERLOADED:  # only `CpuShares` raises it here
                if self._logged.passes(link.node_id):
                    log.warning("the link to %s (%s) is closed: %s", link.hello.name, link.node_id[:8], why)
                link.refuse(error)
        finally:
            link.close()
            self.down(link, why, goodbye)

    def cut(self, node_id: str, error: MlxtpError) -> None:
        for link in self.links():
            if link.node_id == node_id:
                link.refuse(error)

    async def close(self) -> None:
        for link in self.links():
            link.close(goodbye=True)
        await self._readers.close()


# --- reports -------------------------------------------------------------------------------------------

R = TypeVar("R", bound=NodeRow)


class ReportTable:
    """Table of each node's rows, which only that node publishes, over its links.

    A node sends a row when it changes. It sends all rows, then `ReportsSent`, before its beat, over each new
    link, and again over the remaining one of two links, because the other may have lost some.
    """

    def __init__(self, node_id: str, links: PeerLinks) -> None:
        self._node_id = node_id
        self._links = links
        self._numbers = itertools.count(1)
        self._own: defaultdict[type[NodeRow], dict[tuple[str, ...], Any]] = defaultdict(dict)
        #: By node id, kind and key: the last report's number, and its row; None if the row is over.
        self._heard: defaultdict[str, defaultdict[type[NodeRow], dict[tuple[str, ...], tuple[int, Any]]]]
        self._heard = defaultdict(lambda: defaultdict(dict))
        self._since: dict[str, tuple[str, int]] = {}  #: By node id: boot id, and the first valid number.
        self._handlers: defaultdict[type[NodeRow], list[Callable[[str, Any], object]]] = defaultdict(list)
        links.on(self._received, Report)
        links.on(self._complete, ReportsSent)
        links.on_up(self._greet)
        links.on_lost(lambda node_id, _why: self.drop_rows(node_id, lasting=False))

    def publish(self, kind: type[R], *rows: R) -> None:
        """Replace this node's rows of a kind at all members."""
        before, now = self._own[kind], {row.about: row for row in rows[-kind.MOST :]}
        self._own[kind] = now
        over = [self.report(row, over=True) for about, row in before.items() if about not in now]
        new = [self.report(row) for about, row in now.items() if row != before.get(about)]
        self._links.broadcast(*over, *new)

    def report(self, row: NodeRow, *, over: bool = False) -> Report:
        return Report(next(self._numbers), row, over)

    def on(self, handler: Callable[[str, R], object], kind: type[R]) -> None:
        """Have `handler` called with a node's id and its new row of a kind, before it counts. If it raises,
        the link ends, and the row does not count.
        """
        self._handlers[kind].append(handler)

    def of(self, kind: type[R], *about: str) -> dict[str, R]:
        """Return all nodes' rows of a kind with these values of its keys, by node id."""
        found = {node_id: kinds[kind].get(about, (0, None))[1] for node_id, kinds in self._heard.items()}
        found[self._node_id] = self._own[kind].get(about)
        return {node_id: row for node_id, row in found.items() if row is not None}

    def by(self, node_id: str, kind: type[R]) -> list[R]:
        if node_id == self._node_id:
            return list(self._own[kind].values())
        heard = self._heard[node_id][kind] if node_id in self._heard else {}
        return [row for _, row in heard.values() if row is not None]

    def others(self, kind: type[R]) -> list[tuple[str, R]]:
        """Return the other nodes' rows of a kind, each with its node's id."""
        return [(node_id, row) for node_id in self._heard for row in self.by(node_id, kind)]

    def drop_rows(self, node_id: str, *, lasting: bool = True) -> None:
        """Drop a node's rows; `lasting`: also rows of kinds that `LAST`."""
        if lasting:
            self._heard.pop(node_id, None)
        for kind in [kind for kind in self._heard.get(node_id, ()) if not kind.LAST]:
            del self._heard[node_id][kind]

    def _greet(self, link: ControlLink) -> None:
        node_id, boot_id = link.node_id, link.hello.boot_id
        if self._since.get(node_id, ("", 0))[0] != boot_id:
            self.drop_rows(node_id)
            self._since[node_id] = boot_id, 0
        since = next(self._numbers)
        for row in [row for rows in self._own.values() for row in rows.values()]:
            link.send(self.report(row))
        link.send(ReportsSent(since))

    def _received(self, link: ControlLink, report: Report) -> None:
        node_id, row, kind = link.node_id, report.row, type(report.row)
        boot_id, since = self._since[node_id]
        heard = self._heard[node_id][kind]
        late = report.number <= max(since, heard.get(row.about, (0, None))[0])
        if link.hello.boot_id != boot_id or late:
            return  # another link was faster
        for handler in () if report.over else self._handlers[kind]:
            handler(node_id, row)
        heard.pop(row.about, None)
        heard[row.about] = report.number, None if report.over else row
        for over in (True, False) if len(heard) > kind.MOST else ():  # keep the newest MOST of each
            of_these = [about for about, (_, there) in heard.items() if (there is None) is over]
            for about in of_these[: -kind.MOST]:
                del heard[about]

    def _complete(self, link: ControlLink, message: ReportsSent) -> None:
        boot_id, since = self._since[link.node_id]
        if link.hello.boot_id != boot_id or message.since <= since:
            return
        self._since[link.node_id] = boot_id, message.since
        for heard in self._heard[link.node_id].values():
            for about in [about for about, (number, _) in heard.items() if number < message.since]:
                del heard[about]


def _ip(name: object) -> str:
    return str(name[0]) if isinstance(name, tuple) else ""
