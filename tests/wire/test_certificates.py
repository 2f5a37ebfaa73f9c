"""Certificates: what they say comes back, and nothing passes that the cluster's authority did not make."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from mlxtp.errors import Code, ProtocolError
from mlxtp.wire import certificates
from mlxtp.wire.certificates import (
    MemberCertificates,
    NodeIdentity,
    authority_hash,
    certificates_from_pem,
    certificates_to_pem,
    check_node,
    cluster_of,
    fingerprint,
    found,
    hash_of,
    is_signed,
    key_at,
    key_from_pem,
    key_to_pem,
    new_key,
    point_of,
    read_node,
    sign,
)
from mlxtp.wire.peer_messages import MAX_CERTIFICATE_BYTES

CLUSTER, OTHER_CLUSTER = "c1" * 8, "c2" * 8
NODE = "a1" * 16

KEY = new_key()
AUTHORITY = found(CLUSTER, new_key())
CERTIFICATE = AUTHORITY.certify(NODE, KEY.public_key())


def refused(act: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(ProtocolError) as caught:
        act(*arguments)
    assert caught.value.code is Code.NOT_AUTHENTIC
    return caught.value.detail


def test_what_a_certificate_says() -> None:
    node = NodeIdentity(NODE, CLUSTER, fingerprint(KEY.public_key()))
    assert check_node(CERTIFICATE, AUTHORITY.certificate) == read_node(CERTIFICATE) == node
    assert cluster_of(AUTHORITY.certificate) == CLUSTER
    assert MemberCertificates(CERTIFICATE, AUTHORITY.certificate).cluster_id == CLUSTER
    assert len(node.fingerprint) == 64


@pytest.mark.parametrize(
    ("certificate", "limits"),
    [
        (CERTIFICATE, x509.BasicConstraints(ca=False, path_length=None)),
        (AUTHORITY.certificate, x509.BasicConstraints(ca=True, path_length=0)),
    ],
)
def test_no_clock_cuts_a_member_off_and_none_certifies_others(
    certificate: bytes, limits: x509.BasicConstraints
) -> None:
    """TLS compares these with the clock of a Mac, which may stand at 1970, or ten years ahead."""
    parsed = x509.load_der_x509_certificate(certificate)
    assert parsed.not_valid_before_utc.timestamp() == 0
    assert parsed.not_valid_after_utc.year == 9999
    assert parsed.extensions.get_extension_for_class(x509.BasicConstraints).value == limits
    assert {each.oid._name for each in parsed.extensions if each.critical} == {"basicConstraints", "keyUsage"}


def test_the_file_of_a_member_gives_back_what_was_written() -> None:
    held = MemberCertificates(CERTIFICATE, AUTHORITY.certificate)
    assert MemberCertificates.from_pem(held.to_pem()) == held
    for others in ((), (AUTHORITY.certificate,) * 2):
        with pytest.raises(ValueError, match=f"holds {1 + len(others)} certificates instead of 2"):
            MemberCertificates.from_pem(certificates_to_pem(CERTIFICATE, *others))


def test_certificates_fit_the_frames_they_travel_in() -> None:
    assert max(len(CERTIFICATE), len(AUTHORITY.certificate)) < MAX_CERTIFICATE_BYTES // 2


@pytest.mark.parametrize("cluster_id", [CLUSTER, OTHER_CLUSTER])
def test_another_authority_does_not_count_under_any_name(cluster_id: str) -> None:
    other = found(cluster_id, new_key())
    assert "was not made by the authority" in refused(check_node, CERTIFICATE, other.certificate)
    stranger = other.certify(NODE, KEY.public_key())
    assert "was not made by the authority" in refused(check_node, stranger, AUTHORITY.certificate)


def test_one_key_for_two_clusters_does_not_join_them() -> None:
    twin = found(OTHER_CLUSTER, AUTHORITY.key)
    assert "authority of cluster c1" in refused(
        check_node, twin.certify(NODE, KEY.public_key()), AUTHORITY.certificate
    )


def test_roles_do_not_mix() -> None:
    assert "no node's certificate" in refused(check_node, AUTHORITY.certificate, AUTHORITY.certificate)
    assert "no certificate of a cluster's authority" in refused(check_node, CERTIFICATE, CERTIFICATE)
    assert "no certificate of a cluster's authority" in refused(cluster_of, CERTIFICATE)


@pytest.mark.parametrize(
    "judge", [read_node, cluster_of, lambda data: check_node(data, AUTHORITY.certificate)]
)
@pytest.mark.parametrize("data", [b"", b"\0", b"0" * 600, CERTIFICATE[:-1], CERTIFICATE + b"\0"])
def test_what_is_no_certificate(judge: Callable[[bytes], object], data: bytes) -> None:
    refused(judge, data)


@pytest.mark.filterwarnings("ignore:Parsed a serial number")
def test_no_changed_bit_says_anything_else() -> None:
    """One byte is not signed: how many bits of the signature's last byte do not count."""
    says, taken = read_node(CERTIFICATE), []
    for place in range(len(CERTIFICATE)):
        changed = bytearray(CERTIFICATE)
        changed[place] ^= 1 << place % 8
        with contextlib.suppress(ProtocolError):
            taken.append(check_node(bytes(changed), AUTHORITY.certificate))
    assert taken in ([], [says])


