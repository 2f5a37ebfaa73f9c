"""The control links to the other agents of the cluster: opened from either end, greeted, read, counted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Protocol as Interface

from ..errors import Code, LinkError, MlxtpError, ProtocolError
from ..wire.base import Message
from ..wire.certificates import NodeIdentity
from ..wire.cluster_messages import AgentHello
from ..wire.messages import Error, SessionEnd
from ..wire.protocol import TERMINAL
from ..wire.session import LinkKind, Session, Side
from ..wire.streams import StreamLink

log = logging.getLogger(__name__)

GREETING_S = 3.0
"""How long the other end may take to say who it is."""
SAID_S = 60.0
"""How long the same refusal of the same caller is not repeated in the log."""
MAX_UNSENT_BYTES = 16 * 1024 * 1024
"""What may wait for an agent that does not read before its link is cut."""

Judge = Callable[[NodeIdentity, AgentHello], MlxtpError | None]
"""Why a peer that showed this identity and said this is refused; None when it is welcome."""


class Rejected(ProtocolError):
    """The other end does not want this node, and said why."""


class ControlLink:
    """One open control link. `local` and `remote` are its ends' addresses ("ip"), as seen from here."""

    def __init__(self, number: int, hello: AgentHello, identity: NodeIdentity, end: _End) -> None:
        self.number = number
        self.hello = hello
        self.node_id = hello.node_id
        self.fingerprint = identity.fingerprint
        self.dialled = end.dialled
        self.local, self.remote = end.local, end.remote
        self._end = end

    def send(self, message: Message) -> None:
        """Raises LinkError when it is gone."""
        self._end.send(message)

    def refuse(self, error: MlxtpError) -> None:
        """End it, and say why."""
        self._end.refuse(error)

    def close(self, goodbye: bool = False) -> None:
        """End it, with a last word if it is meant to end. May be repeated."""
        self._end.close(goodbye)


class LinkEvents(Interface):
    """Who is told. Nothing here may raise."""

    def opened(self, link: ControlLink) -> bool:
        """A peer was welcomed. False: this link is not wanted after all."""

    def received(self, link: ControlLink, message: Message) -> None: ...

    def closed(self, link: ControlLink, why: str, goodbye: bool) -> None:
        """After `opened` returned True, exactly once."""


