"""Multicast DNS: announces this node on the network, and finds nodes that do the same.

Everything found is only a hint; `discovery/addresses.py` decides which hints to accept.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import psutil
from zeroconf import BadTypeInNameException, IPVersion, ServiceStateChange
from zeroconf import Error as ZeroconfError
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from ..background import Background, Backoff
from .addresses import (
    MAX_ADDRESSES,
    SERVICE,
    Advert,
    DiscoveredPeer,
    PeerCache,
    Refused,
    announced_from,
    explain,
    is_copy,
    validate,
)

# --- multicast DNS on this machine's interfaces, by python-zeroconf --------------------------------------

RESOLVE_S = 3.0
#: Seconds. Checking that a name is free takes 0.7 s, unless other devices claim one name after another.
REGISTER_S = 5.0
_GROUP = ("224.0.0.251", 9)  #: The group of multicast DNS, at the discard port.
_TUNNEL_PREFIX = 32  #: Also given to tunnels with another netmask: they lead to one machine.
_ELSEWHERE = ("192.0.2.1", 9)  #: An address behind the default route, reserved for examples (RFC 5737).

Addresses = Mapping[str, int]  #: This machine's IPv4 addresses, with the numbers of their interfaces.


def addresses_up() -> Addresses:
    states = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        if name in states and states[name].isup:
            with contextlib.suppress(OSError):  # the interface has just gone
                number = socket.if_nametoindex(name)
                found.update({entry.address: number for entry in entries if entry.family == socket.AF_INET})
    return found


def announcing_addresses(addresses: Addresses) -> list[str]:
    prefixes = {}
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and entry.netmask:
                with contextlib.suppress(ValueError):  # a netmask with gaps
                    prefix = ipaddress.IPv4Network((0, entry.netmask)).prefixlen
                    prefixes[entry.address] = _TUNNEL_PREFIX if entry.ptp else prefix
    primary = ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        sock.connect(_ELSEWHERE)  # sends nothing
        primary = sock.getsockname()[0]
    return sorted(announced_from(addresses, prefixes, primary))


def send_something(addresses: Collection[str]) -> None:
    """Raise the first OSError if no address can send to the group, because zeroconf only logs that."""
    errors = []
    for address in addresses:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            try:
                sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(address))
                sock.sendto(b"", _GROUP)
            except OSError as error:
                errors.append(error)
    if errors and len(errors) == len(addresses):
        raise errors[0]


def info_of(service: str) -> AsyncServiceInfo | None:
    try:
        return AsyncServiceInfo(SERVICE, service)
    except BadTypeInNameException:
        return None


def _new_server() -> str:
    """Return a fresh name: with a used one, others would mix in these addresses' predecessors."""
    return f"mlxtp-{secrets.token_hex(8)}.local."


class Network:
    """Sockets on the `wanted` of these addresses, a browser, and our own service with all addresses.

    `heard` gets each full name, and True if it is there now. Methods raise OSError and zeroconf's errors.
    """

    def __init__(
        self, addresses: Addresses, wanted: Collection[str], heard: Callable[[str, bool], None]
    ) -> None:
        self.addresses = addresses
        self.wanted = wanted
        self.advert: Advert | None = None
        self.service = ""
        self.asked_at = 0.0
        self.names = 0
        self._heard = heard
        self._server = _new_server()
        self._mdns = AsyncZeroconf(interfaces=list(wanted), ip_version=IPVersion.V4Only)
        self._browser: AsyncServiceBrowser | None = None

    async def ask(self) -> None:
        """Query all nodes, four times within 14 s. Known names are reported again."""
        await self._stop_browsing()
        self.names = 0
        self.asked_at = asyncio.get_running_loop().time()
        self._browser = AsyncServiceBrowser(self._mdns.zeroconf, SERVICE, handlers=[self._on_change])

    async def _stop_browsing(self) -> None:
        browser, self._browser = self._browser, None
        if browser is not None:
            await browser.async_cancel()

    def _on_change(self, *, name: str, state_change: ServiceStateChange, **_: Any) -> None:
        self.names += state_change is ServiceStateChange.Added
        self._heard(name, state_change is not ServiceStateChange.Removed)

    def knows(self, info: AsyncServiceInfo) -> bool:
        return info.load_from_cache(self._mdns.zeroconf)

    async def resolve(self, info: AsyncServiceInfo) -> bool:
        return await info.async_request(self._mdns.zeroconf, RESOLVE_S * 1000)

    async def announce(self, advert: Advert) -> None:
        """Check that the name is free, then announce to all nodes, three times within 0.5 s."""
        if self.service and self.advert is not None and self.advert.service() != advert.service():
            await (await self._mdns.async_unregister_service(self._describe(self.advert, self.service)))
            self.service = ""
        if self.service:
            info = self._describe(advert, self.service)
            told = await self._mdns.async_update_service(info)
        else:
            info = self._describe(advert, advert.service())
            try:
                async with asyncio.timeout(REGISTER_S):
                    told = await self._mdns.async_register_service(info, allow_name_change=True)
            except TimeoutError:
                info = self._describe(advert, advert.service())
                told = await self._mdns.async_register_service(info, cooperating_responders=True)
        self.service, self.advert = info.name, advert
        await told

    def _describe(self, advert: Advert, service: str) -> AsyncServiceInfo:
        return AsyncServiceInfo(
            SERVICE,
            service,
            port=advert.port,
            properties=advert.properties(),
            server=self._server,
            parsed_addresses=sorted(self.addresses)[:MAX_ADDRESSES],
        )

    async def move(self, addresses: Addresses, wanted: Collection[str]) -> None:
        """Switch to these addresses. An address that moved to another interface counts as new."""
        cache = self._mdns.zeroconf.cache
        cache.async_remove_records([each for name in cache.names() for each in cache.entries_with_name(name)])
        same = [a for a in wanted if self.addresses.get(a, addresses[a]) == addresses[a]]
        if len(same) < len(wanted):
            await self._mdns.async_update_interfaces(interfaces=same)
        await self._mdns.async_update_interfaces(interfaces=list(wanted))
        self.addresses, self.wanted, self._server = addresses, wanted, _new_server()

    async def close(self, *, goodbye: bool) -> None:
        """Send a goodbye, which takes 0.3 s, and close everything."""
        await self._stop_browsing()
        if not goodbye:
            registry = self._mdns.zeroconf.registry
            registry.async_remove(registry.async_get_service_infos())
        try:
            await self._mdns.async_close()
        except BaseException:
            self._mdns.zeroconf.close()  # at once, because no socket may outlive this
            raise


