"""The HTTP endpoint of one agent: where it listens, who may use it, and under which names."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ..config import Settings, is_host_name, is_loopback
from ..errors import ConfigError
from .api_keys import KeyFile
from .auth import KeyRing
from .guard import Access
from .https_certificates import OWN_CERTIFICATE, Tls, here_and_now, own_tls, renewed, tls_of_files
from .server import bind

log = logging.getLogger(__name__)

NEVER = "never"
RENEWAL_S = 3600.0
"""How often an agent looks whether its own certificate still holds long enough."""


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """What the certificate that an agent makes for itself is for, and the home that keeps it."""

    home: Path
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    needed: tuple[str, ...]
    """Those that it cannot do without. The others, which this Mac found, come and go with the network."""


@dataclass(slots=True)
class Endpoint:
    """Listens already; nobody answers yet. `keys` is None where none are ever asked for."""

    sock: socket.socket
    url: str
    """For programs on this Mac, such as http://127.0.0.1:52415."""
    summary: str
    """The same for people and other Macs: an address that others reach, if there is one."""
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keys: KeyRing | None = None
    tls: Tls | None = None
    own: OwnCertificate | None = None
    """What its certificate is for, if it makes that itself."""

    @property
    def certificate(self) -> str:
        """What clients are shown by HTTPS, as PEM; empty for HTTP."""
        return self.tls.certificate if self.tls is not None else ""

    def access(self, own_key: str) -> Access:
        """Who may use it. This Mac's own commands have `own_key`."""
        if self.keys is not None:
            self.keys.own_key = own_key
        return Access(self.hosts, self.origins, self.keys)

    def renew(self, now: datetime) -> bool:
        """Whether there is another certificate now, as the one of its own came to its end.

        Raises ConfigError when it cannot be made.
        """
        if self.tls is None or self.own is None:
            return False
        before, own = self.tls, self.own
        self.tls = renewed(before, own.home, own.names, own.addresses, now)
        if self.tls is before:
            return False
        log.info("HTTPS goes on with a certificate whose SHA-256 is %s", self.tls.fingerprint)
        return True

    async def keep_certificate(self, tell: Callable[[str], None]) -> None:
        """For as long as it serves: `tell` gets each certificate (PEM) that takes the place of another."""
        while self.own is not None:
            await asyncio.sleep(RENEWAL_S)
            try:
                if self.renew(here_and_now()):
                    tell(self.certificate)
            except (ConfigError, OSError) as error:  # ssl's errors are OSErrors
                log.error("the certificate for HTTPS is not renewed: %s", error)


@contextlib.contextmanager
def open_endpoint(settings: Settings) -> Iterator[Endpoint]:
    """Listen, until the context ends. Says in the log what others can do there.

    Raises ConfigError for an address that cannot be had, and for keys or certificates that cannot be used.
    """
    with contextlib.closing(bind(settings.http_host, settings.http_port)) as sock:
        host, port = sock.getsockname()[:2]
        beyond = not is_loopback(host)
        addresses = addresses_here() if beyond else ()
        own = None if settings.http_cert or not settings.http_tls else _own(settings, host, addresses)
        tls = _tls(settings, own)
        scheme = "http" if tls is None else "https"
        url = _url(scheme, _local(host), port)
        keys = None
        if settings.api_keys != NEVER:
            keys = KeyRing(KeyFile(settings.home), settings.api_keys, beyond=beyond)
        names = names_here(socket.gethostname()) if beyond else ()
        told = url
        if addresses and _local(host) != host:
            told = _url(scheme, _reached(names, addresses, tls if own is not None else None), port)
        hosts = (*names, *settings.allowed_hosts)
        endpoint = Endpoint(sock, url, told, hosts, settings.allowed_origins, keys, tls, own)
        _announce(endpoint, settings.home, beyond=beyond)
        yield endpoint


def names_here(host_name: str) -> tuple[str, ...]:
    """The names that a Mac with this host name has on its network: its own, and the one of Bonjour."""
    name = host_name.lower().removesuffix(".")
    label = name.partition(".")[0]
    return tuple(dict.fromkeys(filter(is_host_name, (name, label, f"{label}.local"))))


def addresses_here() -> tuple[str, ...]:
    """The IPv4 addresses of this machine that others reach and that last: no loopback, none self-assigned."""
    import psutil

    found = [
        ipaddress.IPv4Address(each.address)
        for interface in psutil.net_if_addrs().values()
        for each in interface
        if each.family == socket.AF_INET
    ]
    return tuple(str(each) for each in found if not each.is_loopback and not each.is_link_local)


def _tls(settings: Settings, own: OwnCertificate | None) -> Tls | None:
    if settings.http_cert:
        return tls_of_files(settings.http_cert, settings.http_key, here_and_now())
    return None if own is None else own_tls(own.home, own.names, own.addresses, here_and_now(), own.needed)


def _own(settings: Settings, host: str, addresses: tuple[str, ...]) -> OwnCertificate:
    names, numbers = ["localhost"], ["127.0.0.1", "::1"]
    if _local(host) == host:
        numbers.append(host.partition("%")[0])
    for each in settings.allowed_hosts:
        try:
            numbers.append(str(ipaddress.ip_address(each)))
        except ValueError:
            names += [each] if each != "*" else []
    found = () if is_loopback(host) else names_here(socket.gethostname())
    return OwnCertificate(
        settings.home,
        tuple(dict.fromkeys((*found, *names))),
        tuple(dict.fromkeys((*numbers, *addresses))),
        (*names, *numbers),
    )


def _reached(names: tuple[str, ...], addresses: tuple[str, ...], tls: Tls | None) -> str:
    """Where others reach this Mac: an address, or where its certificate is for none, the name of Bonjour."""
    if tls is None:
        return addresses[0]
    known = (each for each in (*addresses, *reversed(names)) if each in tls.names)
    return next(known, addresses[0])


def _announce(endpoint: Endpoint, home: Path, *, beyond: bool) -> None:
    if endpoint.tls is not None:
        log.info(
            "HTTPS at %s, with a certificate whose SHA-256 is %s", endpoint.summary, endpoint.tls.fingerprint
        )
        if endpoint.own is not None:
            log.info("clients have to trust %s", home / OWN_CERTIFICATE)
            if missing := {*endpoint.own.names, *endpoint.own.addresses} - endpoint.tls.names:
                log.info(
                    "it is not for %s, as which this Mac is known now; naming that by --allowed-host makes "
                    "another one, which has to be trusted anew",
                    ", ".join(sorted(missing)),
                )
    if not beyond:
        return
    if endpoint.keys is None:
        log.warning(
            "whoever reaches %s can use it: --api-keys never asks nobody for a key. Leave it away, or use "
            "--http 127.0.0.1:52415",
            endpoint.summary,
        )
    elif not endpoint.keys.names:
        log.warning(
            "%s asks other machines for an API key, and there is none yet, so nobody is answered: "
            "`mlxtp key create NAME --home %s` makes one",
            endpoint.summary,
            f"'{home}'",
        )
    if endpoint.tls is None:
        log.warning(
            "%s is plain HTTP: whoever is on the network can read prompts, answers and keys. --http-tls, or "
            "--http-cert with --http-key, encrypts it",
            endpoint.summary,
        )


def _local(host: str) -> str:
    """Where programs on this Mac connect to what listens at `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{host} is no address") from None
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
