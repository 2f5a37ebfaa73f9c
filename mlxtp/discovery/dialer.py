"""Reaching the other members: by Bonjour, by addresses that were given or remembered, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from ..cluster.links import Rejected
from ..cluster.node import NodeLoop
from ..config import Settings
from ..errors import Code, MlxtpError
from ..identity.store import Identity
from ..wire.messages import PROTOCOL_VERSION
from ..wire.tls import ALPN_CONTROL, Credentials, member_context_client, peer_identity
from ..wire.tls_acceptor import open_tls
from .dial_schedule import MAX_ADDRESSES, Dialing
from .mdns import Discovery
from .multicast import Addresses, addresses_up
from .peer_cache import Advert, DiscoveredPeer, explain

log = logging.getLogger(__name__)

DIAL_S = 3.0
TICK_S = 0.25
INTERFACES_S = 2.0
"""How often this machine's addresses are looked at."""
TOLD_S = 60.0
"""How long the same refusal of the same address is not repeated in the log."""
_OURS_TO_MEND = (Code.DUPLICATE_NODE, Code.REMOVED_NODE, Code.MISMATCH)
"""Refusals by another Mac that this one's person has to know of."""


class Dialer:
    """Keeps a link to every member that can be reached."""

    def __init__(
        self, settings: Settings, identity: Identity, credentials: Credentials, cluster: NodeLoop, port: int
    ) -> None:
        self._settings = settings
        self._identity = identity
        self._cluster = cluster
        self._port = port
        self._context = member_context_client(credentials, ALPN_CONTROL)
        self._dialing = Dialing(identity.node_id, identity.cluster_id, settings.peers)
        for node_id, addresses in cluster.peers().items():
            self._dialing.remember(node_id, addresses)
        cluster.peers = self._dialing.remembered
        self._discovery = Discovery(self._sighted, log.warning)
        self._dials: set[asyncio.Task[None]] = set()
        self._logged: dict[str, tuple[str, float]] = {}
        self._refusal = ""
        """The last word of a Mac that does not want this one, until a Mac that said it does."""
        self._addresses: Addresses | None = None
        self._look_at = 0.0
        self.sightings: tuple[DiscoveredPeer, ...] = ()

    async def run(self) -> None:
        """Until cancelled; then says goodbye on the network."""
        if self._settings.discovery:
            only = (self._settings.interface,) if self._settings.interface else ()
            await self._discovery.start(self._advert(), only)
        try:
            while True:
                now = time.monotonic()
                self._notice_interfaces(now)
                members = self._cluster.leadership.roster.members()
                for node_id in list(self._dialing.remembered()):
                    if node_id not in members:
                        self._dialing.forget(node_id)
                for address in self._dialing.tick(now, self._cluster.links.nodes()):
                    task = asyncio.ensure_future(self._dial(address))
                    self._dials.add(task)
                    task.add_done_callback(self._dials.discard)
                await asyncio.sleep(TICK_S)
        finally:
            for task in list(self._dials):
                task.cancel()
            await asyncio.gather(*self._dials, return_exceptions=True)
            if self._settings.discovery:
                with contextlib.suppress(OSError):
                    await self._discovery.close()

    @property
    def trouble(self) -> str:
        """Why others cannot be heard by multicast, in words; empty while they can, or nobody listens."""
        return self._discovery.problem

    def woke(self) -> None:
        """This machine slept: whoever could not be reached before may be here by now."""
        self._dialing.interfaces_changed(time.monotonic())
        if self._settings.discovery:
            self._discovery.refresh()

    def _notice_interfaces(self, now: float) -> None:
        """Cables come and go; what is behind an address may have changed as well."""
        if now < self._look_at:
            return
        self._look_at = now + INTERFACES_S
        addresses = addresses_up()
        if self._addresses is not None and addresses != self._addresses:
            log.info("this Mac's network addresses changed")
            self._dialing.interfaces_changed(now)
            self._discovery.refresh()
            self._cluster.rewired()
        self._addresses = addresses

    def _advert(self) -> Advert:
        identity = self._identity
        return Advert(
            identity.node_id,
            identity.cluster_id,
            self._cluster.name,
            self._port,
            identity.authority is not None,
            PROTOCOL_VERSION,
        )

    def _sighted(self, sightings: tuple[DiscoveredPeer, ...]) -> None:
        self.sightings = sightings
        self._dialing.sighted(sightings, time.monotonic())

    async def _dial(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        now = time.monotonic
        try:
            reader, writer = await open_tls(host, int(port), self._context, ALPN_CONTROL, DIAL_S)
            try:
                identity = peer_identity(writer.get_extra_info("ssl_object"))
                node_id = await self._cluster.links.dialled(reader, writer, identity)
            except BaseException:
                writer.transport.abort()
                raise
        except MlxtpError as error:
            if error.code is Code.SAME_NODE:
                self._dialing.ourselves(address)
                return
            if error.code in (Code.NOT_AUTHENTIC, Code.REMOVED_NODE):
                self._dialing.foreign(address, now())
            else:
                self._dialing.failed(address, now())
            self._log_once(address, error)
            return
        self._dialing.reached(address, node_id, now())
        said, _ = self._logged.pop(address, ("", 0.0))
        if said == self._refusal:
            self._refusal = ""
            if self._cluster.problem == said:
                self._cluster.problem = ""

    def _log_once(self, address: str, error: MlxtpError) -> None:
        """What a person could mend is said, once in a while; that somebody is away is not."""
        quiet = error.code in (Code.LINK_LOST, Code.LINK_TIMEOUT)
        said, at = self._logged.get(address, ("", 0.0))
        if error.detail == said and time.monotonic() - at < TOLD_S:
            return
        self._logged[address] = (error.detail, time.monotonic())
        if len(self._logged) > MAX_ADDRESSES:  # somebody announces ever new ones
            del self._logged[next(iter(self._logged))]
        if (
            "Errno 65" in error.detail
        ):  # macOS keeps this process from the local network, mostly without a word
            log.warning("%s: %s", address, explain(65, error.detail))
            return
        log.log(logging.DEBUG if quiet else logging.WARNING, "%s: %s", address, error.detail)
        if isinstance(error, Rejected) and error.code in _OURS_TO_MEND:
            self._cluster.problem = self._refusal = error.detail
