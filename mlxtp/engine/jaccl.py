"""Needs of a JACCL group: a file, an environment, and an all-gather of bytes among the ranks.

The ranks exchange the addresses of their RDMA connections before there are any. MLX would use a TCP
connection of its own for that. Given a factory, it calls this module instead, which sends those bytes through
the pipe to the agent, whose links are authenticated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..errors import Code, ConfigError, GroupError, LinkError
from ..wire.messages import Gathered, Message, SideChannel
from ..wire.rdma import Matrix, fault, square

Gather = Callable[[bytes, int], bytes]  # `gather(src, n)` returns every rank's n bytes, in rank order
#: `factory(rank, size)`, called once by `init` in the thread that called it.
Factory = Callable[[int, int], Gather]

#: Prefixes of the variables that JACCL reads; its own take precedence over those that begin with MLX_.
_READ_BY_JACCL = ("JACCL_", "MLX_JACCL_")


@dataclass(frozen=True, slots=True)
class JacclFabric:
    """RDMA connections of a JACCL group. With `ring` it joins neighbours only."""

    matrix: Matrix
    ring: bool
    factory: Factory

    @classmethod
    def of(cls, entries: tuple[str, ...], size: int, *, ring: bool, factory: Factory) -> JacclFabric:
        """Read the entries of a Bootstrap. Raises ConfigError for a matrix that JACCL would misread."""
        try:
            matrix = square(entries, size)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if wrong := fault(matrix, ring=ring):
            raise ConfigError(wrong)
        return cls(matrix, ring, factory)

    def environment(self, present: Iterable[str], rank: int, path: str) -> dict[str, str | None]:
        """Return variables to set, and with None those of `present` to remove. `path`: of a `device_file`.

        Inherited variables must not count: the mere presence of one prefers the ring, a missing rank means 0,
        and JACCL_RANK hides MLX_RANK.
        """
        strangers = [name for name in present if name.startswith(_READ_BY_JACCL)]
        variables: dict[str, str | None] = dict.fromkeys(strangers)
        variables |= {"MLX_RANK": str(rank), "MLX_IBV_DEVICES": path}
        if self.ring:
            variables["MLX_JACCL_RING"] = "1"
        return variables


class SideChannelExchange:
    """One rank's end of the side channel, for one `init`. Its content is opaque here.

    `send` sends a message to the agent. `receive` waits the given seconds for the agent's next one and raises
    LinkError (LINK_TIMEOUT) when none comes. `init` holds the GIL except while `receive` waits: only then do
    other threads of this process read links and reply to Pings.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        send: Callable[[Message], object],
        receive: Callable[[float], Message],
        round_s: float,
    ) -> None:
        self._rank = rank
        self._size = world_size
        self._send = send
        self._receive = receive
        self._round_s = round_s
        self._round = 0
        self._failure: GroupError | None = None

    def factory(self, rank: int, size: int) -> Gather:
        """Return `gather` for JACCL. Raises GroupError when JACCL reports another rank or size."""
        if (rank, size) != (self._rank, self._size):
            raise self._failed(
                f"JACCL reports rank {rank} of {size}; this is rank {self._rank} of {self._size}"
            )
        return self.gather

    def gather(self, src: bytes, n: int) -> bytes:
        """Run one round. Raises GroupError when it fails, and then in every later call."""
        if self._failure is not None:
            raise GroupError(self._failure.detail, self._failure.code)
        if len(src) != n:
            raise self._failed(f"JACCL announced {n} bytes and gave {len(src)}")
        self._round += 1
        self._send(SideChannel(self._round, bytes(src)))
        answer = self._answer()
        if not isinstance(answer, Gathered):
            raise self._failed(
                f"the agent sent {type(answer).__name__} while JACCL was forming", Code.SHUTTING_DOWN
            )
        if answer.error:
            raise self._failed(answer.error)
        if answer.round != self._round or len(answer.data) != n * self._size:
            raise self._failed(
                f"{len(answer.data)} bytes came for round {answer.round}, "
                f"expected {n * self._size} for round {self._round}"
            )
        return answer.data

    def _answer(self) -> Message:
        try:
            return self._receive(self._round_s)
        except LinkError as error:
            if error.code is not Code.LINK_TIMEOUT:
                raise
            raise self._failed(
                f"rank {self._rank}: round {self._round} of JACCL's side channel got no reply "
                f"within {self._round_s:g} s"
            ) from None

    def _failed(self, detail: str, code: Code = Code.FORM_FAILED) -> GroupError:
        self._failure = GroupError(detail, code)
        return self._failure
