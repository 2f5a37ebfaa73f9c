"""Multicast DNS: announces this node on the network and finds the others that announce themselves.

Everything from the network is only a hint; `discovery/peer_cache.py` decides which hints are accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Sequence

from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceInfo

from ..background import Background, Backoff
from .multicast import Addresses, Network, addresses_up, info_of, send_something
from .peer_cache import SERVICE, Advert, DiscoveredPeer, PeerCache, Refused, explain, is_copy, validate

REFRESH_S = 2.0  #: Seconds between two checks of this machine's interfaces.
#: Seconds between two queries for all nodes, besides listening: an announcement may have been lost.
ASK_AGAIN_S = 60.0
RESOLVE_AT_ONCE = 8
RETRY_LOOK_S = 0.5
CHANGE_S = 0.2  #: Seconds between two calls of `on_change`, at least, even in a flood of announcements.
CLOSE_S = 2.0
#: More names than a house full of Macs has. zeroconf keeps them all, and repeats them in its questions.
MAX_NAMES = 512
FIRST_REST_S = 5.0
MAX_REST_S = 60.0
_MAX_COPIES_TOLD = 16


class Discovery:
    """Announcer and browser of this node. After a failure it reports the problem and tries again.

    `on_change` is called with all accepted sightings, whenever they change. `say` is called with a sentence
    for the user when something has to be fixed, or works again. `read_addresses` returns the addresses that
    are up. Everything runs in the event loop that called `start`.
    """

    def __init__(
        self,
        on_change: Callable[[tuple[DiscoveredPeer, ...]], None],
        say: Callable[[str], None],
        read_addresses: Callable[[], Addresses] = addresses_up,
    ) -> None:
        self.problem = ""
        self._on_change = on_change
        self._announce = say
        self._read_addresses = read_addresses
        self._sightings = PeerCache()
        self._advert: Advert
        self._only: tuple[str, ...] = ()
        self._background = Background()
        self._asking: set[str] = set()
        self._hurry = asyncio.Event()
        self._news = asyncio.Event()
        self._changed = False
        self._told_at = 0.0
        self._network: Network | None = None
        self._until_flooded: asyncio.Timeout
        self._leaving = False
        self._rests = 0
        self._copies_reported: dict[str, None] = {}

    @property
    def sightings(self) -> tuple[DiscoveredPeer, ...]:
        """Sightings that are accepted now."""
        return self._sightings.believed

    async def start(self, advert: Advert, addresses: Sequence[str] = ()) -> None:
        """Begin to announce and to listen, in the background.

        `addresses` restricts it to these addresses of this machine. Without, it uses all that are up except
        loopback.
        """
        self._advert = advert
        self._only = tuple(addresses)
        self._background.start(self._keep_open(), "discovery")
        self._background.start(self._keep_looking(), "the search for other Macs")

    def update(self, advert: Advert) -> None:
        """Announce something else from now on, for example after this node joined a cluster."""
        self._advert = advert
        self._hurry.set()

    def refresh(self) -> None:
        """Check this machine's interfaces now instead of within 2 s."""
        self._hurry.set()

    async def close(self) -> None:
        """Send a goodbye and end."""
        self._leaving = True
        await self._background.close()
        await self._shut()

    # --- being on the network

    async def _keep_open(self) -> None:
        while True:
            try:
                async with asyncio.timeout(None) as self._until_flooded:
                    self._leaving = False
                    await self._stay_open()
            except TimeoutError:
                await self._rest()

    async def _stay_open(self) -> None:
        while True:
            self._hurry.clear()
            try:
                await self._follow()
                self._report("")
            except (OSError, ZeroconfError) as error:
                await self._shut()
                self._report(explain(getattr(error, "errno", None), str(error) or type(error).__name__))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._hurry.wait()

    async def _follow(self) -> None:
        """Adapt the open sockets to the interfaces and the advert. Raises OSError and zeroconf's errors."""
        there = self._read_addresses()
        if self._only:
            usable = {address: there[address] for address in self._only if address in there}
        else:
            usable = {a: number for a, number in there.items() if not ipaddress.ip_address(a).is_loopback}
        if not usable:
            wanted = " or ".join(self._only) or "an IPv4 address"
            raise OSError(f"no network interface of this machine that is up has {wanted}")
        if self._network is None:
            send_something(usable)
            self._network = Network(usable, self._heard)
            await self._network.ask()
            await self._network.announce(self._advert)
        elif self._network.addresses != usable:
            send_something(usable)
            await self._network.move(usable)
            self._sightings.doubt(_now())
            self._news.set()
            await self._network.ask()
            await self._network.announce(self._advert)
        elif self._network.advert != self._advert:
            await self._network.announce(self._advert)
        elif _now() - self._network.asked_at >= ASK_AGAIN_S:
            send_something(usable)
            await self._network.ask()
            self._rests = 0

    async def _rest(self) -> None:
        """Leave the network for a while, and free what zeroconf remembers."""
        pause_s = Backoff(FIRST_REST_S, MAX_REST_S).after(self._rests)
        self._rests += 1
        await self._shut(goodbye=False)
        self._report(
            f"{MAX_NAMES} names were announced as {SERVICE}: some device floods this network. Discovery is "
            f"paused for {pause_s:g} s. Links and --peer do not depend on it."
        )
        await asyncio.sleep(pause_s)

    async def _shut(self, *, goodbye: bool = True) -> None:
        network, self._network = self._network, None
        if network is not None:
            # A goodbye fails on a network that is gone.
            with contextlib.suppress(OSError, ZeroconfError):
                async with asyncio.timeout(CLOSE_S):
                    await network.close(goodbye=goodbye)

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self._announce(problem or "other Macs can be found by multicast again")
            self.problem = problem

    # --- the other nodes

    def _heard(self, service: str, there: bool) -> None:
        """Record a change. zeroconf calls this from its own work, so nothing may take long here."""
        if there:
            self._sightings.announced(service, _now())
        else:
            self._changed |= self._sightings.withdrawn(service)
        self._news.set()
        if self._network is not None and self._network.names >= MAX_NAMES and not self._leaving:
            self._leaving = True
            self._until_flooded.reschedule(_now())

    async def _keep_looking(self) -> None:
        while True:
            self._news.clear()
            self._check_records()
            due = self._sightings.next_due()
            pause_s = None if due is None else max(due - _now(), RETRY_LOOK_S)
            if self._changed and _now() - self._told_at >= CHANGE_S:
                self._changed, self._told_at = False, _now()
                self._on_change(self.sightings)
            elif self._changed:
                pause_s = CHANGE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()

    def _check_records(self) -> None:
        """Check names whose records are here, and request the records of others."""
        for service in self._sightings.due(_now()):
            if self._network is None:
                self._changed |= self._sightings.failed(service, _now())
            elif service not in self._asking:
                info = info_of(service)
                if info is None:
                    self._changed |= self._sightings.resolved(service, Refused("no service"), _now())
                elif self._network.knows(info):
                    self._judge(service, info)
                elif len(self._asking) < RESOLVE_AT_ONCE:
                    self._asking.add(service)
                    self._background.start(self._ask(self._network, service, info), f"asking for {service}")

    async def _ask(self, network: Network, service: str, info: AsyncServiceInfo) -> None:
        try:
            with contextlib.suppress(ZeroconfError):  # it was closed meanwhile
                if await network.resolve(info):
                    self._judge(service, info)
                else:
                    self._changed |= self._sightings.failed(service, _now())
        finally:
            self._asking.discard(service)
            self._news.set()

    def _judge(self, service: str, info: AsyncServiceInfo) -> None:
        """Accept or refuse a sighting."""
        own = self._network.addresses if self._network else {}
        loopback = bool(own) and all(ipaddress.ip_address(address).is_loopback for address in own)
        verdict = validate(service, info.properties, info.addresses, info.port, loopback=loopback)
        if isinstance(verdict, Refused) or verdict.node_id != self._advert.node_id:
            self._changed |= self._sightings.resolved(service, verdict, _now())
        elif self._network is None or not self._network.service:  # our own name is not known yet
            self._changed |= self._sightings.failed(service, _now())
        else:
            if is_copy(service, verdict, self._network.service, own):
                self._report_copy(verdict)
            self._changed |= self._sightings.resolved(service, Refused("our own"), _now())

    def _report_copy(self, sighting: DiscoveredPeer) -> None:
        where = ", ".join(sighting.addresses)
        if where not in self._copies_reported and len(self._copies_reported) < _MAX_COPIES_TOLD:
            self._copies_reported[where] = None
            self._announce(
                f"{sighting.name!r} at {where} announces the id of this node, {sighting.node_id}: was the "
                "folder of mlxtp copied from one Mac to the other? Remove it on one of them."
            )


def _now() -> float:
    return asyncio.get_running_loop().time()
