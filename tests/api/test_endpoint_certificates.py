"""Certificates for HTTPS: those in files that a user named, and the one that this Mac makes."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from mlxtp.api.endpoint import OWN, OWN_CERTIFICATE, VALID, Tls, make, own_tls, renewed, tls_of_files, why_new
from mlxtp.errors import ConfigError

from ..live_cluster import WAIT_S

NOW = datetime(2026, 6, 1, 12, tzinfo=UTC)
DAY = timedelta(days=1)
NAMES, ADDRESSES = ("studio", "studio.local", "localhost"), ("192.168.1.5", "127.0.0.1", "::1")
PEM = make(NAMES, ADDRESSES, NOW)
OTHER = make(NAMES, ADDRESSES, NOW)


def parts(pem: bytes) -> tuple[bytes, bytes]:
    """Certificate and key."""
    at = pem.index(b"-----BEGIN PRIVATE KEY-----")
    return pem[:at], pem[at:]


def files(folder: Path, certificate: bytes, key: bytes) -> tuple[str, str]:
    (folder / "cert.pem").write_bytes(certificate)
    (folder / "key.pem").write_bytes(key)
    (folder / "key.pem").chmod(0o600)
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_what_stands_in_it() -> None:
    certificate = x509.load_pem_x509_certificate(PEM)
    assert certificate.not_valid_before_utc < NOW
    assert certificate.not_valid_after_utc - certificate.not_valid_before_utc == VALID <= timedelta(days=397)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert load_pem_private_key(PEM, None).public_key() == certificate.public_key()


def test_it_is_made_once_and_kept_for_this_user_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mlxtp"):
        first = own_tls(tmp_path, NAMES, ADDRESSES, NOW)
        again = own_tls(tmp_path, NAMES[1:], ADDRESSES[:1], NOW + 30 * DAY)
    assert first.certificate == again.certificate == (tmp_path / OWN_CERTIFICATE).read_text()
    assert "PRIVATE" not in first.certificate
    assert (tmp_path / OWN).stat().st_mode & 0o777 == 0o600
    [record] = caplog.records
    assert record.getMessage() == (
        "a certificate was made for studio, studio.local, localhost, 192.168.1.5, 127.0.0.1, ::1: there was "
        "none"
    )


def test_its_fingerprint_is_what_other_tools_show(tmp_path: Path) -> None:
    tls = own_tls(tmp_path, NAMES, ADDRESSES, NOW)
    shown = subprocess.run(
        ["openssl", "x509", "-in", tmp_path / OWN_CERTIFICATE, "-noout", "-fingerprint", "-sha256"],
        capture_output=True, text=True, timeout=WAIT_S, check=True,
    )  # fmt: skip
    assert shown.stdout.strip().rpartition("=")[2] == tls.fingerprint


@pytest.mark.parametrize(
    ("pem", "names", "addresses", "now", "why"),
    [
        (PEM, NAMES, ADDRESSES, NOW, ""),
        (PEM, NAMES[:1], (), NOW, ""),
        (PEM, NAMES, ADDRESSES, NOW + VALID * 0.89, ""),
        (PEM, NAMES, ADDRESSES, NOW + VALID * 0.91, "the old one holds until 2027-07-02 only"),
        (PEM, NAMES, ADDRESSES, NOW + VALID, "the old one expired on 2027-07-02"),
        (PEM, NAMES, ADDRESSES, NOW - 2 * DAY, "the old one holds from 2026-05-31 on only"),
        (PEM, (*NAMES, "mini.local"), ADDRESSES, NOW, "the old one is not for mini.local"),
        (PEM, NAMES, (*ADDRESSES, "10.0.0.1"), NOW, "the old one is not for 10.0.0.1"),
        (b"", NAMES, ADDRESSES, NOW, "there was none"),
        (b"garbage", NAMES, ADDRESSES, NOW, "the old one cannot be used"),
        (parts(PEM)[0], NAMES, ADDRESSES, NOW, "the old one cannot be used"),
        (parts(PEM)[1], NAMES, ADDRESSES, NOW, "the old one cannot be used"),
        (parts(PEM)[0] + parts(OTHER)[1], NAMES, ADDRESSES, NOW, "the old one cannot be used"),
    ],
)
def test_when_another_one_is_made(
    pem: bytes, names: tuple[str, ...], addresses: tuple[str, ...], now: datetime, why: str
) -> None:
    assert why_new(pem, (*names, *addresses), now) == why


def test_a_running_server_goes_on_with_the_next_one(tmp_path: Path) -> None:
    """New connections are shown it, in the same context; names that came up meanwhile are no reason."""
    tls = own_tls(tmp_path, NAMES, ADDRESSES, NOW)
    assert renewed(tls, tmp_path, (*NAMES, "new.local"), ADDRESSES, NOW + VALID * 0.89) is tls
    late = NOW + VALID * 0.91
    following = renewed(tls, tmp_path, (*NAMES, "new.local"), ADDRESSES, late)
    assert following.context is tls.context
    assert following.certificate == (tmp_path / OWN_CERTIFICATE).read_text() != tls.certificate
    assert shown(following) == ssl.PEM_cert_to_DER_cert(following.certificate)
    assert renewed(following, tmp_path, NAMES, ADDRESSES, late) is following
    (tmp_path / OWN_CERTIFICATE).unlink()  # cut short half-way: the next look goes on
    assert renewed(tls, tmp_path, NAMES, ADDRESSES, late) == following
    assert (tmp_path / OWN_CERTIFICATE).exists()


def shown(tls: Tls) -> bytes | None:
    """The certificate that a client is shown, DER."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    one, other = socket.socketpair()
    with one, other, ThreadPoolExecutor() as pool:
        serving = pool.submit(tls.context.wrap_socket, one, server_side=True)
        with trusting.wrap_socket(other) as client, serving.result(WAIT_S):
            return client.getpeercert(binary_form=True)


