"""Certificates (DER) of a cluster: made, read and judged. Bytes in, bytes out; no file, no clock.

An authority certifies for each member that a P-256 key belongs to a node id. Only one name is read, a URI:
`mlxtp:cluster:CLUSTER` or `mlxtp:node:CLUSTER:NODE`. `identity/validity.py` judges a member's end by the
cluster's time, as a Mac whose clock is wrong by years must not lose its cluster.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
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

from ..errors import Code, ProtocolError

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey
_ECDSA = ec.ECDSA(hashes.SHA256())

AUTHORITY_HASH_BYTES = 16
VALID_FROM = datetime(1970, 1, 1, tzinfo=UTC)
VALID_UNTIL = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  #: RFC 5280's value for "no end"
_FOREVER = VALID_UNTIL.timestamp()
#: Seconds by which a certificate begins before it is made, for an mlxtp that looks at the time by itself.
_EARLIER_S = 86_400

_CLUSTER_URI = re.compile(r"mlxtp:cluster:([0-9a-f]{16})")
_NODE_URI = re.compile(r"mlxtp:node:([0-9a-f]{16}):([0-9a-f]{32})")

_USES = (
    "digital_signature", "key_cert_sign", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
#: Errors of the parser for bytes that are no certificate, or none of ours.
_UNREADABLE = (
    ValueError,
    TypeError,
    InvalidSignature,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Identity in a member's certificate."""

    node_id: str
    cluster_id: str
    fingerprint: str  #: of its key, as in `fingerprint`
    ends: float = field(default=0.0, compare=False)  #: time in seconds since 1970
    signer: str = field(default="", compare=False)  #: `key_id` of the authority, as the certificate says


@dataclass(frozen=True, slots=True)
class MemberCertificates:
    """Certificates of a member and of its cluster's authority. `identity/validity.py` replaces them."""

    certificate: bytes
    authority: bytes
    former: bytes = b""  #: the authority before, as long as its certificates count
    cross: bytes = b""  #: of this authority's key, by the former one
    bridge: bytes = b""  #: of the key that signed `certificate`, if neither of these authorities did
    past: tuple[bytes, ...] = ()  #: of keys of earlier authorities, each by its successor, the latest first

    @property
    def cluster_id(self) -> str:
        """Cluster id, 16 hex digits. Raises ProtocolError as `cluster_of` does."""
        return cluster_of(self.authority)

    @property
    def moved(self) -> bool:
        """True if the present authority signed the certificate."""
        return read_node(self.certificate).signer == key_id(self.authority)

    def to_pem(self) -> bytes:
        """Return a member's file. TLS shows all of it; what leads to the former authority comes first."""
        parts = (self.certificate, self.bridge, self.cross, self.authority, self.former, *self.past)
        return certificates_to_pem(*filter(None, parts))

    @classmethod
    def from_pem(cls, pem: bytes) -> MemberCertificates:
        """Return the content of such a file. Raises ValueError for anything else."""
        certificate, *others = certificates_from_pem(pem)
        roots = [each for each in others if _signed_itself(each)]
        if not 1 <= len(roots) <= 2:
            raise ValueError(f"it holds {len(roots)} certificates of authorities instead of 1 or 2")
        leading = others[: others.index(roots[0])]
        crosses = [each for each in leading if key_id(each) == key_id(roots[0])]
        bridges = [each for each in leading if each not in crosses]
        former, cross, bridge = (b"".join(each[-1:]) for each in (roots[1:], crosses, bridges))
        past = tuple(each for each in others[len(leading) :] if each not in roots)
        return cls(certificate, roots[0], former, cross, bridge, past)


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate and key of a cluster's authority."""

    certificate: bytes
    key: PrivateKey = field(repr=False)

    def certify(self, node_id: str, key: PublicKey, at: float, life_s: float) -> bytes:
        """Return a certificate of `key` for both ends of TLS, made `at` a time in seconds since 1970."""
        cluster_id = cluster_of(self.certificate)
        issuer = self.key.public_key()
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(f"mlxtp node {node_id}", key, _time(at - _EARLIER_S), _time(at + life_s))
            .issuer_name(_name(f"mlxtp cluster {cluster_id}"))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(_uri(f"mlxtp:node:{cluster_id}:{node_id}"), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.DER)

    def vouch(self, authority: bytes, at: float = 0.0, until: float = _FOREVER) -> bytes:
        """Return a certificate for the key of another authority of this cluster.

        It holds from `at` to `until` (seconds since 1970). By their one name, TLS sees a change of keys.
        """
        builder = _authority_builder(cluster_of(authority), authority_key(authority), _time(at), _time(until))
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = builder.add_extension(issuer, critical=False)
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.DER)


