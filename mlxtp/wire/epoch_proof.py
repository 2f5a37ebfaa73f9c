"""Proofs that both ends of a decode link hold the key of one epoch (HMAC-SHA256, a label for each use)."""

from __future__ import annotations

import hashlib
import hmac
import struct

_HELLO = b"mlxtp hello\0"
_WELCOME = b"mlxtp welcome\0"
_EPOCH = b"mlxtp epoch\0"


def hello_proof(key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    """The 32 bytes by which rank `rank` shows in its Hello that it holds `key`; `nonce` is the Hello's."""
    return _proof(_HELLO, key, epoch, rank, nonce)


def welcome_proof(key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    """The 32 bytes by which rank 0 answers the Hello of `rank` that carried `nonce`."""
    return _proof(_WELCOME, key, epoch, rank, nonce)


def verify(proof: bytes, expected: bytes) -> bool:
    """Whether a received proof is the expected one, in a time that does not tell how much of it is."""
    return hmac.compare_digest(proof, expected)


def epoch_digest(key: bytes, epoch: int) -> int:
    """32 bits that every rank of the epoch computes alike: its part of the group's proof by value."""
    digest = hmac.digest(key, _EPOCH + struct.pack(">Q", epoch), hashlib.sha256)
    return int.from_bytes(digest[:4], "big")


def _proof(label: bytes, key: bytes, epoch: int, rank: int, nonce: bytes) -> bytes:
    return hmac.digest(key, label + struct.pack(">QI", epoch, rank) + nonce, hashlib.sha256)
