"""Multicast DNS on this machine's interfaces, by python-zeroconf. Only `discovery/mdns.py` uses it."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Callable, Mapping
from typing import Any

import psutil
from zeroconf import BadTypeInNameException, IPVersion, ServiceStateChange
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from .peer_cache import MAX_ADDRESSES, SERVICE, Advert

RESOLVE_S = 3.0
#: Seconds. The check that a name is free takes 0.7 s, unless other devices claim one name after the other.
REGISTER_S = 5.0
_GROUP = ("224.0.0.251", 9)  #: The group of multicast DNS, at the discard port.

Addresses = Mapping[str, int]  #: IPv4 addresses of this machine, each with the number of its interface.


def addresses_up() -> Addresses:
    """Return the IPv4 addresses of this machine's interfaces that are up and have a carrier."""
    states = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        if name in states and states[name].isup:
            with contextlib.suppress(OSError):  # the interface has just gone
                number = socket.if_nametoindex(name)
                found.update({entry.address: number for entry in entries if entry.family == socket.AF_INET})
    return found


def send_something(addresses: Addresses) -> None:
    """Test that this process may send to the group from at least one of these addresses.

    zeroconf only logs errors of its sends. Raises the OSError of the first address if none may send.
    """
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
    """Return an empty description to be filled from records; None if the name is no valid service name."""
    try:
        return AsyncServiceInfo(SERVICE, service)
    except BadTypeInNameException:
        return None


def _new_server() -> str:
    """Return a name for a set of addresses that was never used before.

    With a used name, other nodes would mix these addresses with our former ones, or with those of a copy of
    this node.
    """
    return f"mlxtp-{secrets.token_hex(8)}.local."


class Network:
    """Sockets on these addresses, a browser, and our own service once it is announced.

    `heard` is called with each full name and True if it is there now. `names` counts them since the last
    `ask`. Methods raise OSError and zeroconf's errors. Made and used in one event loop.
    """

    def __init__(self, addresses: Addresses, heard: Callable[[str, bool], None]) -> None:
        self.addresses = addresses
        self.advert: Advert | None = None
        self.service = ""
        self.asked_at = 0.0
        self.names = 0
        self._heard = heard
        self._server = _new_server()
        self._mdns = AsyncZeroconf(interfaces=list(addresses), ip_version=IPVersion.V4Only)
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
        """Fill `info` from cached records, if there are any; return True if it is filled."""
        return info.load_from_cache(self._mdns.zeroconf)

    async def resolve(self, info: AsyncServiceInfo) -> bool:
        """Request its records and fill `info`; return True if they came within 3 s."""
        return await info.async_request(self._mdns.zeroconf, RESOLVE_S * 1000)

    async def announce(self, advert: Advert) -> None:
        """Announce to all nodes, three times within 0.5 s, after a check that the name is free."""
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

    async def move(self, addresses: Addresses) -> None:
        """Use these addresses from now on, and forget the records that came by others.

        An address that is on another interface than before counts as new.
        """
        cache = self._mdns.zeroconf.cache
        cache.async_remove_records([each for name in cache.names() for each in cache.entries_with_name(name)])
        same = {a: number for a, number in addresses.items() if self.addresses.get(a, number) == number}
        if len(same) < len(addresses):
            await self._mdns.async_update_interfaces(interfaces=list(same))
        await self._mdns.async_update_interfaces(interfaces=list(addresses))
        self.addresses, self._server = addresses, _new_server()

    async def close(self, *, goodbye: bool) -> None:
        """Send a goodbye, which takes 0.3 s, and close everything."""
        await self._stop_browsing()
        if not goodbye:
            registry = self._mdns.zeroconf.registry
            registry.async_remove(registry.async_get_service_infos())
        try:
            await self._mdns.async_close()
        except BaseException:
            self._mdns.zeroconf.close()  # at once: no socket may outlive this
            raise
