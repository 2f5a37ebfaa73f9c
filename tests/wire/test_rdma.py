"""The matrix of RDMA devices: what JACCL can use is taken, and each way to err has words of its own."""

from __future__ import annotations

import json

import pytest

from mlxtp.wire.messages import MAX_RANKS
from mlxtp.wire.rdma import MAX_ENTRY, MAX_SIZE, Matrix, device_file, fault, flat, peers, square

PAIR: Matrix = (("", "rdma_en5"), ("rdma_en4", ""))
TWO_CABLES: Matrix = (("", "rdma_en5,rdma_en3"), ("rdma_en4,rdma_en2", ""))


def mesh(size: int) -> Matrix:
    return tuple(
        tuple("" if rank == peer else f"rdma_en{peer}" for peer in range(size)) for rank in range(size)
    )


def ring(size: int, lanes: int = 1) -> Matrix:
    def entry(rank: int, peer: int) -> str:
        return ",".join(f"rdma_en{peer}{lane}" for lane in range(lanes)) if joined(rank, peer) else ""

    def joined(rank: int, peer: int) -> bool:
        return rank != peer and (rank - peer) % size in (1, size - 1)

    return tuple(tuple(entry(rank, peer) for peer in range(size)) for rank in range(size))


def but(matrix: Matrix, rank: int, peer: int, entry: str) -> Matrix:
    """`matrix` with another entry."""
    rows = [list(row) for row in matrix]
    rows[rank][peer] = entry
    return tuple(map(tuple, rows))


@pytest.mark.parametrize("size", range(2, MAX_RANKS + 1))
def test_whole_meshes_and_rings_have_no_fault(size: int) -> None:
    assert fault(mesh(size), ring=False) is None
    assert fault(mesh(size), ring=True) is None
    assert fault(ring(size), ring=True) is None
    assert fault(ring(size, lanes=4), ring=True) is None


@pytest.mark.parametrize("ring", [True, False])
def test_two_ranks_may_have_two_cables_and_names_of_other_systems(ring: bool) -> None:
    assert fault(TWO_CABLES, ring=ring) is None
    assert fault((("", "mlx5_0"), ("rxe0.1-a", "")), ring=ring) is None


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ((), "joins 2 to 8 ranks; this RDMA matrix has 0 rows"),
        ((("",),), "joins 2 to 8 ranks; this RDMA matrix has 1 rows"),
        (mesh(9), "joins 2 to 8 ranks; this RDMA matrix has 9 rows"),
        ((("", "rdma_en5"), ("rdma_en4",)), "row 1 of the RDMA matrix has 1 entries"),
        (but(PAIR, 1, 1, "rdma_en9"), "rank 1 has rdma_en9 as its RDMA device to itself"),
        (but(PAIR, 0, 1, "en 5"), "'en 5' of rank 0 cannot be the name"),
        (but(PAIR, 0, 1, "../../etc/passwd"), "cannot be the name"),
        (but(PAIR, 0, 1, "5"), "cannot be the name"),
        (but(PAIR, 0, 1, "rdma_en5,"), "'' of rank 0 cannot be the name"),
        (but(PAIR, 0, 1, "rdma_en5\n"), "cannot be the name"),
        (but(PAIR, 0, 1, "r" * 61), "cannot be the name"),
        (but(mesh(3), 0, 2, "rdma_en1"), "rank 0 has rdma_en1 for rank 1 and again for rank 2; one device"),
        (but(PAIR, 0, 1, "rdma_en5,rdma_en5"), "rank 0 has rdma_en5 for rank 1 and again for rank 1"),
        (but(PAIR, 1, 0, ""), "rank 0 has rdma_en5 for rank 1, which has no RDMA device for rank 0"),
        (but(PAIR, 0, 1, ""), "rank 1 has rdma_en4 for rank 0, which has no RDMA device for rank 1"),
        (ring(4), "ranks 0 and 2 have no RDMA device for each other; each two ranks of a mesh need"),
        (but(mesh(5), 4, 3, ""), "rank 3 has rdma_en4 for rank 4, which has no"),
        (
            but(TWO_CABLES, 0, 1, "rdma_en5"),
            "rank 0 has 1 RDMA devices for rank 1 and 2 the other way; a cable",
        ),
    ],
)
def test_what_no_mesh_may_have(matrix: Matrix, words: str) -> None:
    assert words in fault(matrix, ring=False)


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        (
            but(but(ring(4), 1, 2, ""), 2, 1, ""),
            "ranks 1 and 2 have no RDMA device for each other; each two nei",
        ),
        (but(ring(4), 3, 0, ""), "rank 0 has rdma_en30 for rank 3, which has no RDMA device for rank 0"),
        (but(ring(3, 2), 1, 2, "rdma_en9"), "rank 0 has 2 RDMA devices for rank 1, rank 1 has 1 for rank 2"),
        (ring(2, lanes=5), "rank 0 has 5 RDMA devices for rank 1; JACCL uses at most 4"),
    ],
)
def test_what_no_ring_may_have(matrix: Matrix, words: str) -> None:
    assert words in fault(matrix, ring=True)


def test_who_is_joined_with_whom() -> None:
    assert peers(0, 2, ring=True) == [1]
    assert peers(0, 4, ring=True) == [1, 3]
    assert peers(2, 4, ring=False) == [0, 1, 3]


@pytest.mark.parametrize("matrix", [PAIR, TWO_CABLES, mesh(8), ring(5)])
def test_a_matrix_travels_as_its_entries(matrix: Matrix) -> None:
    assert square(flat(matrix), len(matrix)) == matrix


def test_none_is_as_good_as_nothing() -> None:
    pair = ((None, "rdma_en5"), ("rdma_en4", None))
    assert fault(pair, ring=False) is None
    assert square(flat(pair), 2) == PAIR
    assert device_file(pair) == device_file(PAIR)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_too_few_and_too_many_entries(count: int) -> None:
    with pytest.raises(ValueError, match=f"2 ranks has 4 entries, not {count}"):
        square(("",) * count, 2)


def test_jaccl_reads_null_a_name_or_a_list() -> None:
    assert json.loads(device_file(PAIR)) == [[None, "rdma_en5"], ["rdma_en4", None]]
    assert json.loads(device_file(TWO_CABLES)) == [
        [None, ["rdma_en5", "rdma_en3"]],
        [["rdma_en4", "rdma_en2"], None],
    ]


def test_the_longest_entry_fits_a_bootstrap() -> None:
    longest = ",".join(letter * 60 for letter in "abcd")
    assert fault((("", longest), (longest, "")), ring=True) is None
    assert len(longest) <= MAX_ENTRY
    assert MAX_SIZE == MAX_RANKS
