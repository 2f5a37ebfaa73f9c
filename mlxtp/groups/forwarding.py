"""A group that another node owns: forwards requests to the owner's agent, and shows the reported state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping

from ..background import Background, log_failure
from ..discovery.addresses import host_and_port
from ..errors import Code, GroupError, LinkError, MlxtpError
from ..gateway.gateway import Gateway
from ..wire.cluster_messages import Serving
from ..wire.codecs import Message
from ..wire.messages import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Delta,
    Error,
    Finished,
    Generate,
    Hello,
    Prefilled,
    RequestEvent,
    ScoredDelta,
    Vectors,
    Welcome,
)
from ..wire.session import LinkKind, Session, Side
from ..wire.streams import StreamLink, open_tls
from ..wire.tls import ALPN_REQUESTS, Credentials, member_context_client
from .health import ServingState
from .loading import model_info
from .process_group import EpochGroup
from .scope import GroupScope

log = logging.getLogger(__name__)


# --- requests link: from the agent of the client to the agent with rank 0, and back ---------------------

MAX_UNSENT_BYTES = 8 * 1024 * 1024  #: Unread bytes after which an agent's link is cut.


class RemoteBackend:
    """A `RequestBackend` whose rank 0 is on another Mac. When its link ends, it calls `lost` once."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_event: Callable[[RequestEvent], None],
        lost: Callable[[MlxtpError], None],
    ) -> None:
        self._connection = StreamLink(reader, writer, Session(LinkKind.REQUESTS, Side.UPPER, 0))
        self._on_event = on_event
        self._lost = lost
        self._background = Background(self._failed)

    async def greet(self) -> RemoteBackend:
        """Greet the other end, then keep reading. Raises LinkError or ProtocolError."""
        await self._connection.receive()  # its Hello; anything else is out of order
        self._connection.send(Welcome(PROTOCOL_VERSION, b""))
        self._background.start(self._read_all(), "reading a requests link")
        return self

    def send(self, message: Message) -> None:
        self._connection.send(message)

    async def _read_all(self) -> None:
        error: MlxtpError = LinkError("the agent with rank 0 closed its link", Code.LINK_LOST)
        try:
            while batch := await self._connection.receive():
                for received in batch:
                    match received.message:
                        case Accepted() | Prefilled() | Delta() | ScoredDelta() | Vectors() | Finished():
                            self._on_event(received.message)
                        case Error() if received.message.uid:
                            self._on_event(received.message)
        except MlxtpError as failure:
            error = failure
        self._connection.close()
        self._lost(error)

    def _failed(self, reading: asyncio.Task[None], error: BaseException) -> None:
        log_failure(reading, error)
        self._connection.close()
        self._lost(LinkError(f"{type(error).__name__}: {error}", Code.INTERNAL))

    def drop(self) -> None:
        """End the link without calling `lost`."""
        for task in self._background.tasks:
            task.cancel()
        self._connection.close()

    async def close(self) -> None:
        await self._background.close()
        self._connection.close()


async def serve_requests(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gateway: Gateway
) -> None:
    """Give the other end's requests to the gateway until the link ends, then cancel them all."""
    connection = StreamLink(reader, writer, Session(LinkKind.REQUESTS, Side.LOWER, 0))
    cancels: dict[int, Callable[[], None]] = {}

    def tell(message: Message) -> None:
        """Send without failing: the reader below notices a link that is gone or full."""
        if connection.unsent_bytes > MAX_UNSENT_BYTES:
            writer.transport.abort()
            return
        with contextlib.suppress(MlxtpError):
            connection.send(message)
        if isinstance(message, (Finished, Error)):
            cancels.pop(message.uid, None)

    def generate(request: Generate) -> None:
        try:
            cancels[request.uid] = gateway.relay(request, tell)
        except MlxtpError as error:
            tell(Error(error.code, error.detail, request.uid))

    try:
        connection.send(Hello(PROTOCOL_VERSION, 0, os.getpid(), os.urandom(16), b""))
        while batch := await connection.receive():
            for received in batch:
                match received.message:
                    case Generate():
                        generate(received.message)
                    case Cancel() if received.message.uid in cancels:
                        cancels.pop(received.message.uid)()
    except MlxtpError as error:
        log.debug("a requests link ended: %s", error.detail)
    finally:
        connection.close()  # first: an interrupted request must not look cancelled
        for cancel in list(cancels.values()):
            cancel()


# --- the group ------------------------------------------------------------------------------------------

CONNECT_S = 3.0
RETRY_S = 0.5


