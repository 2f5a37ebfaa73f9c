"""Proofs: nothing but the same key, epoch, rank, nonce and purpose gives the same one."""

from __future__ import annotations

from itertools import combinations

from mlxtp.wire.messages import digests_in, epoch_digest, hello_proof, verify, welcome_proof

KEY, OTHER = b"k" * 32, b"K" * 32
NONCE = b"n" * 16


def test_every_part_counts() -> None:
    proofs = [
        hello_proof(KEY, 1, 1, NONCE),
        welcome_proof(KEY, 1, 1, NONCE),
        hello_proof(OTHER, 1, 1, NONCE),
        hello_proof(KEY, 2, 1, NONCE),
        hello_proof(KEY, 1, 2, NONCE),
        hello_proof(KEY, 1, 1, b"m" * 16),
    ]
    assert [proof.hex()[::16] for proof in proofs[:2]] == ["d708", "7153"]
    assert not any(verify(one, other) for one, other in combinations(proofs, 2))


def test_verify() -> None:
    proof = hello_proof(KEY, 1, 1, NONCE)
    assert verify(hello_proof(KEY, 1, 1, NONCE), proof)
    assert not verify(b"", proof)
    assert not verify(proof[:-1], proof)


def test_the_digest_of_an_epoch_fits_32_bits() -> None:
    digests = {epoch_digest(key, epoch) for key in (KEY, OTHER) for epoch in range(1, 100)}
    assert len(digests) == 198
    assert epoch_digest(KEY, 1) == 0xD860C33B


def test_digests_that_stand_in_a_row() -> None:
    assert digests_in(b"a" * 16 + b"b" * 16) == (b"a" * 16, b"b" * 16)