def found(cluster_id: str, key: PrivateKey) -> Authority:
    """Create an authority of a cluster, its certificate signed by itself."""
    builder = _authority_builder(cluster_id, key.public_key(), VALID_FROM, VALID_UNTIL)
    return Authority(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER), key)


def authority_of(certificate: bytes, key: PrivateKey) -> Authority:
    """Return the authority with this certificate and key.

    Raises ProtocolError (NOT_AUTHENTIC) if it is no authority's, or the two do not belong together.
    """
    cluster_of(certificate)
    if fingerprint(authority_key(certificate)) != fingerprint(key.public_key()):
        raise _not_authentic("the authority's certificate and key do not belong together")
    return Authority(certificate, key)


def new_key() -> PrivateKey:
    """Return a fresh P-256 key, drawn by OpenSSL."""
    return ec.generate_private_key(ec.SECP256R1())


# --- reading and judging ---------------------------------------------------------------------------------
# What reads a certificate raises ProtocolError (NOT_AUTHENTIC) for any other, but for `authority_key`.


def check_node(certificate: bytes, authority: bytes) -> NodeIdentity:
    """Return the identity in `certificate`, signed by `authority`, which the caller trusts.

    Only the signature is read of a certificate that `authority` did not sign.
    """
    return _signed(certificate, authority, cluster_of(authority))


def check_member(held: MemberCertificates) -> NodeIdentity:
    """Return the identity in a member's own certificate, signed by an authority that its file names."""
    signer = read_node(held.certificate).signer
    others = (each for each in (held.former, held.bridge) if each and key_id(each) == signer)
    return _signed(held.certificate, next(others, held.authority), held.cluster_id)


def _signed(certificate: bytes, by: bytes, cluster_id: str) -> NodeIdentity:
    try:
        _parsed(certificate).verify_directly_issued_by(_parsed(by))
    except _UNREADABLE:
        fault = f"the certificate was not made by the authority of cluster {cluster_id}"
        raise _not_authentic(fault) from None
    node = read_node(certificate)
    if node.cluster_id != cluster_id:
        raise _not_authentic(f"the certificate is for cluster {node.cluster_id}, not {cluster_id}")
    return node


def read_node(certificate: bytes) -> NodeIdentity:
    """Return the identity in a member's certificate. The caller decides whether to trust it."""
    try:
        parsed = _parsed(certificate)
        names = _NODE_URI.fullmatch(_uri_of(parsed))
        key = parsed.public_key()
        signer = _signer_of(parsed)
    except _UNREADABLE:
        names = None
    if names is None or not isinstance(key, PublicKey):
        raise _not_authentic("the certificate is not that of a node")
    ends = parsed.not_valid_after_utc.timestamp()
    return NodeIdentity(names[2], names[1], fingerprint(key), ends, signer)


def cluster_of(authority: bytes) -> str:
    """Return the cluster id in an authority's certificate, which must have signed itself."""
    return _authority_by(authority, authority, "the certificate is not that of a cluster's authority")[0]


def vouched(certificate: bytes, by: bytes, cluster_id: str) -> tuple[float, float]:
    """Return from and until when (seconds since 1970) the authority `by` vouches for another one."""
    fault = "the former authority did not sign the certificate of this one"
    found, parsed = _authority_by(certificate, by, fault)
    if found != cluster_id:
        raise _not_authentic(fault)
    return parsed.not_valid_before_utc.timestamp(), parsed.not_valid_after_utc.timestamp()


def _authority_by(certificate: bytes, by: bytes, fault: str) -> tuple[str, x509.Certificate]:
    """Return the cluster id in an authority's certificate that `by` signed, and the certificate."""
    try:
        parsed = _parsed(certificate)
        names = _CLUSTER_URI.fullmatch(_uri_of(parsed))
        parsed.verify_directly_issued_by(_parsed(by))
        signs = parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        if names is not None and signs and isinstance(parsed.public_key(), PublicKey):
            return names[1], parsed
    except _UNREADABLE:
        pass
    raise _not_authentic(fault)


def key_id(authority: bytes) -> str:
    """Return the id of the key in an authority's certificate. Certificates name their signer by it."""
    try:
        return x509.SubjectKeyIdentifier.from_public_key(authority_key(authority)).digest.hex()
    except (AssertionError, *_UNREADABLE):
        raise _not_authentic("the certificate is not that of a cluster's authority") from None