class ForwardingBackend:
    """Forwarder of requests to the agent with rank 0. Call `follow` whenever the cluster may have changed."""

    def __init__(self, scope: GroupScope, credentials: Credentials) -> None:
        self._node = scope.node
        self._scope = scope
        self._supervisor = scope.supervisor
        self._credentials = credentials
        #: Node, epoch, model and context that are served, or about to be.
        self._served: tuple[str, int, str, int] | None = None
        self._ready = False  #: True once it is served.
        self._backend: RemoteBackend | None = None
        self._backend_at = ""  #: Peer of the requests link, which outlives that node's epochs.
        self._background = Background(self._failed)
        self._opening: asyncio.Task[None] | None = None
        self._retry_at = 0.0

    def follow(self) -> None:
        """Follow a group that serves elsewhere, unless this node has an epoch."""
        scope, status = self._scope, self._supervisor.status
        if status.in_epoch:
            self._leave()
            return
        present = self._node.membership.status_of
        servings = {owner: each for owner, each in scope.reports() if present(owner).present}
        if (node_id := followed(servings, scope.assignment.owner)) is None:
            self._drop("the group is being formed")
            if not status.resting:
                why = (scope.waiting if scope.owned else scope.why_not) or "the group is about to form"
                status.follow(ServingState.IDLE, 0, why, EpochGroup(0, 0, "none"))
            return
        if self._backend is not None and self._backend_at != node_id:
            self._drop(f"{self._node.name_of(node_id)} serves now")
        serving = servings[node_id]
        state, reason = self._state_here(serving)
        wanted = (node_id, serving.epoch, serving.model, serving.context)
        if state is not ServingState.READY:
            self._rest()
        elif wanted != self._served and time.monotonic() >= self._retry_at:
            self._rest()
            self._served = wanted
            self._opening = self._background.start(self._open(node_id, serving), "opening a requests link")
        if state is ServingState.READY and not self._ready:
            state, reason = ServingState.LOADING, "connecting to rank 0"
        size = len(serving.participants)
        group = EpochGroup(0, size, serving.backend, kind=serving.kind, split=serving.split)
        status.follow(state, serving.epoch, reason, group)

    def _state_here(self, serving: Serving) -> tuple[ServingState, str]:
        """Return the group's state at this node, which needs the model's files, and the reason."""
        row, model = self._scope.row, self._scope.model
        state = ServingState(serving.state)
        if state in (ServingState.STARTING, ServingState.STOPPED):
            return ServingState.FORMING, serving.reason
        if state is not ServingState.READY:
            return state, serving.reason
        if row is None or row.model != serving.model:
            return ServingState.LOADING, serving.reason
        if model.source is None:
            coming = ServingState.IDLE if model.problem else ServingState.LOADING
            return coming, model.problem or "looking for the model's files"
        return state, serving.reason

    async def _open(self, node_id: str, serving: Serving) -> None:
        source, supervisor = self._scope.model.source, self._supervisor
        try:
            if source is None:
                raise GroupError("the model is gone", Code.MODEL_NOT_FOUND)
            info = await model_info(source, serving)
            if self._backend is None:
                await self._reach(node_id)
        except (MlxtpError, TimeoutError, OSError) as error:
            log.warning("cannot send requests to %s; trying again: %s", self._node.name_of(node_id), error)
            self._retry_later()
            return
        if supervisor.status.in_epoch:  # an epoch began meanwhile
            self._leave()
            return
        assert self._backend is not None
        self._ready = True
        ids, load_s = (supervisor.group, supervisor.deployment), serving.load_s
        supervisor.gateway.serve(*ids, self._backend, info, source.text, here=False, load_s=load_s)
        self._node.changed()

    def _failed(self, opening: asyncio.Task[None], error: BaseException) -> None:
        log.error("cannot send requests to the agent with rank 0; trying again", exc_info=error)
        if opening is self._opening:
            self._retry_later()

    def _retry_later(self) -> None:
        self._retry_at = time.monotonic() + RETRY_S
        self._served = None

    async def _reach(self, node_id: str) -> None:
        """Open a link, at the control link's address. Raises MlxtpError, TimeoutError or OSError."""
        node, gateway = self._node, self._supervisor.gateway
        if (link := node.links.to(node_id)) is None:
            raise GroupError("the link to it is gone", Code.LINK_LOST)
        found = next(filter(None, map(host_and_port, node.peer_info.addresses.get(node_id, ()))), None)
        if found is None:
            raise GroupError("it has not reported the port on which it listens", Code.LINK_LOST)
        context = member_context_client(self._credentials, ALPN_REQUESTS)
        reader, writer = await open_tls(link.remote, found[1], context, ALPN_REQUESTS, CONNECT_S)
        try:
            async with asyncio.timeout(CONNECT_S):
                self._backend = await RemoteBackend(reader, writer, gateway.on_event, self._lost).greet()
                self._backend_at = node_id
        except BaseException:
            writer.transport.abort()
            raise

    def _lost(self, error: MlxtpError) -> None:
        self._backend, self._backend_at = None, ""
        self._retry_at = time.monotonic() + RETRY_S
        self._rest()
        self._supervisor.gateway.park(self._supervisor.group, GroupError(error.detail, Code.LINK_LOST))
        self._node.changed()

    def _drop(self, why: str) -> None:
        """End the link: that node no longer serves. Its open requests wait for another group."""
        if self._leave():
            self._supervisor.gateway.park(self._supervisor.group, GroupError(why, Code.NOT_READY))

    def _leave(self) -> bool:
        """End the link without an event for the gateway. Return whether there was a link."""
        self._forget()
        backend, self._backend, self._backend_at = self._backend, None, ""
        if backend is not None:
            backend.drop()
        return backend is not None

    def _rest(self) -> None:
        """Take no new requests for now. Open ones stay with the other agent until it reports otherwise."""
        self._forget()
        self._supervisor.gateway.detach(self._supervisor.group)

    def _forget(self) -> None:
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        self._served, self._ready = None, False

    async def close(self) -> None:
        await self._background.close()
        if self._backend is not None:
            with contextlib.suppress(MlxtpError):
                await self._backend.close()


def followed(servings: Mapping[str, Serving], owner: str) -> str | None:
    """Return the node to follow for a group: its assigned `owner` if that has an epoch, else a ready node,
    else the owner, whose report has the reason; None if no node reports the group.
    """
    ready = [node_id for node_id, each in servings.items() if each.state == ServingState.READY]
    if owner in servings and (servings[owner].participants or not ready):
        return owner
    return min(ready, default=None)