def test_any_changed_bit_of_an_authority_changes_its_hash_and_ends_its_worth() -> None:
    changed = bytearray(AUTHORITY.certificate)
    changed[-1] ^= 1
    assert "no certificate of a cluster's authority" in refused(cluster_of, bytes(changed))
    expected = authority_hash(AUTHORITY.certificate)
    assert len(expected) == 16
    assert authority_hash(bytes(changed)) != expected


def test_keys_and_certificates_as_text() -> None:
    assert key_to_pem(key_from_pem(key_to_pem(KEY))) == key_to_pem(KEY)
    pair = [CERTIFICATE, AUTHORITY.certificate]
    assert certificates_from_pem(certificates_to_pem(*pair)) == pair
    assert certificates_to_pem(*pair) == b"".join(map(certificates_to_pem, pair))
    assert fingerprint(key_at(point_of(KEY.public_key()))) == fingerprint(KEY.public_key())


RSA_IN_NAME_ONLY = b"-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n"
OTHER_CURVE = key_to_pem(ec.generate_private_key(ec.SECP384R1()))


@pytest.mark.parametrize(
    ("read", "garbage", "words"),
    [
        (key_from_pem, (b"", b"text", RSA_IN_NAME_ONLY, key_to_pem(KEY)[:-40]), "no private key"),
        (key_from_pem, (OTHER_CURVE,), "not one on the curve P-256"),
        (certificates_from_pem, (b"", b"text", certificates_to_pem(CERTIFICATE)[:-40]), "no certificate"),
        (key_at, (b"", b"\4" + b"\1" * 64, b"\4" + b"\0" * 63, b"\0"), "^"),
    ],
)
def test_what_is_no_key_or_certificate(
    read: Callable[[bytes], object], garbage: tuple[bytes, ...], words: str
) -> None:
    for data in garbage:
        with pytest.raises(ValueError, match=words):
            read(data)


def test_a_signature_holds_for_one_key_one_label_and_the_same_parts() -> None:
    key = KEY.public_key()
    signature = sign(KEY, b"join", b"ab", b"c")
    assert is_signed(key, signature, b"join", b"ab", b"c")
    assert hash_of(b"ab", b"c") == hashlib.sha256(b"\0\0\0\2ab\0\0\0\1c").digest()
    others = [
        (new_key().public_key(), b"join", b"ab", b"c"),
        (key, b"left", b"ab", b"c"),
        (key, b"join", b"a", b"bc"),
    ]
    assert not any(is_signed(other, signature, *said) for other, *said in others)


def test_a_secret_does_not_show_in_a_text() -> None:
    assert "key" not in repr(AUTHORITY)


def test_a_certificate_that_may_not_sign_others_is_no_authority() -> None:
    key, name = new_key(), "mlxtp cluster"
    builder = certificates._builder(name, key.public_key())
    builder = builder.issuer_name(certificates._name(name))
    builder = builder.add_extension(certificates._uri(f"mlxtp:cluster:{'0' * 16}"), critical=False)
    for ca in (True, False):
        limits = x509.BasicConstraints(ca=ca, path_length=None)
        made = builder.add_extension(limits, critical=True).sign(key, hashes.SHA256())
        if ca:
            assert cluster_of(made.public_bytes(Encoding.DER)) == "0" * 16
        else:
            with pytest.raises(ProtocolError):
                cluster_of(made.public_bytes(Encoding.DER))