def fingerprint(key: PublicKey) -> str:
    """Return SHA-256 of a public key (its SubjectPublicKeyInfo), as 64 hex digits."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def authority_key(authority: bytes) -> PublicKey:
    """Return the public key in an authority's certificate, which `cluster_of` has judged.

    Raises ValueError for unreadable bytes, AssertionError for a key of another kind.
    """
    key = _parsed(authority).public_key()
    assert isinstance(key, PublicKey)
    return key


def sign(key: PrivateKey, label: bytes, *parts: bytes) -> bytes:
    """Sign the parts together (ECDSA with SHA-256, DER). `label` names the purpose."""
    return key.sign(label + hash_of(*parts), _ECDSA)


def is_signed(key: PublicKey, signature: bytes, label: bytes, *parts: bytes) -> bool:
    """Return True if `sign` made this signature over the same label and parts with that key."""
    try:
        key.verify(signature, label + hash_of(*parts), _ECDSA)
    except InvalidSignature:
        return False
    return True


def hash_of(*parts: bytes) -> bytes:
    """Return 32 bytes that identify these parts, in this order."""
    return hashlib.sha256(b"".join(len(part).to_bytes(4, "big") + part for part in parts)).digest()


def authority_hash(authority: bytes) -> bytes:
    """Return the hash in a join token: 16 bytes of SHA-256 of the authority's certificate."""
    return hashlib.sha256(authority).digest()[:AUTHORITY_HASH_BYTES]


# --- keys and certificates as bytes -------------------------------------------------------------------


def point_of(key: PublicKey) -> bytes:
    """Return the key as a point of 65 bytes."""
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def key_at(point: bytes) -> PublicKey:
    """Return the key of such a point. Raises ValueError for one that is not on the curve."""
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)


def key_to_pem(key: PrivateKey) -> bytes:
    """Return the private key as PKCS 8, not encrypted."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_from_pem(pem: bytes) -> PrivateKey:
    """Return the first private key in `pem`. Raises ValueError when there is none, or none on P-256."""
    try:
        key = load_pem_private_key(pem, password=None)
    except _UNREADABLE:
        raise ValueError("there is no private key in it that can be read") from None
    if not isinstance(key, PrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("its private key is not one on the curve P-256")
    return key


def certificates_to_pem(*certificates: bytes) -> bytes:
    return b"".join(_parsed(each).public_bytes(Encoding.PEM) for each in certificates)


def certificates_from_pem(pem: bytes) -> list[bytes]:
    """Return the certificates in a PEM text, in order. Raises ValueError when there is none."""
    try:
        return [parsed.public_bytes(Encoding.DER) for parsed in x509.load_pem_x509_certificates(pem)]
    except _UNREADABLE:
        raise ValueError("there is no certificate in it that can be read") from None


def _parsed(certificate: bytes) -> x509.Certificate:
    return x509.load_der_x509_certificate(certificate)


def _signed_itself(certificate: bytes) -> bool:
    try:
        _parsed(certificate).verify_directly_issued_by(_parsed(certificate))
    except _UNREADABLE:
        return False
    return True


def _signer_of(certificate: x509.Certificate) -> str:
    found = certificate.extensions.get_extension_for_class(x509.AuthorityKeyIdentifier).value.key_identifier
    return (found or b"").hex()


def _authority_builder(
    cluster_id: str, key: PublicKey, valid_from: datetime, valid_until: datetime
) -> x509.CertificateBuilder:
    name = f"mlxtp cluster {cluster_id}"
    return (
        _builder(name, key, valid_from, valid_until)
        .issuer_name(_name(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign"), critical=True)
        .add_extension(_uri(f"mlxtp:cluster:{cluster_id}"), critical=False)
    )


def _builder(
    subject: str, key: PublicKey, valid_from: datetime, valid_until: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(valid_from)
        .not_valid_after(valid_until)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _time(seconds: float) -> datetime:
    """Return a time in seconds since 1970 as certificates have it: whole seconds, up to the year 9999."""
    return datetime.fromtimestamp(min(max(int(seconds), 0), _FOREVER), UTC)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _uri(text: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(text)])


def _uri_of(certificate: x509.Certificate) -> str:
    """Return the only name in a certificate, or an empty string where there are others."""
    names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    return str(names[0].value) if len(names) == 1 else ""


def _usage(use: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{each: each == use for each in _USES})


def _not_authentic(detail: str) -> ProtocolError:
    return ProtocolError(detail, Code.NOT_AUTHENTIC)