# --- announcing and browsing -----------------------------------------------------------------------------

REFRESH_S = 2.0  #: Seconds between two checks of this machine's interfaces.
#: Seconds between two queries for all nodes, in case an announcement was lost.
ASK_AGAIN_S = 60.0
RESOLVE_AT_ONCE = 8
RETRY_LOOK_S = 0.5
CHANGE_S = 0.2  #: Least seconds between two calls of `on_change`, even in a flood of announcements.
CLOSE_S = 2.0
#: More names than any site has Macs. zeroconf keeps them all, and repeats them in its queries.
MAX_NAMES = 512
FIRST_REST_S = 5.0
MAX_REST_S = 60.0
_MAX_COPIES_TOLD = 16


class _PeerSearch:
    def __init__(
        self,
        on_change: Callable[[tuple[DiscoveredPeer, ...]], None],
        say: Callable[[str], None],
        background: Background,
    ) -> None:
        self.sightings = PeerCache()
        self.network: Network | None = None
        self.advert: Advert  #: this node's own
        self._on_change = on_change
        self._announce = say
        self._background = background
        self._asking: set[str] = set()
        self._news = asyncio.Event()
        self._changed = False
        self._told_at = 0.0
        self._copies_reported: dict[str, None] = {}

    def heard(self, service: str, there: bool) -> None:
        if there:
            self.sightings.announced(service, _now())
        else:
            self._changed |= self.sightings.withdrawn(service)
        self._news.set()

    def doubt(self) -> None:
        self.sightings.doubt(_now())
        self._news.set()

    async def run(self) -> None:
        while True:
            self._news.clear()
            self._check_records()
            due = self.sightings.next_due()
            pause_s = None if due is None else max(due - _now(), RETRY_LOOK_S)
            if self._changed and _now() - self._told_at >= CHANGE_S:
                self._changed, self._told_at = False, _now()
                self._on_change(self.sightings.believed)
            elif self._changed:
                pause_s = CHANGE_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._news.wait()

    def _check_records(self) -> None:
        for service in self.sightings.due(_now()):
            if self.network is None:
                self._changed |= self.sightings.failed(service, _now())
            elif service not in self._asking:
                info = info_of(service)
                if info is None:
                    self._resolved(service, Refused("no service"))
                elif self.network.knows(info):
                    self._judge(service, info)
                elif len(self._asking) < RESOLVE_AT_ONCE:
                    self._asking.add(service)
                    self._background.start(self._ask(self.network, service, info), f"asking for {service}")

    async def _ask(self, network: Network, service: str, info: AsyncServiceInfo) -> None:
        try:
            with contextlib.suppress(ZeroconfError):  # the network was closed meanwhile
                if await network.resolve(info):
                    self._judge(service, info)
                else:
                    self._changed |= self.sightings.failed(service, _now())
        finally:
            self._asking.discard(service)
            self._news.set()

    def _judge(self, service: str, info: AsyncServiceInfo) -> None:
        own = self.network.addresses if self.network else {}
        loopback = bool(own) and all(ipaddress.ip_address(address).is_loopback for address in own)
        verdict = validate(service, info.properties, info.addresses, info.port, loopback=loopback)
        if isinstance(verdict, Refused) or verdict.node_id != self.advert.node_id:
            self._resolved(service, verdict)
        elif self.network is None or not self.network.service:  # our own name is not known yet
            self._changed |= self.sightings.failed(service, _now())
        else:
            if is_copy(service, verdict, self.network.service, own):
                self._report_copy(verdict)
            self._resolved(service, Refused("our own"))

    def _resolved(self, service: str, verdict: DiscoveredPeer | Refused) -> None:
        self._changed |= self.sightings.resolved(service, verdict, _now())

    def _report_copy(self, sighting: DiscoveredPeer) -> None:
        where = ", ".join(sighting.addresses)
        if where not in self._copies_reported and len(self._copies_reported) < _MAX_COPIES_TOLD:
            self._copies_reported[where] = None
            self._announce(
                f"{sighting.name!r} at {where} announces the id of this node, {sighting.node_id}: was the "
                "folder of mlxtp copied from one Mac to the other? Remove it on one of them."
            )


