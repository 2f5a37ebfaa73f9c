"""Proofs that both ends of a decode link hold the key of one epoch (HMAC-SHA256, a label for each use)."""

from __future__ import annotations

import hashlib
import hmac
import struct

_HELLO = b"mlxtp hello\0"
_WELCOME = b"mlxtp welcome\0"
_EPOCH = b"mlxtp epoch\0"


def hello_proof(key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    """Return the 32 bytes that prove, in a Hello of `rank` with this `nonce`, that it holds `key`."""
    return _proof(_HELLO, key, epoch, rank, nonce)


def welcome_proof(key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    """Return the 32 bytes with which rank 0 replies to the Hello of `rank` that carried `nonce`."""
    return _proof(_WELCOME, key, epoch, rank, nonce)


def verify(proof: bytes, expected: bytes) -> bool:
    """Compare a received proof with the expected one, in constant time."""
    return hmac.compare_digest(proof, expected)


def epoch_digest(key: bytes, epoch: int) -> int:
    """Return 32 bits that every rank of the epoch computes alike: its part of the group's proof by value."""
    digest = hmac.digest(key, _EPOCH + struct.pack(">Q", epoch), hashlib.sha256)
    return int.from_bytes(digest[:4], "big")


def _proof(label: bytes, key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(key, label + struct.pack(">QI", epoch, rank) + nonce, hashlib.sha256)
