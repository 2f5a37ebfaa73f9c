"""Dialler of the other members, by Bonjour and by given or remembered addresses, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from ..background import Background
from ..discovery.addresses import MAX_KNOWN, Advert, DiscoveredPeer, explain
from ..discovery.mdns import Addresses, Discovery, addresses_up
from ..errors import Code, MlxtpError
from ..wire.messages import PROTOCOL_VERSION
from ..wire.streams import open_tls
from ..wire.tls import ALPN_CONTROL, Credentials, member_context_client, peer_identity
from .links import Rejected
from .node import ClusterNode

log = logging.getLogger(__name__)

DIAL_S = 3.0
TICK_S = 0.25
INTERFACES_S = 2.0  #: Seconds between two checks of this machine's addresses.
TOLD_S = 60.0  #: Seconds for which the log does not repeat the same refusal by the same address.
#: Refusals by another Mac that this Mac's user has to know about.
_OURS_TO_MEND = (Code.DUPLICATE_NODE, Code.REMOVED_NODE, Code.MISMATCH)


class Dialer:
    """Dials every member that can be reached. `port` is that of this agent's control port."""

    def __init__(
        self, node: ClusterNode, credentials: Credentials, port: int, rewired: Callable[[], None]
    ) -> None:
        self._settings = node.settings
        self._node = node
        self._port = port
        self._rewired = rewired
        self._credentials = credentials
        self._dialing = node.dialing
        self._discovery = Discovery(self._sighted, log.warning)
        self._dials = Background()
        self._logged: dict[str, tuple[str, float]] = {}
        self._refusal = ""  #: The last refusal by another Mac, until the Mac that sent it accepts this one.
        self._addresses: Addresses | None = None
        self._look_at = 0.0
        self.sightings: tuple[DiscoveredPeer, ...] = ()

    async def run(self) -> None:
        if self._settings.discovery:
            only = (self._settings.loopback,) if self._settings.loopback else ()
            await self._discovery.start(self._advert(), only)
        try:
            while True:
                now = time.monotonic()
                self._notice_interfaces(now)
                members = self._node.replica.roster.members()
                for node_id in list(self._dialing.remembered()):
                    if node_id not in members:
                        self._dialing.forget(node_id)
                for address in self._dialing.tick(now, self._node.links.nodes()):
                    self._dials.start(self._dial(address), f"dialling {address}")
                await asyncio.sleep(TICK_S)
        finally:
            await self._dials.close()
            if self._settings.discovery:
                with contextlib.suppress(OSError):
                    await self._discovery.close()

    @property
    def trouble(self) -> str:
        """Reason why multicast cannot find other Macs; empty if it can, or if discovery is off."""
        return self._discovery.problem

    def woke(self) -> None:
        self._dialing.interfaces_changed(time.monotonic())
        if self._settings.discovery:
            self._discovery.refresh()

    def _notice_interfaces(self, now: float) -> None:
        if now < self._look_at:
            return
        self._look_at = now + INTERFACES_S
        addresses = addresses_up()
        if self._addresses is not None and addresses != self._addresses:
            log.info("this Mac's network addresses changed")
            self._dialing.interfaces_changed(now)
            self._discovery.refresh()
            self._rewired()
        self._addresses = addresses

    def _advert(self) -> Advert:
        identity = self._node.identity
        return Advert(
            identity.node_id,
            identity.cluster_id,
            self._node.name,
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
            context = member_context_client(self._credentials, ALPN_CONTROL)
            reader, writer = await open_tls(host, int(port), context, ALPN_CONTROL, DIAL_S)
            try:
                identity = peer_identity(writer.get_extra_info("ssl_object"))
                node_id = await self._node.links.dialled(reader, writer, identity)
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
            if self._node.introduction.problem == said:
                self._node.introduction.problem = ""

    def _log_once(self, address: str, error: MlxtpError) -> None:
        quiet = error.code in (Code.LINK_LOST, Code.LINK_TIMEOUT)
        said, at = self._logged.get(address, ("", 0.0))
        if error.detail == said and time.monotonic() - at < TOLD_S:
            return
        self._logged[address] = (error.detail, time.monotonic())
        if len(self._logged) > MAX_KNOWN:  # a flood of new addresses
            del self._logged[next(iter(self._logged))]
        if "Errno 65" in error.detail:  # macOS blocks the local network, mostly without a message
            log.warning("%s: %s", address, explain(65, error.detail))
            return
        log.log(logging.DEBUG if quiet else logging.WARNING, "%s: %s", address, error.detail)
        if isinstance(error, Rejected) and error.code in _OURS_TO_MEND:
            self._node.introduction.problem = self._refusal = error.detail