class _End:
    """This end of one TLS connection that speaks the control protocol."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, dialled: bool) -> None:
        self.dialled = dialled
        self.connection = StreamLink(
            reader, writer, Session(LinkKind.CONTROL, Side.LOWER if dialled else Side.UPPER, 0)
        )
        self.rest: list[Message] = []
        self._writer = writer
        self.local = _ip(writer.get_extra_info("sockname"))
        self.remote = _ip(writer.get_extra_info("peername"))

    def send(self, message: Message) -> None:
        if self.connection.unsent_bytes > MAX_UNSENT_BYTES:
            self._writer.transport.abort()
            raise LinkError("the other agent does not read what it is sent", Code.LINK_TIMEOUT)
        self.connection.send(message)

    async def receive_hello(self) -> AgentHello:
        """Who the other end is. What it said after that is kept for `rest`."""
        async with asyncio.timeout(GREETING_S):
            batch = await self.connection.receive()
        received, self.rest = batch[0].message, [each.message for each in batch[1:]]
        if isinstance(received, Error):
            raise Rejected(received.detail, Code(received.code))
        if not isinstance(received, AgentHello):
            raise ProtocolError(f"{type(received).__name__} where a hello was expected", Code.OUT_OF_ORDER)
        return received

    def refuse(self, error: MlxtpError) -> None:
        with contextlib.suppress(MlxtpError):
            self.send(Error(error.code, error.detail, 0))
        self.connection.close()

    def close(self, goodbye: bool) -> None:
        if goodbye:
            with contextlib.suppress(MlxtpError):
                self.send(SessionEnd())
        self.connection.close()


class PeerLinks:
    """All control links of this agent."""

    def __init__(
        self, node_id: str, hello: Callable[[], AgentHello], judge: Judge, events: LinkEvents
    ) -> None:
        self._node_id = node_id
        self._hello = hello
        self._judge = judge
        self._events = events
        self._numbers = itertools.count(1)
        self._links: dict[int, ControlLink] = {}
        self._readers: set[asyncio.Task[None]] = set()
        self._logged: dict[tuple[str, str], float] = {}

    def to(self, node_id: str) -> ControlLink | None:
        """The link to a node. Where there are two, both ends mean the one that the smaller id dialled."""
        mine = self._node_id
        links = [link for link in self._links.values() if link.node_id == node_id]
        return min(links, key=lambda link: (link.dialled != (mine < node_id), link.number), default=None)

    def links(self) -> tuple[ControlLink, ...]:
        """Every open link."""
        return tuple(self._links.values())

    def nodes(self) -> frozenset[str]:
        """Node ids with at least one open link."""
        return frozenset(link.node_id for link in self._links.values())

    def send(self, node_id: str, message: Message) -> None:
        """Raises LinkError when there is no link to the node."""
        link = self.to(node_id)
        if link is None:
            raise LinkError(f"there is no link to node {node_id}")
        link.send(message)

    def broadcast(self, message: Message) -> None:
        """To every node that has a link; who has lost its link notices that elsewhere."""
        for node_id in self.nodes():
            with contextlib.suppress(MlxtpError):
                self.send(node_id, message)

    async def called(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: NodeIdentity
    ) -> None:
        """Somebody dialled us and showed a certificate of the cluster. Returns when the link ends."""
        end = _End(reader, writer, dialled=False)
        try:
            hello = await end.receive_hello()
            if refusal := self._judge(identity, hello):
                self._say_refused(f"{hello.name or hello.node_id} at {end.remote}", refusal.detail)
                end.refuse(refusal)
                return
            end.send(self._hello())
        except (MlxtpError, TimeoutError, IndexError) as error:
            log.debug("a call from %s ended before it began: %s", end.remote, error)
            end.close(goodbye=False)
            return
        await self._live(end, hello, identity)

    def _say_refused(self, who: str, why: str) -> None:
        """Once in a while: whoever is refused calls again and again."""
        now = time.monotonic()
        self._logged = {words: at for words, at in self._logged.items() if now - at < SAID_S}
        if (who, why) not in self._logged:
            self._logged[who, why] = now
            log.warning("%s is refused: %s", who, why)

    async def dialled(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: NodeIdentity
    ) -> str:
        """We dialled somebody. Returns its node id once it has welcomed us; the link lives on by itself.

        Raises MlxtpError when it is not wanted here, or does not want us.
        """
        end = _End(reader, writer, dialled=True)
        try:
            end.send(self._hello())
            hello = await end.receive_hello()
            if refusal := self._judge(identity, hello):
                end.refuse(refusal)
                raise refusal
        except (TimeoutError, IndexError):
            end.close(goodbye=False)
            raise LinkError(f"{end.remote} did not say who it is", Code.LINK_TIMEOUT) from None
        except MlxtpError:
            end.close(goodbye=False)
            raise
        task = asyncio.ensure_future(self._live(end, hello, identity))
        self._readers.add(task)
        task.add_done_callback(self._readers.discard)
        return hello.node_id

    async def _live(self, end: _End, hello: AgentHello, identity: NodeIdentity) -> None:
        link = ControlLink(next(self._numbers), hello, identity, end)
        self._links[link.number] = link
        if not self._events.opened(link):
            del self._links[link.number]
            link.close()  # no goodbye: the other end would take it that this agent stops
            return
        why, goodbye = "closed", False
        try:
            messages = end.rest
            while True:
                for message in messages:
                    if isinstance(message, SessionEnd):
                        why, goodbye = "said goodbye", True
                    else:
                        why = message.detail if isinstance(message, Error) else why
                        self._events.received(link, message)
                if end.connection.protocol.state in TERMINAL:
                    break  # that was its last word, whether it hangs up or not
                if not (batch := await end.connection.receive()):
                    break
                messages = [each.message for each in batch]
        except MlxtpError as error:
            why = error.detail
        finally:
            del self._links[link.number]
            end.close(goodbye=False)
            self._events.closed(link, why, goodbye)

    async def close(self) -> None:
        """Say goodbye on every link."""
        for link in self.links():
            link.close(goodbye=True)
        for task in list(self._readers):
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)


def _ip(name: object) -> str:
    return str(name[0]) if isinstance(name, tuple) else ""
