"""The HTTP endpoint of one agent: its addresses and names, and who may use it."""

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
RENEWAL_S = 3600.0  # seconds between two checks of the agent's own certificate


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """Names and addresses for the certificate that an agent makes for itself, and the home that keeps it."""

    home: Path
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    #: Names and addresses that it must have. The others, which this Mac found, change with the network.
    needed: tuple[str, ...]


@dataclass(slots=True)
class Endpoint:
    """A listening socket, without a server yet. `keys` is None where none are ever required."""

    sock: socket.socket
    url: str  # for programs on this Mac, such as http://127.0.0.1:52415
    summary: str  # URL for users and other Macs, with an address that others reach, if there is one
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    keys: KeyRing | None = None
    tls: Tls | None = None
    own: OwnCertificate | None = None  # content of its certificate, if the agent makes one itself

    @property
    def certificate(self) -> str:
        """Certificate for HTTPS clients, as PEM; empty for HTTP."""
        return self.tls.certificate if self.tls is not None else ""

    def access(self, own_key: str) -> Access:
        """Return the rules of access. This Mac's own commands have `own_key`."""
        if self.keys is not None:
            self.keys.own_key = own_key
        return Access(self.hosts, self.origins, self.keys)

    def renew(self, now: datetime) -> bool:
        """Replace the agent's own certificate if it is about to expire. Return True if so.

        Raises ConfigError when it cannot be made.
        """
        if self.tls is None or self.own is None:
            return False
        before, own = self.tls, self.own
        self.tls = renewed(before, own.home, own.names, own.addresses, now)
        if self.tls is before:
            return False
        log.info("renewed the certificate for HTTPS; its SHA-256 is %s", self.tls.fingerprint)
        return True

    async def keep_certificate(self, tell: Callable[[str], None]) -> None:
        """Renew the certificate while the agent serves. `tell` receives each new certificate (PEM)."""
        while self.own is not None:
            await asyncio.sleep(RENEWAL_S)
            try:
                if self.renew(here_and_now()):
                    tell(self.certificate)
            except (ConfigError, OSError) as error:  # ssl's errors are OSErrors
                log.error("the certificate for HTTPS is not renewed: %s", error)


@contextlib.contextmanager
def open_endpoint(settings: Settings) -> Iterator[Endpoint]:
    """Listen, until the context ends. Log the addresses, and what other machines can do there.

    Raises ConfigError for an address that is not available, and for keys or certificates that cannot be used.
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
    """Return the names of a Mac with this host name on its network: its own, and the one of Bonjour."""
    name = host_name.lower().removesuffix(".")
    label = name.partition(".")[0]
    return tuple(dict.fromkeys(filter(is_host_name, (name, label, f"{label}.local"))))


def addresses_here() -> tuple[str, ...]:
    """Return the lasting IPv4 addresses that other machines reach: no loopback, no self-assigned ones."""
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
    """Return the address or name for other machines; a self-signed certificate decides."""
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
                    "it is not for %s, as which this Mac is known now; to cover it, pass --allowed-host; "
                    "clients then have to trust the new certificate",
                    ", ".join(sorted(missing)),
                )
    if not beyond:
        return
    if endpoint.keys is None:
        log.warning(
            "anyone who reaches %s can use it, because of --api-keys never. Remove that setting, or use "
            "--http 127.0.0.1:52415",
            endpoint.summary,
        )
    elif not endpoint.keys.names:
        log.warning(
            "%s requires an API key of other machines, and there is none yet, so all are refused: "
            "`mlxtp key create NAME --home %s` makes one",
            endpoint.summary,
            f"'{home}'",
        )
    if endpoint.tls is None:
        log.warning(
            "%s is plain HTTP: anyone on the network can read prompts, answers and keys. --http-tls, or "
            "--http-cert with --http-key, encrypts it",
            endpoint.summary,
        )


def _local(host: str) -> str:
    """Return the host at which programs on this Mac connect to a listener at `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{host} is not an IP address") from None
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
