"""The HTTP endpoint of one agent: its addresses and names, its certificate, and who may use it.

The certificate for HTTPS is read from files, or this Mac signs its own, unrelated to the cluster's.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..config import Settings, is_host_name, is_loopback
from ..errors import ConfigError, in_words
from ..identity.private_files import check_closed, read_private, write_private
from .api_keys import KeyFile, KeyRing
from .guard import Access
from .server import bind

log = logging.getLogger(__name__)

# --- certificates ----------------------------------------------------------------------------------------


OWN = "https.pem"  # in the home: the certificate that this Mac signs, with its key
OWN_CERTIFICATE = "https-cert.pem"  # the certificate alone, for clients to trust
VALID = timedelta(days=397)  # Some systems reject certificates that are valid for longer than 398 days.
RENEW = VALID / 10
_EARLIER = timedelta(days=1)  # Validity begins a day ago, since clocks differ.
_UNREADABLE = (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.ExtensionNotFound)


@dataclass(frozen=True, slots=True)
class Tls:
    """HTTPS of the endpoint. `certificate` is for clients, as PEM."""

    context: ssl.SSLContext
    certificate: str

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, as browsers show it: 32 pairs of hex digits with colons."""
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate)).hexdigest().upper()
        return ":".join(digest[i : i + 2] for i in range(0, len(digest), 2))

    @property
    def names(self) -> frozenset[str]:
        return _names(x509.load_pem_x509_certificate(self.certificate.encode()))


def tls_of_files(certificate: str, key: str, now: datetime) -> Tls:
    """Load PEM files: the certificate, followed by its chain, and its private key. Raises ConfigError."""
    try:
        chain = x509.load_pem_x509_certificates(_read(certificate, "http-cert"))
    except _UNREADABLE:
        raise ConfigError(
            f"--http-cert {certificate}: there is no certificate in it that can be read; it has to be PEM, "
            f"which begins with -----BEGIN CERTIFICATE-----"
        ) from None
    try:
        private = load_pem_private_key(_read_key(key), password=None)
    except TypeError:
        raise ConfigError(
            f"--http-key {key}: the key has a password, and mlxtp does not prompt for it; write it "
            f"without one, such as by: openssl pkey -in '{key}' -out plain.pem"
        ) from None
    except _UNREADABLE:
        raise ConfigError(
            f"--http-key {key}: there is no private key in it that can be read; it has to be PEM, which "
            f"begins with -----BEGIN PRIVATE KEY-----"
        ) from None
    spki = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if chain[0].public_key().public_bytes(*spki) != private.public_key().public_bytes(*spki):
        raise ConfigError(
            f"--http-key {key} is not the private key of the certificate in {certificate}; name two files "
            f"that belong together (the certificate of this server has to be the first in its file)"
        )
    if when := _not_valid(chain[0], now):
        log.warning("the certificate in %s %s; clients will refuse it", certificate, when)
    return Tls(_context(certificate, key), chain[0].public_bytes(Encoding.PEM).decode())


def own_tls(
    home: Path,
    names: Sequence[str],
    addresses: Sequence[str],
    now: datetime,
    needed: Sequence[str] | None = None,
) -> Tls:
    """Load the home's certificate, or make one for these host names and addresses.

    Clients have to trust each new one, so it is made only if the present one lacks `needed` names, by default
    all. It keeps the key. Raises ConfigError if the home is not writable or other users can read the key.
    """
    needed = (*names, *addresses) if needed is None else needed
    certificate = _own_certificate(home, names, addresses, now, needed)
    if read_private(home / OWN_CERTIFICATE) != certificate:
        write_private(home / OWN_CERTIFICATE, certificate)
    return Tls(_context(str(home / OWN), str(home / OWN)), certificate.decode())


def renewed(tls: Tls, home: Path, names: Sequence[str], addresses: Sequence[str], now: datetime) -> Tls:
    """Return `tls` while it is valid; else one with a new certificate, which new connections use at once.

    Raises ConfigError as `own_tls` does; then `tls` keeps its certificate.
    """
    certificate = _own_certificate(home, names, addresses, now, ())
    if certificate.decode() == tls.certificate:
        return tls
    write_private(home / OWN_CERTIFICATE, certificate)
    tls.context.load_cert_chain(home / OWN, password=b"")
    return Tls(tls.context, certificate.decode())