class Discovery:
    """Announcer and browser of this node. After a failure it reports the problem and tries again.

    `on_change` gets all accepted sightings; `say` gets a sentence for the user when something must be fixed,
    or works again. Everything runs in the event loop that called `start`.
    """

    def __init__(
        self,
        on_change: Callable[[tuple[DiscoveredPeer, ...]], None],
        say: Callable[[str], None],
        read_addresses: Callable[[], Addresses] = addresses_up,
    ) -> None:
        self.problem = ""
        self._announce = say
        self._read_addresses = read_addresses
        self._only: tuple[str, ...] = ()
        self._background = Background()
        self._search = _PeerSearch(on_change, say, self._background)
        self._hurry = asyncio.Event()
        self._until_flooded: asyncio.Timeout
        self._leaving = False
        self._rests = 0

    async def start(self, advert: Advert, addresses: Sequence[str] = ()) -> None:
        """Start on these addresses, or by default on all that are up, except loopback."""
        self._search.advert = advert
        self._only = tuple(addresses)
        self._background.start(self._keep_open(), "discovery")
        self._background.start(self._search.run(), "the search for other Macs")

    def update(self, advert: Advert) -> None:
        self._search.advert = advert
        self._hurry.set()

    def refresh(self) -> None:
        self._hurry.set()

    async def close(self) -> None:
        self._leaving = True
        await self._background.close()
        await self._shut()

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
        there = self._read_addresses()
        if self._only:
            usable = {address: there[address] for address in self._only if address in there}
        else:
            usable = {a: number for a, number in there.items() if not ipaddress.ip_address(a).is_loopback}
        if not usable:
            lacking = " or ".join(self._only) or "an IPv4 address"
            raise OSError(f"no network interface of this machine that is up has {lacking}")
        wanted = announcing_addresses(usable)
        network = self._search.network
        if network is None:
            send_something(wanted)
            network = self._search.network = Network(usable, wanted, self._heard)
            await network.ask()
            await network.announce(self._search.advert)
        elif (network.addresses, network.wanted) != (usable, wanted):
            send_something(wanted)
            await network.move(usable, wanted)
            self._search.doubt()
            await network.ask()
            await network.announce(self._search.advert)
        elif network.advert != self._search.advert:
            await network.announce(self._search.advert)
        elif _now() - network.asked_at >= ASK_AGAIN_S:
            send_something(wanted)
            await network.ask()
            self._rests = 0

    async def _rest(self) -> None:
        """Leave the network for a while, and free zeroconf's memory."""
        pause_s = Backoff(FIRST_REST_S, MAX_REST_S).after(self._rests)
        self._rests += 1
        await self._shut(goodbye=False)
        self._report(
            f"{MAX_NAMES} names were announced as {SERVICE}: some device floods this network. Discovery is "
            f"paused for {pause_s:g} s. Links and --peer do not depend on it."
        )
        await asyncio.sleep(pause_s)

    async def _shut(self, *, goodbye: bool = True) -> None:
        network, self._search.network = self._search.network, None
        if network is not None:
            # On a network that is gone, a goodbye fails.
            with contextlib.suppress(OSError, ZeroconfError):
                async with asyncio.timeout(CLOSE_S):
                    await network.close(goodbye=goodbye)

    def _heard(self, service: str, there: bool) -> None:
        self._search.heard(service, there)
        network = self._search.network
        if network is not None and network.names >= MAX_NAMES and not self._leaving:
            self._leaving = True
            self._until_flooded.reschedule(_now())

    def _report(self, problem: str) -> None:
        if problem != self.problem:
            self._announce(problem or "other Macs can be found by multicast again")
            self.problem = problem


def _now() -> float:
    return asyncio.get_running_loop().time()
