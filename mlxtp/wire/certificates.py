"""Certificates (DER) of a cluster: how to make, read and judge them. Bytes in, bytes out; no file, no clock.

An authority certifies for each member that a P-256 key belongs to a node id. A certificate's only name is a
URI: `mlxtp:cluster:CLUSTER` or `mlxtp:node:CLUSTER:NODE`. Certificates do not expire, so no clock matters.
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

_CLUSTER_URI = re.compile(r"mlxtp:cluster:([0-9a-f]{16})")
_NODE_URI = re.compile(r"mlxtp:node:([0-9a-f]{16}):([0-9a-f]{32})")

_USES = (
    "digital_signature", "key_cert_sign", "content_commitment", "key_encipherment", "data_encipherment",
    "key_agreement", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip
#: Errors of the parser for bytes that are no certificate of mlxtp.
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
    node_id: str
    cluster_id: str
    fingerprint: str  #: of its key, as in `fingerprint`


@dataclass(frozen=True, slots=True)
class MemberCertificates:
    certificate: bytes
    authority: bytes

    @property
    def cluster_id(self) -> str:
        return cluster_of(self.authority)

    def to_pem(self) -> bytes:
        return certificates_to_pem(self.certificate, self.authority)

    @classmethod
    def from_pem(cls, pem: bytes) -> MemberCertificates:
        """Read a member's file. Raises ValueError for any other."""
        found = certificates_from_pem(pem)
        if len(found) != 2:
            raise ValueError(f"it holds {len(found)} certificates instead of 2")
        return cls(*found)


@dataclass(frozen=True, slots=True)
class Authority:
    certificate: bytes
    key: PrivateKey = field(repr=False)

    def certify(self, node_id: str, key: PublicKey) -> bytes:
        cluster_id = cluster_of(self.certificate)
        issuer = self.key.public_key()
        uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = (
            _builder(f"mlxtp node {node_id}", key)
            .issuer_name(_name(f"mlxtp cluster {cluster_id}"))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage("digital_signature"), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(_uri(f"mlxtp:node:{cluster_id}:{node_id}"), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer), critical=False)
        )
        return builder.sign(self.key, hashes.SHA256()).public_bytes(Encoding.DER)


def found(cluster_id: str, key: PrivateKey) -> Authority:
    name = f"mlxtp cluster {cluster_id}"
    builder = (
        _builder(name, key.public_key())
        .issuer_name(_name(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign"), critical=True)
        .add_extension(_uri(f"mlxtp:cluster:{cluster_id}"), critical=False)
    )
    return Authority(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER), key)


def authority_of(certificate: bytes, key: PrivateKey) -> Authority:
    """Join a certificate and its key. Raises ProtocolError (NOT_AUTHENTIC) if they do not match."""
    cluster_of(certificate)
    if fingerprint(authority_key(certificate)) != fingerprint(key.public_key()):
        raise _not_authentic("the authority's certificate and key do not belong together")
    return Authority(certificate, key)


def new_key() -> PrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


# --- reading and judging ---------------------------------------------------------------------------------
# Except for `authority_key`, functions raise ProtocolError (NOT_AUTHENTIC) for other certificates.


def check_node(certificate: bytes, authority: bytes) -> NodeIdentity:
    """Return the identity in a certificate that `authority` signed; check the signature first."""
    cluster_id = cluster_of(authority)
    try:
        _parsed(certificate).verify_directly_issued_by(_parsed(authority))
    except _UNREADABLE:
        fault = f"the certificate was not made by the authority of cluster {cluster_id}"
        raise _not_authentic(fault) from None
    node = read_node(certificate)
    if node.cluster_id != cluster_id:
        raise _not_authentic(f"the certificate is for cluster {node.cluster_id}, not {cluster_id}")
    return node


def read_node(certificate: bytes) -> NodeIdentity:
    """Return the identity in a member's certificate, unchecked."""
    try:
        parsed = _parsed(certificate)
        names = _NODE_URI.fullmatch(_uri_of(parsed))
        key = parsed.public_key()
    except _UNREADABLE:
        names = None
    if names is None or not isinstance(key, PublicKey):
        raise _not_authentic("this is no node's certificate")
    return NodeIdentity(names[2], names[1], fingerprint(key))


def cluster_of(authority: bytes) -> str:
    """Return the cluster id in an authority's self-signed certificate."""
    try:
        parsed = _parsed(authority)
        names = _CLUSTER_URI.fullmatch(_uri_of(parsed))
        parsed.verify_directly_issued_by(parsed)
        signs = parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        if names is not None and signs and isinstance(parsed.public_key(), PublicKey):
            return names[1]
    except _UNREADABLE:
        pass
    raise _not_authentic("this is no certificate of a cluster's authority")


def fingerprint(key: PublicKey) -> str:
    """Return SHA-256 of a public key (its SubjectPublicKeyInfo), as 64 hex digits."""
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def authority_key(authority: bytes) -> PublicKey:
    """Return the public key in an authority's certificate. Call `cluster_of` first to check it."""
    key = _parsed(authority).public_key()
    assert isinstance(key, PublicKey)
    return key


def sign(key: PrivateKey, label: bytes, *parts: bytes) -> bytes:
    """Sign the parts together (ECDSA with SHA-256, DER). `label` names the purpose."""
    return key.sign(label + hash_of(*parts), _ECDSA)


def is_signed(key: PublicKey, signature: bytes, label: bytes, *parts: bytes) -> bool:
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
    return key.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)


def key_at(point: bytes) -> PublicKey:
    return ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), point)


def key_to_pem(key: PrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def key_from_pem(pem: bytes) -> PrivateKey:
    """Read a private key. Raises ValueError if there is none, or it is not on P-256."""
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
    """Read certificates. Raises ValueError if there is none."""
    try:
        return [parsed.public_bytes(Encoding.DER) for parsed in x509.load_pem_x509_certificates(pem)]
    except _UNREADABLE:
        raise ValueError("there is no certificate in it that can be read") from None


def _parsed(certificate: bytes) -> x509.Certificate:
    return x509.load_der_x509_certificate(certificate)


def _builder(subject: str, key: PublicKey) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(VALID_FROM)
        .not_valid_after(VALID_UNTIL)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _uri(text: str) -> x509.SubjectAlternativeName:
    return x509.SubjectAlternativeName([x509.UniformResourceIdentifier(text)])


def _uri_of(certificate: x509.Certificate) -> str:
    """Return the only name in a certificate, or an empty string if it has several."""
    names = list(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    return str(names[0].value) if len(names) == 1 else ""


def _usage(use: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{each: each == use for each in _USES})


def _not_authentic(detail: str) -> ProtocolError:
    return ProtocolError(detail, Code.NOT_AUTHENTIC)