def _own_certificate(
    home: Path, names: Sequence[str], addresses: Sequence[str], now: datetime, needed: Sequence[str]
) -> bytes:
    """Return the home's certificate as PEM, a new one if the present one is not usable."""
    if_read = f"remove it together with {OWN_CERTIFICATE}, for another one"
    pem = read_private(home / OWN, if_read) or b""
    if why := why_new(pem, needed, now):
        pem = make(names, addresses, now, _key(pem))
        write_private(home / OWN, pem)
        log.info("a certificate was made for %s: %s", ", ".join([*names, *addresses]), why)
    return x509.load_pem_x509_certificate(pem).public_bytes(Encoding.PEM)


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey | None:
    """Return the key if it is of the kind that `make` uses."""
    try:
        key = load_pem_private_key(pem, password=None)
    except _UNREADABLE:
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def why_new(pem: bytes, needed: Sequence[str], now: datetime) -> str:
    """Return the reason to replace the certificate in `pem`; empty while it covers what is `needed`."""
    if not pem:
        return "there was none"
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        key = load_pem_private_key(pem, password=None)
        covered = _names(certificate)
        if certificate.public_key() != key.public_key():
            raise ValueError("they do not belong together")
    except _UNREADABLE:
        return "the old one cannot be used"
    if missing := [each for each in needed if each not in covered]:
        return f"the old one is not for {', '.join(missing)}"
    if when := _not_valid(certificate, now):
        return f"the old one {when}"
    if certificate.not_valid_after_utc - now < RENEW:
        return f"the old one holds until {certificate.not_valid_after_utc:%Y-%m-%d} only"
    return ""


def make(
    names: Sequence[str],
    addresses: Sequence[str],
    now: datetime,
    key: ec.EllipticCurvePrivateKey | None = None,
) -> bytes:
    """Make a self-signed certificate and its key, as PEM. Without `key`, a new one."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"mlxtp on {names[0]}"[:64])])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    alternatives = [
        *map(x509.DNSName, names),
        *(x509.IPAddress(ipaddress.ip_address(address)) for address in addresses),
    ]
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now - _EARLIER + VALID)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_SIGNS_ONLY, critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(identifier, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
    )
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return certificate + key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


_OTHER_USES = (
    "key_cert_sign", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
_SIGNS_ONLY = x509.KeyUsage(digital_signature=True, **dict.fromkeys(_OTHER_USES, False))


def _names(certificate: x509.Certificate) -> frozenset[str]:
    found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = map(str, found.get_values_for_type(x509.IPAddress))
    return frozenset([*found.get_values_for_type(x509.DNSName), *addresses])


def _context(certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # With a password given, OpenSSL refuses an encrypted key instead of prompting at the terminal.
        context.load_cert_chain(certificate, key, password=b"")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{certificate} and {key} cannot be used for HTTPS: {error}") from None
    return context


def _read(path: str, flag: str) -> bytes:
    with in_words(ConfigError, f"--{flag} {path}"):
        return Path(path).read_bytes()


def _read_key(path: str) -> bytes:
    """Read a key. Follows links, because programs that renew certificates use them."""
    pem = _read(path, "http-key")
    check_closed(Path(path), Path(path).stat(), "get another certificate, with another key")
    return pem


def _not_valid(certificate: x509.Certificate, now: datetime) -> str:
    if now > certificate.not_valid_after_utc:
        return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
    if now < certificate.not_valid_before_utc:
        return f"holds from {certificate.not_valid_before_utc:%Y-%m-%d} on only"
    return ""


def here_and_now() -> datetime:
    return datetime.now(UTC)


# --- the endpoint ----------------------------------------------------------------------------------------


NEVER = "never"
RENEWAL_S = 3600.0  # seconds between two checks of the agent's own certificate


@dataclass(frozen=True, slots=True)
class OwnCertificate:
    """Names and addresses for the certificate that an agent makes for itself, and the home that keeps it."""

    home: Path
    names: tuple[str, ...]
    addresses: tuple[str, ...]
    #: Names and addresses that it must have. This Mac found the others, which change with the network.
    needed: tuple[str, ...]


@dataclass(slots=True)
class Endpoint:
    """A listening socket without a server yet. `keys` is None if none are ever required."""

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
        """Replace the agent's own certificate if it is about to expire. Return True if it was replaced."""
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
    """Listen until the context ends. Log the addresses, and whether other machines can use them.

    Raises ConfigError for an address, keys or certificates that cannot be used.
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
    """Return the names of a Mac with this host name on its network: its own and Bonjour's."""
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
    """Return the host for programs on this Mac to connect to a listener at `host`."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        raise ConfigError(f"{host} is not an IP address") from None
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
