"""Certificates of a cluster: made, read and judged. Bytes in, bytes out; no file, no clock.

A cluster has one authority. The Mac that founded the cluster holds its key, and may hand it to others.
The authority certifies, for each member, that a P-256 key belongs to a node id. A certificate names its
subject by one URI, the only name that is read: `mlxtp:cluster:CLUSTER` for the authority,
`mlxtp:node:CLUSTER:NODE` for a member.

A member's certificate has an end, which TLS does not look at: `identity/validity.py` judges it by the
cluster's time. A Mac whose clock is wrong by years, as after an empty battery, must not lose its cluster.
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

#: Errors of the parser for bytes that are no certificate, or none of ours.
_UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    x509.InvalidVersion,
    x509.ExtensionNotFound,
    x509.DuplicateExtension,
    x509.UnsupportedGeneralNameType,
)


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Identity in a member's certificate. `fingerprint` is that of its key, as in `fingerprint`.

    The certificate `ends` at this time, in seconds since 1970. `signer` is the `key_id` of the authority that
    signed it, as the certificate says.
    """

    node_id: str
    cluster_id: str
    fingerprint: str
    ends: float = field(default=0.0, compare=False)
    signer: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class MemberCertificates:
    """Certificates of a member and of its cluster's authority (DER). `identity/validity.py` replaces them.

    `former` is the authority before, as long as its certificates count. `cross` is a certificate of this
    authority's key by that one, `bridge` one of the key that signed `certificate`, if neither of the two
    did. `past` has certificates of the keys of earlier authorities, each by its successor, the latest first.
    """

    certificate: bytes
    authority: bytes
    former: bytes = b""
    cross: bytes = b""
    bridge: bytes = b""
    past: tuple[bytes, ...] = ()

    @property
    def cluster_id(self) -> str:
        """Cluster id, 16 hex digits.

        Raises ProtocolError (NOT_AUTHENTIC) where there is no such authority.
        """
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
        leading, cross, bridge = others[: others.index(roots[0])], b"", b""
        for each in leading:
            if key_id(each) == key_id(roots[0]):
                cross = each
            else:
                bridge = each
        past = tuple(each for each in others[len(leading) :] if each not in roots)
        return cls(certificate, roots[0], b"".join(roots[1:]), cross, bridge, past)


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate (DER) and key of a cluster's authority."""

    certificate: bytes
    key: PrivateKey = field(repr=False)

    def certify(self, node_id: str, key: PublicKey, at: float, life_s: float) -> bytes:
        """Return a certificate (DER) of `key` for `node_id` in this cluster, for both ends of TLS.

        It is made `at` a time in seconds since 1970, and ends `life_s` seconds later.
        """
        cluster_id = cluster_of(self.certificate)
        issuer = self.key.public_key()
        builder = (
            _builder(f"mlxtp node {node_id}", key, _time(at - _EARLIER_S), _time(at + life_s))
            .issuer_name(_name(f"mlxtp cluster {cluster_id}"))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(digital_signature=True), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
            .add_extension(_uri(f"mlxtp:node:{cluster_id}:{node_id}"), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.DER)

    def vouch(self, authority: bytes, at: float = 0.0, until: float = _FOREVER) -> bytes:
        """Return a certificate (DER) by this authority for the key of another one of this cluster.

        It holds from `at` to `until`, in seconds since 1970. Both have one name, so that TLS takes it for a
        change of keys.
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
    """Return the authority with this certificate (DER) and key.

    Raises ProtocolError (NOT_AUTHENTIC) for another certificate than an authority's, and when the two do not
    belong together.
    """
    cluster_of(certificate)
    if fingerprint(authority_key(certificate)) != fingerprint(key.public_key()):
        raise _not_authentic("the authority's certificate and key do not belong together")
    return Authority(certificate, key)


def new_key() -> PrivateKey:
    """Return a fresh P-256 key, drawn by OpenSSL."""
    return ec.generate_private_key(ec.SECP256R1())


# --- reading and judging ------------------------------------------------------------------------------


def check_node(certificate: bytes, authority: bytes) -> NodeIdentity:
    """Return the identity in `certificate` (DER), signed by `authority` (DER), which the caller trusts.

    Raises ProtocolError (NOT_AUTHENTIC) when it is not of that cluster. Only the signature is read of a
    certificate that `authority` did not sign.
    """
    return _signed(certificate, authority, cluster_of(authority))


def check_member(held: MemberCertificates) -> NodeIdentity:
    """Return the identity in a member's own certificate, signed by an authority that its file names.

    Raises ProtocolError (NOT_AUTHENTIC) as `check_node` does.
    """
    signer = read_node(held.certificate).signer
    by = next(
        (each for each in (held.former, held.bridge) if each and key_id(each) == signer), held.authority
    )
    return _signed(held.certificate, by, held.cluster_id)


def _signed(certificate: bytes, by: bytes, cluster_id: str) -> NodeIdentity:
    try:
        x509.load_der_x509_certificate(certificate).verify_directly_issued_by(
            x509.load_der_x509_certificate(by)
        )
    except (InvalidSignature, *_UNREADABLE):
        raise _not_authentic(
            f"the certificate was not made by the authority of cluster {cluster_id}"
        ) from None
    node = read_node(certificate)
    if node.cluster_id != cluster_id:
        raise _not_authentic(f"the certificate is for cluster {node.cluster_id}, not {cluster_id}")
    return node


def read_node(certificate: bytes) -> NodeIdentity:
    """Return the identity in a member's certificate (DER). The caller decides whether to trust it.

    Raises ProtocolError (NOT_AUTHENTIC) for anything that is not the certificate of a node.
    """
    try:
        parsed = x509.load_der_x509_certificate(certificate)
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
    """Return the cluster id in an authority's certificate (DER), which must have signed itself.

    Raises ProtocolError (NOT_AUTHENTIC) for anything else.
    """
    try:
        parsed = x509.load_der_x509_certificate(authority)
        names = _CLUSTER_URI.fullmatch(_uri_of(parsed))
        parsed.verify_directly_issued_by(parsed)
        signs = parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        signs &= isinstance(parsed.public_key(), PublicKey)
    except (InvalidSignature, *_UNREADABLE):
        names, signs = None, False
    if names is None or not signs:
        raise _not_authentic("the certificate is not that of a cluster's authority")
    return names[1]


def vouched(certificate: bytes, by: bytes, cluster_id: str) -> tuple[float, float]:
    """Return the times from and until which an authority `by` vouches for the key in `certificate` (all DER).

    In seconds since 1970. Raises ProtocolError (NOT_AUTHENTIC) when it does not, or for another cluster.
    """
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        names = _CLUSTER_URI.fullmatch(_uri_of(parsed))
        signs = parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        parsed.verify_directly_issued_by(x509.load_der_x509_certificate(by))
        authority_key(certificate)
    except (InvalidSignature, AssertionError, *_UNREADABLE):
        names, signs = None, False
    if names is None or not signs or names[1] != cluster_id:
        raise _not_authentic("the former authority did not sign the certificate of this one")
    return parsed.not_valid_before_utc.timestamp(), parsed.not_valid_after_utc.timestamp()


def key_id(authority: bytes) -> str:
    """Return the id of the key in an authority's certificate (DER). Certificates name their signer by it.

    Raises ProtocolError (NOT_AUTHENTIC) for anything else.
    """
    try:
        return x509.SubjectKeyIdentifier.from_public_key(authority_key(authority)).digest.hex()
    except (AssertionError, *_UNREADABLE):
        raise _not_authentic("the certificate is not that of a cluster's authority") from None


def fingerprint(key: PublicKey) -> str:
    """Return SHA-256 of a public key (its SubjectPublicKeyInfo), as 64 hex digits."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def authority_key(authority: bytes) -> PublicKey:
    """Return the public key in an authority's certificate (DER), which `cluster_of` has judged."""
    key = x509.load_der_x509_certificate(authority).public_key()
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
    """Return the hash in a join token: 16 bytes of SHA-256 of the authority's certificate (DER)."""
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
    """Return one PEM text of certificates (DER)."""
    return b"".join(
        x509.load_der_x509_certificate(certificate).public_bytes(Encoding.PEM) for certificate in certificates
    )


def certificates_from_pem(pem: bytes) -> list[bytes]:
    """Return the certificates (DER) in a PEM text, in order. Raises ValueError when there is none."""
    try:
        return [parsed.public_bytes(Encoding.DER) for parsed in x509.load_pem_x509_certificates(pem)]
    except _UNREADABLE:
        raise ValueError("there is no certificate in it that can be read") from None


def _signed_itself(certificate: bytes) -> bool:
    parsed = x509.load_der_x509_certificate(certificate)
    try:
        parsed.verify_directly_issued_by(parsed)
    except (InvalidSignature, *_UNREADABLE):
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
        .add_extension(_usage(key_cert_sign=True), critical=True)
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
    return datetime.fromtimestamp(min(max(int(seconds), 0), VALID_UNTIL.timestamp()), UTC)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _uri(text: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(text)])


def _uri_of(certificate: x509.Certificate) -> str:
    """Return the only name in a certificate, or an empty string where there are others."""
    names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    return str(names[0].value) if len(names) == 1 else ""


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _not_authentic(detail: str) -> ProtocolError:
    return ProtocolError(detail, Code.NOT_AUTHENTIC)