def test_one_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    own_tls(tmp_path, NAMES, ADDRESSES, NOW)
    (tmp_path / OWN).chmod(0o644)
    with pytest.raises(ConfigError, match=f"remove it together with {OWN_CERTIFICATE}"):
        own_tls(tmp_path, NAMES, ADDRESSES, NOW)


def test_a_certificate_and_its_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tls = tls_of_files(*files(tmp_path, *parts(PEM)), NOW)
    assert ssl.PEM_cert_to_DER_cert(tls.certificate) == ssl.PEM_cert_to_DER_cert(parts(PEM)[0].decode())
    assert tls.context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert caplog.records == []


def test_the_first_of_a_chain_is_the_servers(tmp_path: Path) -> None:
    chain = parts(PEM)[0] + parts(OTHER)[0]
    assert tls_of_files(*files(tmp_path, chain, parts(PEM)[1]), NOW).certificate == parts(PEM)[0].decode()
    with pytest.raises(ConfigError, match="has to be the first in its file"):
        tls_of_files(*files(tmp_path, chain, parts(OTHER)[1]), NOW)


def test_one_that_does_not_hold_now_is_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = files(tmp_path, *parts(PEM))
    tls_of_files(*paths, NOW + 2 * VALID)
    tls_of_files(*paths, NOW - 2 * DAY)
    expired, early = [record.getMessage() for record in caplog.records]
    assert "expired on 2027-07-02; clients will refuse it" in expired
    assert "holds from 2026-05-31 on only" in early
    assert paths[0] in expired


ENCRYPTED = load_pem_private_key(parts(PEM)[1], None).private_bytes(
    Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")
)


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        (b"", parts(PEM)[1], "--http-cert {cert}: there is no certificate in it that can be read"),
        (b"\x30\x82\x00", parts(PEM)[1], "--http-cert {cert}: there is no certificate in it"),
        (parts(PEM)[1], parts(PEM)[1], "--http-cert {cert}: there is no certificate in it"),
        (parts(PEM)[0], b"", "--http-key {key}: there is no private key in it that can be read"),
        (parts(PEM)[0], parts(PEM)[0], "--http-key {key}: there is no private key in it"),
        (parts(PEM)[0], ENCRYPTED, "--http-key {key}: the key has a password, and mlxtp does not prompt"),
        (
            parts(PEM)[0],
            parts(OTHER)[1],
            "--http-key {key} is not the private key of the certificate in {cert}",
        ),
    ],
)
def test_files_that_will_not_do(tmp_path: Path, certificate: bytes, key: bytes, words: str) -> None:
    paths = files(tmp_path, certificate, key)
    with pytest.raises(ConfigError) as refused:
        tls_of_files(*paths, NOW)
    assert refused.value.detail.startswith(words.format(cert=paths[0], key=paths[1]))


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    certificate, key = files(tmp_path, *parts(PEM))
    (tmp_path / "link.pem").symlink_to(key)
    Path(key).chmod(0o640)
    with pytest.raises(ConfigError, match=rf"can be read or changed by other users .* chmod 600 '{key}'"):
        tls_of_files(certificate, key, NOW)
    Path(key).chmod(0o600)
    assert tls_of_files(certificate, str(tmp_path / "link.pem"), NOW)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    certificate, key = files(tmp_path, *parts(PEM))
    with pytest.raises(ConfigError, match=r"--http-cert .*/none: No such file or directory"):
        tls_of_files(str(tmp_path / "none"), key, NOW)
    with pytest.raises(ConfigError, match=r"--http-key .*/none: No such file or directory"):
        tls_of_files(certificate, str(tmp_path / "none"), NOW)
    with pytest.raises(ConfigError, match=r"--http-cert .*: Is a directory"):
        tls_of_files(str(tmp_path), key, NOW)
